"""The pool page over `mlx-paged serve` with the demo model: processes, engine and browser.

With POOL_PAGE_PICTURE=docs/pool-page.png in the environment it also writes the README's picture.
"""

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
from PIL import Image
from pool_browser import expect, figure, legend, needs_chromium, opened

pytest_plugins = ["pool_fixtures"]
pytestmark = needs_chromium

PICTURE = os.environ.get("POOL_PAGE_PICTURE")
SYSTEM = (
    "You are a patient teacher of operating systems. You explain one idea at a time, in plain "
    "words, with an example from everyday life, and you compare virtual memory with the way in "
    "which a language model keeps its keys and values. A page is a block of tokens, a page table "
    "is a list of blocks, and a process is a request. Never use more words than you need, and do "
    "not repeat the question. When you are asked for a list, give at most four points, each of "
    "one short sentence. When you don't know something, say so."
)
SOME_WORDS = re.compile(r"\w+ \w+")
QUESTIONS = [
    "Why do operating systems keep memory in pages?",
    "What does a page table hold?",
    "What happens to a page that two processes share when one of them writes to it?",
]


@contextmanager
def serving(model, *options):
    """`mlx-paged serve` on a free port; it must end well on SIGTERM."""
    command = [sys.executable, "-m", "mlx_paged", "serve", "--model", str(model), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--no-access-log", *options], stderr=subprocess.PIPE, text=True
    )
    try:
        said = ""
        while "pool page:" not in said:
            said = process.stderr.readline()
            assert said or process.poll() is None, "the server has ended"
        yield SimpleNamespace(url=said.split()[-1].rstrip("/"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def ask(url, question):
    """Read an answer, of any length, until the server's end or its own."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": 300, "stream": True, "seed": 1}
    try:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
            answer.read()
    except httpx.HTTPError:
        pass


def test_fork_into_4_beside_others_with_the_same_system_prompt(browser, smollm2_path):
    options = ("--num-blocks", "128", "--block-size", "8", "--served-model-name", "smollm2")
    num_others = len(QUESTIONS) if PICTURE else 1
    with (
        ThreadPoolExecutor(num_others) as others,
        serving(smollm2_path, *options, "--shutdown-timeout", "0") as server,
        opened(browser, server, viewport={"width": 1280, "height": 1000}) as page,
    ):
        for i in range(num_others):
            others.submit(ask, server.url, QUESTIONS[i])
            expect(page.locator(".phase").nth(i)).to_have_text("decode")
        fork(page)
        expect(page.locator(".answer .text").nth(3)).to_have_text(SOME_WORDS)
        # The page gets the pool some time after the answers.
        eventually(page, lambda: int(legend(page).nth(3).inner_text()) > 10)
        eventually(page, lambda: int(figure(page, "Blocks copied")) >= 3)
        eventually(page, lambda: figure(page, "Running") == str(num_others + 4))
        if PICTURE:
            take_picture(page)
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("#requests > li")).to_have_count(num_others)


def eventually(page, is_so):
    for _ in range(100):
        if is_so():
            return
        page.wait_for_timeout(50)
    assert is_so()


def fork(page):
    page.locator("#system-part summary").click()
    page.fill("#system", SYSTEM)
    page.fill("#prompt", "Explain copy-on-write with an example.")
    page.fill("#max-tokens", "200")
    page.fill("#temperature", "0.3")
    page.get_by_role("button", name="Fork into 4").click()
    expect(page.locator(".answer .state")).to_contain_text("answering")
    page.locator("#system-part summary").click()


def take_picture(page):
    """Of a pool that is more than half full, with a pointer at a shared block."""
    expect(legend(page).nth(2)).to_have_text(re.compile(r"^(7[2-9]|[89]\d|1\d\d)$"))
    page.set_viewport_size({"width": 1280, "height": 1310})
    page.hover("#grid", position={"x": 190, "y": 20})
    page.screenshot(path=PICTURE)
    Image.open(PICTURE).quantize(200).save(PICTURE, optimize=True)

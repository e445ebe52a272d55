"""The pool page in a browser: chromium, driven by Playwright."""

import shutil
from contextlib import contextmanager

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
expect = sync_api.expect
expect.set_options(timeout=30_000)

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")

PROMPT = "You read the same beginning as others do, and then: "


@contextmanager
def opened(browser, server, *, may_fail=False, **options):
    """The page, connected unless it `may_fail`, in a context of its own.

    Errors in it fail the test, and so does whatever it asks of another host.
    """
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    context.set_default_timeout(15_000)
    page = context.new_page()
    errors, failures, hosts = [], [], set()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: failures.append(said.text) if said.type == "error" else None)
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    try:
        page.goto(server.url)
        if not may_fail:
            wait_for_state(page, "live")
        yield page
        assert not errors
        assert may_fail or not failures
        assert hosts == {server.url.split("/")[2]}
    finally:
        context.close()


def wait_for_state(page, state):
    """Of the connection: live, wait or error."""
    expect(page.locator("#connection")).to_have_attribute("data-state", state)


def send(page, prompt=PROMPT, max_tokens=60, samples=1, button="Send"):
    page.fill("#prompt", prompt)
    page.fill("#max-tokens", str(max_tokens))
    page.fill("#samples", str(samples))
    page.get_by_role("button", name=button, exact=True).click()


def figure(page, name):
    tile = page.locator(".figure", has=page.get_by_text(name, exact=True))
    return tile.locator(".value").inner_text()


def legend(page):
    """The numbers of blocks: free, cached, in use, shared."""
    return page.locator("#legend .number")


def colour_of(page, name):
    """The red, green and blue of one of the style sheet's colours."""
    return page.evaluate(
        """(name) => {
          const context = document.createElement("canvas").getContext("2d");
          context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name);
          context.fillRect(0, 0, 1, 1);
          return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
        }""",
        name,
    )


def pixel(page, block, num_blocks=128):
    """The colour of a block's cell near its lower left corner, as the canvas shows it."""
    return page.evaluate(
        """async ([block, numBlocks]) => {
          const { GridShape } = await import("/page/grid_shape.js");
          const canvas = document.getElementById("cells");
          const width = document.getElementById("grid").clientWidth;
          const shape = new GridShape(numBlocks, width, devicePixelRatio);
          const [x, y] = [shape.x(block) + 3, shape.y(block) + shape.side - 2];
          return [...canvas.getContext("2d").getImageData(x, y, 1, 1).data].slice(0, 3);
        }""",
        [block, num_blocks],
    )

"""The pool page's files and the stream of the pool, as a client gets them."""

import json
import re
import shutil
import subprocess
import time
from contextlib import contextmanager
from itertools import islice

import httpx
import pytest
from pool_server import PoolServer, ScriptedPool, SimulatedPool

from mlx_paged.engine.stats import EngineStats
from mlx_paged.server.engine_client import SHUTTING_DOWN
from mlx_paged.server.messages import PoolView, Table
from mlx_paged.server.page import lines as lines_module
from mlx_paged.server.page.files import page_files

TEXTS = {name: file.content.decode() for name, file in page_files().items()}
SCRIPTS = sorted(name for name in TEXTS if name.endswith(".js"))


def stats(num_blocks=128, **changes):
    return EngineStats(
        **{
            "num_running": 0,
            "num_waiting": 0,
            "num_preemptions": 0,
            "block_size": 4,
            "num_blocks": num_blocks,
            "num_blocks_used": 0,
            "num_blocks_cached": 0,
            "slot_share": 1.0,
            "pool_nbytes": 1,
            "peak_memory_nbytes": 1,
            **changes,
        }
    )


def view(num_running=0, tables=(), copies=()):
    return PoolView(stats(num_running=num_running), [(3, 2)], list(tables), list(copies))


@pytest.fixture
def pool():
    return ScriptedPool()


@pytest.fixture
def server(pool):
    with PoolServer(pool) as server:
        yield server


@contextmanager
def watching(server, **headers):
    """An iterator over the stream's lines, parsed."""
    with (
        httpx.Client(base_url=server.url, timeout=5) as http,
        http.stream("GET", "/pool", headers=headers) as response,
    ):
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/x-ndjson"
        yield (json.loads(line) for line in response.iter_lines())


def next_of(lines, kind):
    """The next line of that type; signs of life between are skipped."""
    for line in lines:
        if line["type"] == kind:
            return line
        assert line["type"] == "Alive", line
    raise AssertionError(f"the stream ended before a {kind}")


def wait_until(condition, seconds=5):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_page_and_its_files_come_with_a_strict_content_security_policy(server):
    for path in ("/", *(f"/page/{name}" for name in TEXTS)):
        response = httpx.get(server.url + path)
        assert response.status_code == 200
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy and "*" not in policy and "data:" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"


def test_scripts_are_served_as_scripts_and_pages_as_pages(server):
    types = {
        path: httpx.get(server.url + path).headers["content-type"]
        for path in ("/", "/page/pool.js", "/page/pool.css", "/page/icon.svg")
    }
    assert types == {
        "/": "text/html; charset=utf-8",
        "/page/pool.js": "text/javascript; charset=utf-8",
        "/page/pool.css": "text/css; charset=utf-8",
        "/page/icon.svg": "image/svg+xml",
    }


def test_file_that_is_known_is_not_sent_again(server):
    first = httpx.get(f"{server.url}/page/pool.js")
    again = httpx.get(
        f"{server.url}/page/pool.js", headers={"If-None-Match": first.headers["etag"]}
    )
    assert (again.status_code, again.content) == (304, b"")
    assert httpx.head(f"{server.url}/").status_code == 200


@pytest.mark.parametrize("name", ["nothing.js", "..%2Froutes.py", "__init__.py", "%00"])
def test_other_files_are_not_there(server, name):
    response = httpx.get(f"{server.url}/page/{name}")
    assert response.status_code == 404
    assert response.json()["error"]["message"]


def test_the_page_is_no_part_of_the_api(server):
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert "/v1/completions" in paths
    assert not [path for path in paths if path == "/" or path.startswith(("/pool", "/page"))]


def test_everything_that_files_refer_to_is_there():
    for name in SCRIPTS:
        for module in re.findall(r'from "\./(.+)"', TEXTS[name]):
            assert module in TEXTS, f"{name} imports {module}"
    for path in re.findall(r'(?:src|href)="(.+?)"', TEXTS["index.html"]):
        assert path.startswith("#") or path.removeprefix("page/") in TEXTS
    used = {module for name in SCRIPTS for module in re.findall(r'from "\./(.+)"', TEXTS[name])}
    assert used == set(SCRIPTS) - {"pool.js"}, "a module that nothing imports"


def test_nothing_refers_to_another_host():
    for name, text in TEXTS.items():
        assert not re.findall(r"(?:https?:)?//[a-z]", text.replace("http://www.w3.org/", "")), name


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_read_no_text_as_html_or_code(name):
    banned = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser"
    )
    assert not re.search(banned, TEXTS[name])


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_well_formed(name):
    if (node := shutil.which("node")) is None:
        pytest.skip("needs node")
    check = [node, "--input-type=module", "--check"]
    result = subprocess.run(check, input=TEXTS[name], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_stream_begins_with_the_engine_and_the_pool_as_it_is(server, pool):
    pool.put(view(num_running=1))
    with watching(server) as lines:
        about = next(lines)
        assert about["type"] == "About" and about["model_name"] == "someone/tiny"
        assert about["engine"]["num_blocks"] == 128 and about["engine"]["attention"] == "gather"
        first = next(lines)
    assert first["type"] == "PoolView" and first["stats"]["num_running"] == 1
    assert first["cached"] == [[3, 2]]


def test_a_change_is_told_at_once(server, pool):
    with watching(server) as lines:
        next_of(lines, "About")
        time.sleep(0.3)
        server.call(pool.put, view(tables=[Table("a", 0, True, [5, 9], 7, 8, 7, 0)]))
        began = time.monotonic()
        told = next_of(lines, "PoolView")
        assert time.monotonic() - began < 0.5
    assert told["tables"][0]["block_table"] == [5, 9]


def test_a_view_like_the_one_before_is_not_sent_again(server, pool):
    with watching(server) as lines:
        next_of(lines, "About")
        for num_running in (1, 1, 1, 2):
            server.call(pool.put, view(num_running))
            time.sleep(0.15)
        sent = [next_of(lines, "PoolView") for _ in range(2)]
    assert [line["stats"]["num_running"] for line in sent] == [1, 2]


def test_without_news_the_stream_says_that_it_lives(server):
    with watching(server) as lines:
        next_of(lines, "About")
        assert next(lines) == {"type": "Alive"}


def test_views_that_come_too_fast_are_left_out_and_their_copies_are_not(server, pool):
    with watching(server) as lines:
        next_of(lines, "About")

        def put_all():
            for i in range(50):
                pool.put(view(num_running=i, copies=[(i, i + 1)]))

        server.call(put_all)
        told = next_of(lines, "PoolView")
    assert told["stats"]["num_running"] == 49
    assert told["copies"] == [[i, i + 1] for i in range(50)]


def test_large_views_are_sent_less_often(server, pool, monkeypatch):
    monkeypatch.setattr(lines_module, "MAX_NBYTES_PER_SECOND", 20_000)
    blocks = list(range(100, 2100))  # about 10 kB, so 2 a second
    with watching(server) as lines:
        next_of(lines, "About")
        times = []
        for i in range(30):
            server.call(pool.put, view(i, [Table("a", 0, True, blocks, 1, 1, 1, 0)]))
            if i in (0, 1):
                next_of(lines, "PoolView")
                times.append(time.monotonic())
    assert 0.3 < times[1] - times[0] < 2


def test_nobody_is_served_after_leaving(server, pool):
    with watching(server) as lines:
        next_of(lines, "About")
        assert len(pool.watchers) == 1
    wait_until(lambda: not pool.watchers)


def test_several_watch_at_once(server, pool):
    with watching(server) as one, watching(server) as other:
        next_of(one, "About"), next_of(other, "About")
        server.call(pool.put, view(7))
        assert next_of(one, "PoolView") == next_of(other, "PoolView")


def test_an_engine_that_is_not_ready_is_told_as_a_sentence_until_it_is(server, pool):
    pool.not_ready = "the engine's process was killed; it is starting again"
    with watching(server) as lines:
        assert next(lines)["reason"] == ("The engine's process was killed; it is starting again.")
        pool.not_ready = None
        assert next_of(lines, "About")["model_name"] == "someone/tiny"
        pool.not_ready = "it died"
        assert next_of(lines, "NotReady")["reason"] == "It died."
        pool.not_ready = None
        assert any(line["type"] == "About" for line in lines)


def test_the_stream_ends_when_the_server_shuts_down(server, pool):
    with watching(server) as lines:
        next_of(lines, "About")
        server.call(pool.end)
        assert [line for line in lines if line["type"] != "Alive"] == []
    pool.not_ready = SHUTTING_DOWN
    with watching(server) as lines:
        told = list(islice(lines, 3))
    assert told == [{"type": "NotReady", "reason": "The server is shutting down."}]


def test_the_pool_needs_the_key_and_the_page_does_not():
    with PoolServer(ScriptedPool(), api_key="secret") as server:
        for headers in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "secret"}):
            refused = httpx.get(f"{server.url}/pool", headers=headers)
            assert refused.status_code == 401
            assert "API key" in refused.json()["error"]["message"]
        assert httpx.get(f"{server.url}/").status_code == 200
        assert httpx.get(f"{server.url}/page/pool.js").status_code == 200
        with watching(server, Authorization="Bearer secret") as lines:
            next_of(lines, "About")


def test_what_a_request_takes_is_seen_and_given_back():
    pool = SimulatedPool(step_seconds=0.01)
    with PoolServer(pool) as server, watching(server) as lines:
        assert next_of(lines, "About") and next_of(lines, "PoolView")["tables"] == []
        body = {"prompt": "a prompt that takes some blocks", "n": 3, "max_tokens": 40}
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}):
            while len(tables := next_of(lines, "PoolView")["tables"]) < 3:
                pass
            shared = set.intersection(*(set(table["block_table"]) for table in tables))
            assert len(shared) == len(body["prompt"]) // 4
            assert len({table["request_id"] for table in tables}) == 1
        while next_of(lines, "PoolView")["tables"]:
            pass

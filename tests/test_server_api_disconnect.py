"""A client that leaves has its request closed at once, whatever it was waiting for."""

import contextlib
import json
import socket
import time
from urllib.parse import urlsplit

import pytest
from fake_client import FOREVER, FakeClient, make_app, serving

PATHS = {
    "/v1/completions": {"prompt": "a", "max_tokens": 5000},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


@pytest.fixture(scope="module")
def served():
    client = FakeClient()
    with serving(make_app(client)) as url:
        yield client, urlsplit(url)


@contextlib.contextmanager
def sending(url, path, body):
    """A connection on which a request was sent; it closes at the end."""
    content = json.dumps(body).encode()
    with socket.create_connection((url.hostname, url.port), timeout=10) as connection:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        connection.sendall(head.encode() + content)
        yield connection


def until(condition, seconds=5):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_leaves_has_its_request_dropped(served, path, stream, phase):
    client, url = served
    client.reset()
    client.reply = lambda prompt, index: FOREVER
    client.step_seconds = 0.002
    client.tokens_per_step = 1
    if phase == "prefill":
        client.first_token_seconds = 60
    with sending(url, path, {**PATHS[path], "stream": stream}) as connection:
        until(lambda: client.opened)
        if phase == "decode":
            until(lambda: client.last.num_sent > 3)
            if stream:
                assert connection.recv(5) == b"HTTP/"
        assert not client.last.is_closed
    until(lambda: client.last.is_closed, seconds=1)
    assert client.last.dropped == [None]


def test_all_prompts_of_a_client_that_leaves_are_dropped(served):
    client, url = served
    client.reset()
    client.reply = lambda prompt, index: FOREVER
    client.step_seconds = 0.002
    body = {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 5000}
    with sending(url, "/v1/completions", body):
        until(lambda: len(client.opened) == 3 and client.last.num_sent > 3)
    until(lambda: all(opened.is_closed for opened in client.opened), seconds=1)


def test_a_client_that_left_is_counted_as_499(served):
    client, url = served
    client.reset()
    client.first_token_seconds = 60
    with sending(url, "/v1/completions", {"prompt": "a"}):
        until(lambda: client.opened)
    until(lambda: client.last.is_closed)

    def metrics():
        with socket.create_connection((url.hostname, url.port)) as connection:
            connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            return connection.makefile().read()

    until(lambda: 'route="/v1/completions",status="499"' in metrics())


def test_two_requests_on_one_connection_are_both_answered(served):
    """What listens for the end of a connection must not swallow its next request."""
    client, url = served
    client.reset()
    client.step_seconds = 0.005
    with sending(url, "/v1/completions", {"prompt": "a"}) as connection:
        content = b'{"prompt": "b"}'
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content)
        )
        answers = connection.makefile().read()
    assert answers.count("HTTP/1.1 200") == 2
    assert [opened.prompt for opened in client.opened] == ["a", "b"]
    assert not any(opened.dropped for opened in client.opened)

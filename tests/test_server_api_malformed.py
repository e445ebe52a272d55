"""Hostile input, by hand: always a 4xx with a message, and the server goes on."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import pytest
from fake_client import FakeClient, make_app, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}
DEEP = 100_000


@pytest.fixture(scope="module")
def served():
    client = FakeClient()
    with serving(make_app(client)) as url:
        yield client, url


@pytest.fixture
def http(served):
    served[0].reset()
    with httpx.Client(base_url=served[1], timeout=20) as http:
        yield http


def check_refused(http, response):
    assert 400 <= response.status_code < 500, response.text
    error = response.json()["error"]
    assert len(error["message"]) > 10
    assert len(response.content) < 5000, "it is not an echo"
    assert http.get("/health").is_success


def message(content):
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nothing",
        b"[]",
        b"null",
        b'"text"',
        b"17",
        b"\xff\xfe",
        b'{"prompt": "\xff", "messages": [{"role": "user", "content": "\xc3"}]}',
        b'{"prompt": "\xed\xa0\x80", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        rb'{"prompt": "\ud800", "messages": [{"role": "user", "content": "\udc00 \ud800"}]}',
        b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
        b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "top_p": Infinity}',
        b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "temperature": 1e999}',
        b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "seed": 1'
        + b"0" * 10_000
        + b"}",
        b"[" * DEEP,
        b'{"a":' * DEEP + b"1" + b"}" * DEEP,
        b'{"prompt":' + b"[" * 190 + b"1" + b"]" * 190 + b"}",
        b'{"messages": [{"role": "user", "content": "a"}], "tools":'
        + b"[" * 190
        + b"]" * 190
        + b"}",
        b'{"x": "' + b"a" * 10_000_000 + b'"}',
        b"\x00" * 100,
        b'{"' + b"k" * 100_000 + b'": 1}',
        "{}".encode("utf-16"),
    ],
    ids=lambda body: repr(body[:20]),
)
def test_bodies_that_are_no_json_or_no_request(http, path, body):
    check_refused(http, http.post(path, content=body, headers=JSON))


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json/x"},
        {"Content-Type": "\x7f"},
        {**JSON, "Content-Encoding": "gzip"},
    ],
)
def test_bodies_under_another_name(http, headers):
    content = (
        b"\x1f\x8b" if "Content-Encoding" in headers else b'{"prompt": "a"}' + b" " * 3_000_000
    )
    check_refused(http, http.post(TEXT, content=content, headers=headers))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "a", "temperature": "x"}),
        (TEXT, {"prompt": "a", "max_tokens": -5}),
        (TEXT, {"prompt": "a", "max_tokens": 10**18}),
        (TEXT, {"prompt": "a", "logit_bias": {"1" * 50: 1}}),
        (TEXT, {"prompt": "a", "logit_bias": {"²": 1}}),
        (TEXT, {"prompt": "a", "logit_bias": [1]}),
        (TEXT, {"prompt": "a", "stop": ["a"] * 100}),
        (TEXT, {"prompt": "a", "stop": "a" * 10_000}),
        (TEXT, {"prompt": ["a"] * 10_000}),
        (TEXT, {"prompt": [2**40]}),
        (TEXT, {"prompt": [1e300]}),
        (TEXT, {"prompt": {"a": 1}}),
        (TEXT, {"prompt": "x" * 3_000_000}),
        (TEXT, {"prompt": "a", "model": "\x00"}),
        (TEXT, {"prompt": "a", "model": {"name": "tiny"}}),
        (TEXT, {"prompt": "a", "cache_salt": 1}),
        (TEXT, {"prompt": "a", "priority": 2**63}),
        (TEXT, {"prompt": "a", "\x00": 1}),
        (TEXT, {"prompt": "a", "__class__": 1}),
        (TEXT, {"prompt": "a", "stream": "yes"}),
        (TEXT, {"prompt": "a", "stream_options": "usage", "stream": True}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": "hi"}),
        (CHAT, {"messages": [None]}),
        (CHAT, {"messages": [[]]}),
        (CHAT, {"messages": [{}]}),
        (CHAT, {"messages": [{"role": ["user"], "content": "a"}]}),
        (CHAT, message({"text": "a"})),
        (CHAT, message([None])),
        (CHAT, message([{"type": "text"}])),
        (CHAT, message([{"type": ["text"], "text": "a"}])),
        (CHAT, message([{"type": "input_audio", "input_audio": {}}])),
        (CHAT, {**message("a"), "tools": {}}),
        (CHAT, {**message("a"), "tools": [{"type": "function"}]}),
        (CHAT, {**message("a"), "tool_choice": 5}),
        (CHAT, {**message("a"), "response_format": {"type": "json_schema"}}),
        (CHAT, {**message("a"), "response_format": {"type": {}}}),
        (CHAT, {**message("a"), "chat_template_kwargs": {"tokenize": False}}),
        (CHAT, {**message("a"), "logprobs": "yes"}),
        (CHAT, {**message("a"), "n": 129}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_fields_that_are_nonsense(http, path, body):
    check_refused(http, http.post(path, json=body))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a" * 1000: {"type": "strin"}}},
        {"type": "object", "properties": []},
        {"anyOf": {}},
        {"type": "string", "pattern": "a" * 1000 + "("},
        {"type": "integer", "minimum": 10**40},
        {"x-guidance": 5},
        {"x-guidance": {"whitespace_pattern": "("}},
    ],
    ids=lambda value: str(value)[:60],
)
def test_schemas_that_are_nonsense(http, schema):
    for strict in (True, False):
        wanted = {"name": "s", "schema": schema, "strict": strict}
        body = {**message("a"), "response_format": {"type": "json_schema", "json_schema": wanted}}
        response = http.post(CHAT, json=body)
        if schema == {"x-guidance": 5}:
            assert response.is_success
        else:
            check_refused(http, response)


def test_odd_text_is_text(http, served):
    """NUL bytes, unpaired marks and directions are what models read every day."""
    for text in ("\x00", "a\x00b", "\u202e\ufeff", "\ufffd", "<eos>", "{{ 1 }}", "{% raw %}"):
        assert http.post(TEXT, json={"prompt": text}).is_success, text
        response = http.post(CHAT, json=message(text))
        assert response.is_success
        assert text in served[0].last.prompt or text == "<eos>"


def test_the_last_of_two_fields_of_one_name_counts(http, served):
    content = b'{"prompt": "a", "n": 0, "n": 2, "prompt": "b"}'
    assert http.post(TEXT, content=content, headers=JSON).is_success
    assert (served[0].last.prompt, served[0].last.params.n) == ("b", 2)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "TRACE", "PROPFIND"])
def test_other_methods(http, method):
    check_refused(http, http.request(method, TEXT))


@pytest.mark.parametrize(
    "path",
    [
        "/%00",
        "/v1/%ff",
        "/v1/models/%00",
        "/v1/models/" + "a" * 5000,
        "/../etc/passwd",
        "/v1//",
    ],
)
def test_odd_paths(http, path):
    check_refused(http, http.get(path))


def raw(served, data):
    """What the server answers to bytes that are no request, and then closes."""
    url = urlsplit(served[1])
    with socket.create_connection((url.hostname, url.port), timeout=10) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return connection.makefile("rb").read()


def test_bytes_that_are_no_http(http, served):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for data in (
        b"\x16\x03\x01\x02\x00",
        head + b"Content-Length: -1\r\n\r\n{}",
        head + b"Content-Length: x\r\n\r\n{}",
        head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ):
        answer = raw(served, data)
        assert answer.startswith(b"HTTP/1.1 4"), data
        assert http.get("/health").is_success


def test_a_body_that_ends_early_reaches_no_engine_and_is_no_mistake_of_ours(http, served, caplog):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    raw(served, head + b'Content-Length: 100\r\n\r\n{"prompt": "a"}')
    while 'route="/v1/completions",status="499"' not in http.get("/metrics").text:
        time.sleep(0.01)
    assert not served[0].opened
    assert not caplog.records


def test_a_long_prompt_keeps_nobody_else_waiting(http):
    """Parsing and tokenizing take seconds here, on a thread of their own."""
    body, url = json.dumps({"prompt": "long " * 300_000}), http.base_url.join(TEXT)
    waits, began = [], time.monotonic()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(httpx.post, url, content=body, headers=JSON, timeout=60)
        while not answer.done():
            asked = time.monotonic()
            assert http.get("/health").is_success
            waits.append(time.monotonic() - asked)
    check_refused(http, answer.result())
    assert max(waits) < (time.monotonic() - began) / 2

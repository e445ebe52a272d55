"""The HTTP side as a whole: errors' shape, keys, bounds, health, counts. The engine is a script."""

import httpx
import pytest
from fake_client import FOREVER, MODEL, FakeClient, make_app, serving
from prometheus_client.parser import text_string_to_metric_families

from mlx_paged.server.api.hosts import LOOPBACK
from mlx_paged.server.api.settings import ServerSettings
from mlx_paged.server.token_stream import (
    EngineDied,
    EngineUnavailable,
    QueueFull,
    RequestFailed,
    RequestRefused,
)

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def served():
    client = FakeClient()
    with serving(make_app(client, cors_origins=("http://friend",))) as url:
        yield client, url


@pytest.fixture
def client(served):
    served[0].reset()
    return served[0]


@pytest.fixture
def http(served):
    with httpx.Client(base_url=served[1]) as http:
        yield http


def error_of(response):
    """The error, whose shape is checked."""
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    return error


def test_alive_and_ready_are_two_things(client, http):
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").status_code == 200
    client.not_ready = "the model loads"
    assert http.get("/health").status_code == 200
    response = http.get("/ready")
    assert response.status_code == 503
    assert error_of(response)["message"] == "the model loads"
    assert int(response.headers["Retry-After"]) > 0


def test_the_model_is_known_by_its_name_and_the_names_last_part(client, http):
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == [MODEL]
    assert http.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
    for name in (MODEL, "tiny"):
        assert http.post("/v1/completions", json={"model": name, "prompt": "a"}).is_success


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_another_model_is_not_found(client, http, path):
    body = {**CHAT, "model": "gpt-9"} if "chat" in path else {"prompt": "a", "model": "gpt-9"}
    response = http.post(f"/v1/{path}", json=body)
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"
    assert error_of(http.get("/v1/models/gpt-9"))["code"] == "model_not_found"
    assert not client.opened


def test_unknown_routes_and_methods_are_errors_of_the_same_shape(client, http):
    assert http.get("/v1/nothing").status_code == 404
    assert "/v1/nothing" in error_of(http.get("/v1/nothing"))["message"]
    response = http.get("/v1/completions")
    assert response.status_code == 405
    assert error_of(response) and response.headers["Allow"] == "POST"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestRefused("it needs 99 blocks, and the pool has 10"), 400),
        (RequestFailed("the engine met an error: out of memory"), 500),
        (EngineDied("the engine's process ended"), 503),
    ],
)
def test_what_the_engine_raises_before_the_first_token_has_a_status(
    client, http, error, status, stream
):
    client.reply = lambda prompt, index: error
    response = http.post("/v1/completions", json={"prompt": "a", "stream": stream})
    assert response.status_code == status
    assert error_of(response)["message"] == str(error)
    assert ("Retry-After" in response.headers) == (status == 503)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_says_when_to_come_back(client, http, stream):
    client.refuse = QueueFull("64 requests wait", 7)
    response = http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    assert (response.status_code, response.headers["Retry-After"]) == (503, "7")
    client.refuse = EngineUnavailable("the model loads")
    assert http.post("/v1/chat/completions", json={**CHAT, "stream": stream}).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_a_mistake_of_ours_is_a_500_and_the_server_goes_on(client, http, stream):
    client.refuse = KeyError("secret")
    response = http.post("/v1/completions", json={"prompt": "a", "stream": stream})
    assert response.status_code == 500
    assert "secret" not in error_of(response)["message"]
    assert response.headers["X-Request-Id"] in error_of(response)["message"]
    client.refuse = None
    assert http.post("/v1/completions", json={"prompt": "a"}).is_success


def test_logits_that_are_no_numbers_end_a_request_with_an_error(client, http):
    client.finish = "error"
    response = http.post("/v1/completions", json={"prompt": "a", "n": 2})
    assert response.status_code == 500
    assert error_of(response)["code"] == "invalid_logits"
    with http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
        last = list(filter(None, response.iter_lines()))[-1]
    assert last.startswith('data: {"error":{"message"') and "invalid_logits" in last


def test_an_answer_that_takes_too_long_is_cut_off():
    client = FakeClient()
    client.reply, client.step_seconds = (lambda prompt, index: FOREVER), 0.01
    body = {"prompt": "a", "max_tokens": 10000}
    with serving(make_app(client, request_timeout=0.2)) as url:
        response = httpx.post(f"{url}/v1/completions", json=body)
        assert response.status_code == 504
        assert error_of(response)["code"] == "timeout"
        assert client.last.is_closed
        lines = httpx.post(f"{url}/v1/completions", json={**body, "stream": True}).text
        assert '"code":"timeout"' in lines and "[DONE]" not in lines
        assert client.last.is_closed


def test_the_key_opens_all_but_health_and_page():
    with serving(make_app(FakeClient(), api_key="sesame")) as url:
        http = httpx.Client(base_url=url)
        for path in ("/health", "/ready", "/"):
            assert http.get(path).status_code == 200, path
        for path in ("/v1/models", "/metrics", "/openapi.json", "/pool", "/healthy", "/page"):
            response = http.get(path)
            assert response.status_code == 401, path
            assert error_of(response)["code"] == "invalid_api_key"
        for header in ("Bearer wrong", "Bearer", "sesame", "Basic sesame", b"Bearer \xff"):
            response = http.get("/v1/models", headers={"Authorization": header})
            assert response.status_code == 401, header
        for header in ("Bearer sesame", "bearer sesame"):
            assert http.get("/v1/models", headers={"Authorization": header}).is_success
        assert not http.post("/v1/completions", json={"prompt": "a"}).is_success


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_above_the_bound_is_refused_before_it_is_read_as_json(chunked):
    client = FakeClient()
    with serving(make_app(client, max_body_nbytes=1000)) as url:
        http = httpx.Client(base_url=url, headers={"Content-Type": "application/json"})
        for body in (b'{"prompt": "' + b"a" * 2000, b"[" * 10_000_000):
            content = iter([body[:1], body[1:600], body[600:]]) if chunked else body
            response = http.post("/v1/completions", content=content)
            assert response.status_code == 413
            assert "1000 bytes" in error_of(response)["message"]
        fits = b'{"prompt": "a"}'.ljust(1000)
        content = iter([fits[:500], fits[500:]]) if chunked else fits
        assert http.post("/v1/completions", content=content).is_success


def test_a_request_keeps_its_id_and_gets_one_if_it_has_none(client, http):
    assert http.get("/health", headers={"X-Request-Id": "mine-1"}).headers["X-Request-Id"] == (
        "mine-1"
    )
    made = {http.get("/nothing").headers["X-Request-Id"] for _ in range(2)}
    assert len(made) == 2
    for bad in ("a b", "x" * 200, '"'):
        returned = http.get("/health", headers={"X-Request-Id": bad}).headers["X-Request-Id"]
        assert returned != bad


def test_only_pages_of_known_origins_may_call(client, http):
    ask = {"Access-Control-Request-Method": "POST"}
    friend = http.options("/v1/completions", headers={"Origin": "http://friend", **ask})
    assert friend.headers["Access-Control-Allow-Origin"] == "http://friend"
    other = http.options("/v1/completions", headers={"Origin": "http://other", **ask})
    assert "Access-Control-Allow-Origin" not in other.headers
    with serving(make_app(FakeClient())) as url:
        response = httpx.get(f"{url}/health", headers={"Origin": "http://friend"})
        assert not any(name.startswith("access-control") for name in response.headers)


def test_a_form_or_a_text_is_not_taken_for_json(client, http):
    """Any web page may send those to a server on this machine."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        content, headers = b'{"prompt": "a"}', {"Content-Type": kind}
        response = http.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == 415
        assert "application/json" in error_of(response)["message"]
    assert not client.opened


def samples_of(http):
    """Name and labels of each sample of /metrics, with its value."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {
        (s.name.removeprefix("mlx_paged_"), *sorted(s.labels.values())): s.value
        for family in families
        for s in family.samples
    }


def test_metrics_count_what_was_served():
    client = FakeClient()
    with serving(make_app(client)) as url, httpx.Client(base_url=url) as http:
        before = samples_of(http)
        http.post("/v1/completions", json={"prompt": ["abc", "de"], "n": 2})
        http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2, "stream": True})
        http.post("/v1/completions", json={"prompt": 1})
        http.get("/no/such/route")
        http.request("BREW", "/no/such/route")
        after = samples_of(http)

    def added(*key):
        return after[key] - before.get(key, 0)

    assert added("prompt_tokens_total") == 8
    assert added("generation_tokens_total") == 4 * len("Hello!.") + 2
    assert added("answers_total", "stop") == 4
    assert added("answers_total", "length") == 1
    assert added("time_to_first_token_seconds_count") == 3
    assert added("inter_token_seconds_count") == 4 * len("Hello!") + 1
    assert added("request_seconds_count") == 2
    assert added("http_requests_total", "/v1/completions", "200", "POST") == 2
    assert added("http_requests_total", "/v1/completions", "400", "POST") == 1
    assert added("http_requests_total", "404", "GET", "other") == 1
    assert added("http_requests_total", "404", "other", "other") == 1


def test_metrics_show_the_engine(client, http):
    shown = samples_of(http)
    assert shown["engine_ready",] == 1
    assert [shown["pool_blocks", state] for state in ("used", "cached", "free")] == [50, 25, 325]
    assert shown["preemptions_total",] == 3
    assert shown["samples_waiting",] == 2
    client.not_ready = "it died"
    assert samples_of(http)["engine_ready",] == 0


def test_the_openapi_document_tells_errors_as_they_are(client, http):
    document = http.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/health",
        "/metrics",
        "/ready",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/models/{model}",
    }
    for operations in document["paths"].values():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            for status, response in operation["responses"].items():
                if status != "200":
                    schema = response["content"]["application/json"]["schema"]
                    assert schema["$ref"].endswith("/ErrorBody")
    assert http.get("/docs").status_code == http.get("/redoc").status_code == 404
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert {"400", "401", "404", "413", "503"} <= set(chat["responses"])
    assert chat["security"]


@pytest.mark.parametrize(
    "wrong", [{"max_body_nbytes": 0}, {"request_timeout": 0}, {"api_key": ""}, {"api_key": "ü"}]
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must be"):
        ServerSettings(model_name="m", **wrong)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:8000"])
def test_a_server_is_called_by_its_names(host):
    client = FakeClient()
    with serving(make_app(client, allowed_hosts=LOOPBACK)) as url:
        assert httpx.get(f"{url}/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["rebound.example", "localhost.example:8000", "127.0.0.1.x"])
def test_a_page_that_points_its_own_name_here_is_refused(host):
    client = FakeClient()
    with serving(make_app(client, allowed_hosts=LOOPBACK)) as url:
        for path in ("/", "/health", "/v1/models", "/pool"):
            response = httpx.get(f"{url}{path}", headers={"Host": host})
            assert response.status_code == 403
            assert "--allowed-host" in error_of(response)["message"]
        response = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, headers={"Host": host})
        assert response.status_code == 403
    assert not client.opened

"""Requests made up by schemathesis from the server's own OpenAPI document."""

from collections import Counter

import pytest
import schemathesis
from fake_client import FakeClient, make_app, serving
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

RIGHT, WRONG = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@pytest.fixture(scope="module")
def document():
    with serving(make_app(FakeClient())) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.mark.parametrize(
    ("method", "path", "mode", "max_examples"),
    [
        ("POST", "/v1/chat/completions", RIGHT, 60),
        ("POST", "/v1/chat/completions", WRONG, 60),
        ("POST", "/v1/completions", RIGHT, 60),
        ("POST", "/v1/completions", WRONG, 60),
        ("GET", "/v1/models/{model}", RIGHT, 10),
        ("GET", "/v1/models", RIGHT, 1),
        ("GET", "/health", RIGHT, 1),
        ("GET", "/ready", RIGHT, 1),
        ("GET", "/metrics", RIGHT, 1),
    ],
)
def test_made_up_requests_are_answered_as_the_document_says(
    document, method, path, mode, max_examples
):
    seen = Counter()

    @given(case=document[path][method].as_strategy(generation_mode=mode))
    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def send(case):
        response = case.call(timeout=10)
        seen[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)
        if response.status_code >= 400:
            assert set(response.json()) == {"error"}
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    send()
    print(method, path, mode.value, dict(seen))
    assert max(seen) < 500
    if path != "/v1/models/{model}":
        assert (200 in seen) == (mode == RIGHT), "right requests are answered, wrong ones never"

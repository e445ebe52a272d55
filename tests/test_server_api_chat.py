"""/v1/chat/completions: messages, answers, streams, structure. Tools are tested apart."""

import json

import httpx
import pytest
from fake_client import FakeClient, make_app, make_tokenizer, serving
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served():
    client = FakeClient()
    with serving(make_app(client)) as url:
        yield client, f"{url}/v1/chat/completions"


@pytest.fixture
def client(served):
    served[0].reset()
    return served[0]


@pytest.fixture
def ask(client, served):
    """Posts a body; gives the answer's JSON."""

    def post(**body):
        response = httpx.post(served[1], json={"messages": HI, **body})
        assert response.status_code == 200, response.text
        return response.json()

    return post


@pytest.fixture
def refusal(client, served):
    """Posts a body that is refused; gives the error."""

    def post(**body):
        response = httpx.post(served[1], json={"messages": HI, **body})
        assert response.status_code == 400, response.text
        assert not client.opened
        return response.json()["error"]

    return post


@pytest.fixture
def stream(client, served):
    """Posts a body; gives the chunks."""

    def post(**body):
        response = httpx.post(served[1], json={"messages": HI, "stream": True, **body})
        events = response.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    return post


def test_a_chat_goes_through_the_models_template(client, ask):
    answer = ask(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi "}] * 2, "name": "me"},
            {"role": "assistant", "content": "yes?", "refusal": None, "annotations": []},
            {"role": "user", "content": "bye"},
        ]
    )
    expected = "[system]be brief[user]hi hi [assistant]yes?[user]bye[assistant]"
    assert client.last.prompt == expected
    assert answer["object"] == "chat.completion"
    assert answer["id"] == client.last.request_id and answer["id"].startswith("chatcmpl-")
    message = {"role": "assistant", "content": "Hello!", "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    assert answer["choices"] == [choice]
    assert answer["usage"]["prompt_tokens"] == len(expected)
    assert answer["usage"]["completion_tokens"] == 7


def test_without_max_tokens_an_answer_has_no_bound_of_ours(client, ask):
    ask()
    assert client.last.params.max_tokens is None
    for body in ({"max_tokens": 3}, {"max_completion_tokens": 3}):
        assert ask(**body)["choices"][0]["finish_reason"] == "length"
        assert client.last.params.max_tokens == 3


def test_a_stream_is_the_answer_in_parts(client, ask, stream):
    client.reply = lambda prompt, index: ["one", "", "three"][index]
    chunks = stream(n=3, stream_options={"include_usage": True})
    assert chunks.pop()["usage"] == ask(n=3)["usage"]
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    parts = {0: [], 1: [], 2: []}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        parts[choice["index"]].append((choice["delta"], choice["finish_reason"]))
    for index, text in enumerate(["one", "", "three"]):
        (first, *middle, last) = parts[index]
        assert first == ({"role": "assistant", "content": ""}, None)
        assert last == ({}, "stop")
        assert "".join(delta["content"] for delta, _ in middle) == text


def test_logprobs_have_bytes_and_as_many_of_the_likeliest_as_asked(client, ask, stream):
    client.reply = lambda prompt, index: "é"
    content = ask(logprobs=True, top_logprobs=2, max_tokens=2)["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9]]
    assert [entry["logprob"] for entry in content] == [-1.5, -2.5]
    assert [[top["logprob"] for top in entry["top_logprobs"]] for entry in content] == [
        [-0.5, -1.5],
        [-0.5, -2.5],
    ]
    streamed = [
        entry
        for chunk in stream(logprobs=True, top_logprobs=2, max_tokens=2)
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == content
    (entry,) = ask(logprobs=True, max_tokens=1)["choices"][0]["logprobs"]["content"]
    assert entry["top_logprobs"] == []
    assert ask()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("length", [3, 30_000])
def test_short_and_long_chats_are_tokenized_alike(client, served, length):
    """Long ones go to a thread, of which several may run."""
    client.info.max_model_len = 100_000
    client.info.num_blocks = 100_000
    try:
        body = {"messages": [{"role": "user", "content": "x" * length}]}
        assert httpx.post(served[1], json=body).status_code == 200
        assert client.last.prompt == f"[user]{'x' * length}[assistant]"
    finally:
        client.info.max_model_len = 6000
        client.info.num_blocks = 400


def test_a_template_that_cannot_render_is_a_400_with_its_words(refusal):
    error = refusal(messages=[{"role": "user", "content": "refuse me"}])
    assert "no such talk" in error["message"]
    assert error["param"] == "messages"


def test_a_model_without_a_template_points_to_completions():
    with serving(make_app(FakeClient(), make_tokenizer(None))) as url:
        response = httpx.post(f"{url}/v1/chat/completions", json={"messages": HI})
    assert response.status_code == 400
    assert "/v1/completions" in response.json()["error"]["message"]


def test_variables_reach_the_template(client):
    tokenizer = make_tokenizer("{{ messages[0].content }}|{{ mood }}|{{ reasoning_effort }}")
    with serving(make_app(client, tokenizer)) as url:
        body = {"messages": HI, "chat_template_kwargs": {"mood": "good"}, "reasoning_effort": "low"}
        httpx.post(f"{url}/v1/chat/completions", json=body).raise_for_status()
        assert client.last.prompt == "hi|good|low"
        for name in ("messages", "tokenize", "tools", "add_generation_prompt"):
            body = {"messages": HI, "chat_template_kwargs": {name: None}}
            assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0]"),
        ({"messages": [{"content": "a"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [*HI, {"role": "tool", "content": "1"}]}, "messages[1].tool_call_id"),
        ({"messages": [{"role": "assistant", "function_call": {}}]}, "function_call"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"modalities": ["text", "audio"]}, "modalities[1]"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"best_of": 2}, "best_of"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_fields_name(refusal, body, param):
    assert refusal(**body)["param"] == param


def test_a_picture_is_refused_in_words(refusal):
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    error = refusal(messages=[{"role": "user", "content": [picture]}])
    assert "image_url" in error["message"] and "text" in error["message"]


def test_fields_that_change_no_answer_are_ignored(client, ask):
    ask()
    plain = client.last.params
    ask(
        user="me",
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        safety_identifier="x",
        prompt_cache_key="k",
        prediction={"type": "content", "content": "Hello"},
        modalities=["text"],
        functions=None,
        tools=None,
        tool_choice=None,
        parallel_tool_calls=True,
        response_format={"type": "text"},
    )
    assert client.last.params == plain


def follows(grammar, text):
    """Whether a whole answer is one that the grammar allows."""
    tokenizer = from_tokenizer(make_tokenizer()._tokenizer)
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    tokens = tokenizer.tokenize_str(text)
    return matcher.consume_tokens(tokens) and matcher.is_accepting()


def test_a_json_schema_becomes_a_grammar(client, ask):
    schema = {
        "type": "object",
        "properties": {"age": {"$ref": "#/$defs/age"}},
        "required": ["age"],
        "additionalProperties": False,
        "$defs": {"age": {"type": "integer", "minimum": 0}},
    }
    wanted = {"name": "person", "description": "d", "schema": schema, "strict": True}
    ask(response_format={"type": "json_schema", "json_schema": wanted})
    grammar = client.last.params.grammar
    assert follows(grammar, '{"age": 7}')
    assert follows(grammar, '{\n  "age":7\n}')
    for wrong in ('{"age": "7"}', '{"age": -7}', "{}", '{"age": 7, "b": 1}', 'My {"age": 7}'):
        assert not follows(grammar, wrong)


def test_json_objects_may_be_any(client, ask):
    for wanted in (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "any"}},
    ):
        ask(response_format=wanted)
        grammar = client.last.params.grammar
        assert follows(grammar, '{"a": [1, {"b": null}]}')
        assert not follows(grammar, "[1]")
        assert not follows(grammar, "{" + " " * 100 + "}"), "spaces without end"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "objectt"},
        {"type": 5},
        {"$ref": "#/nowhere"},
        {"$ref": "http://example.org/schema"},
        {"type": "string", "pattern": "("},
        {"enum": []},
        {"not": {"type": "string"}},
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(refusal, schema):
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    error = refusal(response_format=wanted)
    assert error["param"] == "response_format"
    assert "\n" not in error["message"]


def test_a_grammar_goes_with_nothing_that_overrides_its_end(refusal):
    error = refusal(response_format={"type": "json_object"}, ignore_eos=True)
    assert "grammar" in error["message"]

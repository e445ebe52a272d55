"""Tools: told to the model, called as it likes or as a grammar wants it, read and streamed."""

import json
from pathlib import Path

import httpx
import pytest
from fake_client import FakeClient, make_app, make_tokenizer, serving
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tool_parsers import mistral, pythonic, qwen3_coder
from test_server_api_chat import follows

from mlx_paged.server.api.tool_calls import JSON_SYNTAX, ToolReader, ToolSyntax

ASK = [{"role": "user", "content": "What's the weather in Paris?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
TIME = {"type": "function", "function": {"name": "time", "description": "The time now."}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TIME_CALL = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


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
    def post(**body):
        body = {"messages": ASK, "tools": [WEATHER, TIME], **body}
        response = httpx.post(served[1], json=body)
        assert response.status_code == 200, response.text
        return response.json()["choices"]

    return post


@pytest.fixture
def stream(client, served):
    """Posts a body; gives content, calls and reason of the one answer, put together."""

    def post(**body):
        body = {"messages": ASK, "tools": [WEATHER, TIME], "stream": True, **body}
        content, calls, reason = "", [], None
        for line in httpx.post(served[1], json=body).text.split("\n\n"):
            if not line or line == "data: [DONE]":
                continue
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            content += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", ()):
                assert call["index"] == len(calls)
                calls.append(call["function"])
            reason = choice["finish_reason"]
        return content, calls, reason

    return post


def functions(choice):
    calls = choice["message"].get("tool_calls") or ()
    assert all(call["type"] == "function" for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


def test_a_template_that_knows_no_tools_tells_them_in_text(client, ask):
    ask(messages=[{"role": "system", "content": "Be brief."}, *ASK])
    system = client.last.prompt.partition("[user]")[0]
    assert system.startswith("[system]Be brief.\n")
    listed = next(line for line in system.splitlines() if line.startswith("[{"))
    told = json.loads(listed)
    assert told == [WEATHER, TIME]
    assert "<tool_call>" in system
    ask()
    assert client.last.prompt.startswith("[system]You can call functions.")


def test_tools_that_must_not_be_called_are_not_told(client, ask):
    client.reply = lambda prompt, index: CALL
    (choice,) = ask(tool_choice="none")
    assert client.last.prompt == f"[user]{ASK[0]['content']}[assistant]"
    assert choice["message"]["content"] == CALL
    assert client.last.params.grammar is None


def test_calls_and_results_of_before_are_told_in_text(client, ask):
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    calls = [{"id": id_, "type": "function", "function": function} for id_ in ("1", "2")]
    ask(
        tools=None,
        messages=[
            *ASK,
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": "sunny"},
            {"role": "tool", "tool_call_id": "2", "content": "18 °C"},
        ],
    )
    after = client.last.prompt.partition("[assistant]")[2]
    results = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\n18 °C\n</tool_response>"
    assert after == f"{CALL}\n{CALL}[user]{results}[assistant]"


def test_arguments_of_a_former_call_must_be_an_object(client, served):
    for arguments in ("{", "[]", '"a"', ""):
        function = {"name": "f", "arguments": arguments}
        call = {"id": "1", "type": "function", "function": function}
        messages = [*ASK, {"role": "assistant", "tool_calls": [call]}]
        response = httpx.post(served[1], json={"messages": messages})
        assert response.status_code == 400
        param = "messages[1].tool_calls[0].function.arguments"
        assert response.json()["error"]["param"] == param


def test_a_model_may_call_or_talk(client, ask, stream):
    client.reply = lambda prompt, index: ["It is sunny.", CALL, f"Let me see.\n{CALL}"][index]
    talk, call, both = ask(n=3)
    assert talk["message"] == {"role": "assistant", "content": "It is sunny.", "refusal": None}
    assert talk["finish_reason"] == "stop"
    assert call["message"]["content"] is None
    assert functions(call) == functions(both) == [("weather", {"city": "Paris"})]
    assert call["finish_reason"] == both["finish_reason"] == "tool_calls"
    assert both["message"]["content"] == "Let me see."
    client.reply = lambda prompt, index: f"Let me see.\n{CALL}"
    content, calls, reason = stream()
    assert (content, reason) == ("Let me see.", "tool_calls")
    assert calls == [{"name": "weather", "arguments": '{"city": "Paris"}'}]


def test_several_calls_or_only_one(client, ask, stream):
    client.reply = lambda prompt, index: f"{CALL}\n{TIME_CALL}"
    both = [("weather", {"city": "Paris"}), ("time", {})]
    assert functions(ask()[0]) == both
    assert [call["name"] for call in stream()[1]] == ["weather", "time"]
    client.step_seconds = 0.001
    (choice,) = ask(parallel_tool_calls=False)
    assert functions(choice) == both[:1]
    assert choice["finish_reason"] == "tool_calls"
    assert client.last.dropped == [0], "the rest is not generated"
    content, calls, reason = stream(parallel_tool_calls=False)
    assert (content, len(calls), reason) == ("", 1, "tool_calls")


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nnot JSON\n</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>[1]</tool_call>",
        '<tool_call>\n{"name": "weather", "argum',
        "1 <tool_ 2",
        "a <tool_call",
    ],
)
def test_what_is_no_call_is_text(client, ask, stream, text):
    client.reply = lambda prompt, index: text
    (choice,) = ask()
    assert choice["message"]["content"] == text
    assert choice["finish_reason"] == "stop"
    assert stream() == (text, [], "stop")


def test_a_required_call_has_a_grammar(client, ask):
    client.reply = lambda prompt, index: CALL
    (choice,) = ask(tool_choice="required")
    assert functions(choice) == [("weather", {"city": "Paris"})]
    grammar = client.last.params.grammar
    for right in (CALL, TIME_CALL, f"{CALL}\n{TIME_CALL}"):
        assert follows(grammar, right)
    for wrong in (
        "Sunny.",
        CALL.replace("city", "town"),
        CALL.replace("weather", "wind"),
        CALL[:-1],
    ):
        assert not follows(grammar, wrong)
    assert not follows(grammar, TIME_CALL.replace("{}", '{"zone": 1}')), "it takes no arguments"
    ask(tool_choice="required", parallel_tool_calls=False)
    assert not follows(client.last.params.grammar, f"{CALL}\n{TIME_CALL}")
    ask(tool_choice={"type": "function", "function": {"name": "time"}})
    grammar = client.last.params.grammar
    assert follows(grammar, TIME_CALL) and not follows(grammar, CALL)
    ask(tool_choice="auto")
    assert client.last.params.grammar is None


def test_an_answer_may_follow_a_schema_or_call(client, ask):
    schema = {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    ask(response_format=wanted)
    grammar = client.last.params.grammar
    assert follows(grammar, CALL) and follows(grammar, '{"warm": true}')
    assert not follows(grammar, "It is warm.") and not follows(grammar, '{"warm": 1}')


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": [{"type": "function", "function": {}}]},
        {"tools": [{"type": "retrieval"}]},
        {"tools": [TIME, TIME]},
        {"tools": [TIME], "tool_choice": "always"},
        {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"tools": [], "tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"tools": [TIME], "tool_choice": "required", "response_format": {"type": "json_object"}},
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}],
            "tool_choice": "required",
        },
    ],
)
def test_tools_that_make_no_sense_are_refused(client, served, body):
    response = httpx.post(served[1], json={"messages": ASK, **body})
    assert response.status_code == 400
    assert not client.opened


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (pythonic, '<|tool_call_start|>[weather(city="Paris")]<|tool_call_end|>'),
        (mistral, '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}'),
        (
            qwen3_coder,
            "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
            "</tool_call>",
        ),
    ],
)
def test_a_model_that_knows_tools_writes_calls_in_its_own_way(client, parser, text):
    """Its template gets them, and former calls' arguments as objects."""
    tokenizer = make_tokenizer(
        "{{ tools[0].function.name }}|{% for m in messages %}{{ m.role }}:"
        "{{ m.tool_calls[0].function.arguments.city if m.tool_calls else m.content }}|{% endfor %}",
        _tool_parser=parser.parse_tool_call,
        _tool_call_start=parser.tool_call_start,
        _tool_call_end=parser.tool_call_end,
    )
    client.reply = lambda prompt, index: text
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    messages = [
        *ASK,
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "dry"},
    ]
    with serving(make_app(client, tokenizer)) as url:
        body = {"messages": messages, "tools": [WEATHER]}
        (choice,) = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"]
        expected = f"weather|user:{ASK[0]['content']}|assistant:Rome|tool:dry|"
        assert client.last.prompt == expected
        assert functions(choice) == [("weather", {"city": "Paris"})]
        client.reply = lambda prompt, index: CALL
        body["tool_choice"] = "required"
        (choice,) = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"]
        assert functions(choice) == [("weather", {"city": "Paris"})], "as the grammar has it"


PIECES = st.lists(st.sampled_from([CALL, TIME_CALL, "<tool_call>", "<tool", " ", "\n", "a", "<"]))


@settings(deadline=None)
@given(PIECES, st.data(), st.sampled_from([JSON_SYNTAX, ToolSyntax("[T]", "", lambda t, _: t)]))
def test_a_reader_finds_the_same_however_the_text_is_cut(pieces, data, syntax):
    text = "".join(pieces)

    def read(parts):
        reader = ToolReader(syntax, [])
        results = [reader.feed(part) for part in parts] + [reader.finish()]
        content = "".join(content for content, _ in results)
        return content, [call.function for _, calls in results for call in calls]

    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(parts) == read([text])
    if syntax is JSON_SYNTAX and not {"<tool_call>"} & set(pieces):
        calls = [piece for piece in pieces if piece in (CALL, TIME_CALL)]
        assert len(read([text])[1]) == len(calls)


def test_no_more_calls_are_read_than_asked_even_of_one_block():
    syntax = ToolSyntax("[", "]", lambda text, _: [{"name": name} for name in text.split()])
    reader = ToolReader(syntax, [], at_most=2)
    _, calls = reader.feed("[a] [b c] [d]")
    assert [call.function.name for call in calls] == ["a", "b"]
    assert reader.is_full and reader.feed("[e]") == reader.finish() == ("", [])


def test_every_parser_of_mlx_lm_is_one_that_can_be_read():
    """Their marks are text, and the end may be empty."""
    import importlib

    import mlx_lm.tool_parsers

    for path in Path(mlx_lm.tool_parsers.__file__).parent.glob("[a-z]*.py"):
        parser = importlib.import_module(f"mlx_lm.tool_parsers.{path.stem}")
        reader = ToolReader(
            ToolSyntax(parser.tool_call_start, parser.tool_call_end, parser.parse_tool_call),
            [WEATHER],
        )
        text = f"a {parser.tool_call_start}no call{parser.tool_call_end} b"
        content, calls = reader.feed(text)
        rest, more = reader.finish()
        assert calls + more or "no call" in content + rest, "nothing is lost"

"""The openai client against the API, as its users write it."""

import asyncio
import threading
import time

import openai
import pytest
from fake_client import FOREVER, MODEL, FakeClient, make_app, serving
from pydantic import BaseModel

from mlx_paged.server.token_stream import EngineDied, QueueFull, RequestRefused

HI = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def served():
    client = FakeClient()
    with serving(make_app(client, api_key="sesame", max_body_nbytes=10_000)) as url:
        yield client, f"{url}/v1"


@pytest.fixture
def engine(served):
    served[0].reset()
    return served[0]


@pytest.fixture
def client(engine, served):
    with openai.OpenAI(base_url=served[1], api_key="sesame", max_retries=0) as client:
        yield client


def test_chat(engine, client):
    answer = client.chat.completions.create(model=MODEL, messages=HI, temperature=0, seed=1)
    assert answer.choices[0].message.content == "Hello!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 7
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer._request_id


def test_three_answers_with_logprobs(engine, client):
    engine.reply = lambda prompt, index: f"No {index}"
    answer = client.chat.completions.create(
        model=MODEL, messages=HI, n=3, logprobs=True, top_logprobs=2
    )
    assert [choice.message.content for choice in answer.choices] == ["No 0", "No 1", "No 2"]
    entries = answer.choices[2].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries[:-1]) == b"No 2"
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


def test_stream(engine, client):
    chunks = client.chat.completions.create(
        model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
    )
    *middle, last = list(chunks)
    assert "".join(c.choices[0].delta.content or "" for c in middle) == "Hello!"
    assert last.choices == [] and last.usage.completion_tokens == 7


def test_the_stream_helper_puts_an_answer_together(engine, client):
    engine.reply = lambda prompt, index: f"One moment.\n{CALL}"
    with client.chat.completions.stream(model=MODEL, messages=HI, tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "content.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    assert message.content == "One moment."
    assert message.tool_calls[0].function.name == "weather"


def test_tools_there_and_back(engine, client):
    engine.reply = lambda prompt, index: CALL
    answer = client.chat.completions.create(
        model=MODEL, messages=HI, tools=TOOLS, tool_choice="required"
    )
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')
    assert answer.choices[0].finish_reason == "tool_calls"
    engine.reply = lambda prompt, index: "Sunny."
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    answer = client.chat.completions.create(
        model=MODEL, messages=[*HI, message, result], tools=TOOLS
    )
    assert answer.choices[0].message.content == "Sunny."
    assert CALL in engine.last.prompt and "sunny" in engine.last.prompt


def test_structured_output_is_parsed(engine, client):
    class Person(BaseModel):
        name: str
        age: int

    engine.reply = lambda prompt, index: '{"name": "Ada", "age": 36}'
    answer = client.chat.completions.parse(model=MODEL, messages=HI, response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36)
    assert "%json" in engine.last.params.grammar or "json_schema" in engine.last.params.grammar


def test_completions_and_models(engine, client):
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], echo=True, stop="!")
    assert [choice.text for choice in answer.choices] == ["aHello", "bHello"]
    stream = client.completions.create(model=MODEL, prompt=[65, 66], stream=True, logprobs=1)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Hello!"
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "mlx-paged"


def test_errors_are_the_clients_own_classes(engine, client, served):
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as caught:
        create(model=MODEL, messages=HI, temperature=5)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="Unrecognized request argument"):
        create(model=MODEL, messages=HI, extra_body={"nonsense": 1})
    with pytest.raises(openai.NotFoundError) as caught:
        create(model="gpt-9", messages=HI)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="a")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=served[1], api_key="x").models.list()
    with pytest.raises(openai.APIStatusError) as caught:
        create(model=MODEL, messages=[{"role": "user", "content": "x" * 20_000}])
    assert caught.value.status_code == 413
    engine.reply = lambda prompt, index: RequestRefused("too long for the pool")
    with pytest.raises(openai.BadRequestError, match="too long for the pool"):
        create(model=MODEL, messages=HI)
    engine.reply = lambda prompt, index: EngineDied("the process was killed")
    with pytest.raises(openai.InternalServerError, match="the process was killed"):
        create(model=MODEL, messages=HI, stream=True)


def test_an_error_within_a_stream_is_raised(engine, client):
    engine.reply = lambda prompt, index: ("Hello", EngineDied("the process was killed"))
    stream = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
    with pytest.raises(openai.APIError, match="the process was killed"):
        for _ in stream:
            pass


def test_a_full_queue_is_tried_again_when_it_says(engine, served):
    engine.refuse = QueueFull("too many requests wait", 0)
    with openai.OpenAI(base_url=served[1], api_key="sesame", max_retries=1) as client:
        threading.Timer(0.2, lambda: setattr(engine, "refuse", None)).start()
        answer = client.chat.completions.create(model=MODEL, messages=HI)
    assert answer.choices[0].message.content == "Hello!"


def test_a_client_that_times_out_or_closes_its_stream_frees_the_engine(engine, client):
    engine.reply, engine.step_seconds = (lambda prompt, index: FOREVER), 0.01
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).chat.completions.create(model=MODEL, messages=HI)
    stream = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
    next(iter(stream))
    stream.close()
    end = time.monotonic() + 2
    while not all(opened.is_closed for opened in engine.opened):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert len(engine.opened) == 2


async def _many(url):
    async with openai.AsyncOpenAI(base_url=url, api_key="sesame") as client:

        async def one(i):
            stream = await client.completions.create(
                model=MODEL, prompt=f"{i}", stream=bool(i % 2), max_tokens=20
            )
            if i % 2:
                return "".join([chunk.choices[0].text async for chunk in stream])
            return stream.choices[0].text

        return await asyncio.gather(*map(one, range(50)))


def test_fifty_at_once_get_their_own_answers(engine, served):
    engine.reply, engine.step_seconds = (lambda prompt, index: f"answer {prompt}"), 0.001
    assert asyncio.run(_many(served[1])) == [f"answer {i}" for i in range(50)]

"""The API on the real engine with the demo model: what only real text and real blocks show."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from server_process import demo_server

__all__ = ["demo_server"]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}


@pytest.fixture
def client(demo_server):
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", timeout=60) as client:
        yield client


@pytest.fixture
def chat(client):
    def ask(messages=QUESTION, **body):
        return client.chat.completions.create(model="smollm2", messages=messages, **body)

    return ask


def test_the_model_answers_whole_and_streamed(chat):
    answer = chat(temperature=0, max_tokens=20).choices[0]
    assert "Paris" in answer.message.content and answer.finish_reason == "stop"
    chunks = list(chat(temperature=0, max_tokens=20, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.message.content


def test_a_stop_string_ends_real_text(chat):
    whole = chat(temperature=0, max_tokens=20).choices[0].message.content
    answer = chat(temperature=0, max_tokens=20, stop=["l of Fr", "Spain"])
    assert answer.choices[0].message.content == whole.partition("l of Fr")[0]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 8


def test_a_seed_gives_the_same_answer_alone_and_in_company(chat):
    def seeded(seed):
        answer = chat(seed=seed, temperature=1.2, n=2, max_tokens=8)
        return [choice.message.content for choice in answer.choices]

    alone = [seeded(seed) for seed in range(2)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(seeded, [0, 1] * 2))
    assert together == alone * 2
    assert len({text for texts in alone for text in texts}) > 2


def test_logprobs_are_those_of_a_distribution(client, chat):
    answer = chat(temperature=0, max_tokens=6, logprobs=True, top_logprobs=5)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    for entry in content:
        logprobs = [top.logprob for top in entry.top_logprobs]
        assert logprobs == sorted(logprobs, reverse=True) and len(logprobs) == 5
        assert entry.logprob == logprobs[0], "greedy takes the likeliest"
        assert sum(2.718281828**logprob for logprob in logprobs) < 1.0001
    legacy = client.completions.create(
        model="smollm2", prompt="One two three", temperature=0, max_tokens=4, logprobs=0
    ).choices[0]
    assert "".join(legacy.logprobs.tokens) == legacy.text
    offsets = legacy.logprobs.text_offset
    assert [legacy.text[a:b] for a, b in zip(offsets, [*offsets[1:], None], strict=True)] == (
        legacy.logprobs.tokens
    )


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_an_answer_follows_a_schema(chat, temperature):
    schema = {"name": "person", "schema": PERSON, "strict": True}
    answer = chat(
        [{"role": "user", "content": "Describe a person as JSON."}],
        temperature=temperature,
        seed=3,
        n=2,
        max_tokens=120,
        response_format={"type": "json_schema", "json_schema": schema},
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        person = json.loads(choice.message.content)
        assert set(person) == {"name", "age", "likes"}
        assert isinstance(person["name"], str) and 0 <= person["age"] <= 130
        assert set(person["likes"]) <= {"tea", "coffee"} and len(person["likes"]) <= 2


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(
    ("stream", "tools", "choice"),
    [(False, [WEATHER], "required"), (True, [WEATHER, TIME], NAMED)],
)
def test_a_required_call_is_made_with_valid_arguments(chat, stream, tools, choice):
    answer = chat(
        [{"role": "user", "content": "How warm is it in Oslo?"}],
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=1,
        seed=5,
        max_tokens=100,
        stream=stream,
    )
    if stream:
        choices = [chunk.choices[0] for chunk in answer]
        (call,) = [call for c in choices for call in c.delta.tool_calls or ()]
        reason = choices[-1].finish_reason
    else:
        (call,) = answer.choices[0].message.tool_calls
        reason = answer.choices[0].finish_reason
    assert call.function.name == "get_weather" and reason == "tool_calls"
    arguments = json.loads(call.function.arguments)
    assert isinstance(arguments["city"], str)
    assert arguments["unit"] in ("celsius", "fahrenheit")


def test_a_prompt_that_was_there_before_is_cached(client):
    prompt = list(range(1000, 1100))
    for num_cached in (0, 96):
        answer = client.completions.create(model="smollm2", prompt=prompt, max_tokens=1)
        assert answer.usage.prompt_tokens_details.cached_tokens == num_cached
    other = client.completions.create(
        model="smollm2", prompt=prompt, max_tokens=1, extra_body={"cache_salt": "mine"}
    )
    assert other.usage.prompt_tokens_details.cached_tokens == 0


def test_what_can_never_run_is_refused_with_the_numbers(client):
    for body in ({"prompt": [5] * 4200}, {"prompt": "hi", "max_tokens": 10**6}):
        with pytest.raises(openai.BadRequestError, match=r"\d"):
            client.completions.create(model="smollm2", **body)


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave_give_their_blocks_back(demo_server, stream):
    """In prefill and in decode, of all samples."""

    async def leave_after(seconds):
        body = {"prompt": "Tell me", "max_tokens": 1500, "ignore_eos": True, "n": 3}
        async with httpx.AsyncClient(base_url=demo_server.url) as http:
            post = http.post("/v1/completions", json={**body, "stream": stream})
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(post, seconds)

    async def leave_all():
        await asyncio.gather(*(leave_after(0.02 + 0.2 * i) for i in range(6)))

    asyncio.run(leave_all())
    values = demo_server.until(lambda values: values["pool_blocks/used"] == 0)
    assert values["requests_open"] == 0
    assert values["samples_running"] == 0 == values["samples_waiting"]
    assert values["engine_restarts_total"] == 0

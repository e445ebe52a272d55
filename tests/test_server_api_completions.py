"""/v1/completions: prompts, choices, stop strings, log-probabilities, streams."""

import json

import httpx
import pytest
from fake_client import EOS, FakeClient, make_app, make_tokenizer, serving, tokens_of


@pytest.fixture(scope="module")
def served():
    client = FakeClient()
    with serving(make_app(client)) as url:
        yield client, url


@pytest.fixture
def client(served):
    served[0].reset()
    return served[0]


@pytest.fixture
def complete(client, served):
    """Posts a body; gives the answer's JSON."""

    def post(**body):
        response = httpx.post(f"{served[1]}/v1/completions", json={"prompt": "a", **body})
        assert response.status_code == 200, response.text
        return response.json()

    return post


@pytest.fixture
def stream(client, served):
    """Posts a body; gives the chunks, after checking the stream's form."""

    def post(**body):
        body = {"prompt": "a", "stream": True, **body}
        response = httpx.post(f"{served[1]}/v1/completions", json=body)
        assert response.headers["Content-Type"].startswith("text/event-stream")
        events = response.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    return post


def texts(chunks):
    """Each choice's text, put together."""
    joined = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            joined[choice["index"]] = joined.get(choice["index"], "") + choice["text"]
    return joined


def test_a_prompt_is_answered(client, complete):
    answer = complete(prompt="Say hello", user="me", store=True)
    assert client.last.prompt == "Say hello"
    assert answer["object"] == "text_completion"
    assert answer["id"] == client.last.request_id and answer["id"].startswith("cmpl-")
    choice = {"index": 0, "text": "Hello!", "logprobs": None, "finish_reason": "stop"}
    assert answer["choices"] == [choice]
    assert answer["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 7,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert client.last.is_closed and not client.last.dropped


def test_without_max_tokens_an_answer_has_sixteen(client, complete):
    client.reply = lambda prompt, index: "0123456789" * 3
    choice = complete()["choices"][0]
    assert choice["text"] == "0123456789012345"
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (["ab", "c"], ["ab", "c"]),
        ([1, 2, 300 - 45], [[1, 2, 255]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["ab", [5]], ["ab", [5]]),
    ],
)
def test_prompts_come_as_text_or_tokens_one_or_several(client, complete, prompt, expected):
    client.reply = lambda prompt, index: f"{prompt}/{index}"
    choices = complete(prompt=prompt, n=2)["choices"]
    seen = [opened.prompt_token_ids for opened in client.opened]
    assert seen == [tokens_of(e) if isinstance(e, str) else e for e in expected]
    decode = make_tokenizer().decode
    assert [choice["text"] for choice in choices] == [
        f"{decode(token_ids)}/{index}" for token_ids in seen for index in range(2)
    ]
    assert [choice["index"] for choice in choices] == list(range(2 * len(seen)))


def test_several_prompts_have_ids_of_their_own(client, complete):
    answer = complete(prompt=["a", "b", "c"])
    assert [o.request_id for o in client.opened] == [f"{answer['id']}-{i}" for i in range(3)]


def test_one_refused_prompt_of_several_ends_the_others(client, served):
    client.step_seconds = 0.01
    client.reply = lambda prompt, index: ValueError("no") if prompt == "b" else "x" * 10_000
    body = {"prompt": ["a", "b", "c"], "max_tokens": 5000}
    assert httpx.post(f"{served[1]}/v1/completions", json=body).status_code == 500
    assert all(opened.is_closed for opened in client.opened)


def test_parameters_reach_the_engine(client, complete):
    complete(
        n=2,
        temperature=0.25,
        top_p=0.5,
        top_k=7,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=2,
        logit_bias={"7": -100, "8": 2.5},
        seed=-3,
        max_tokens=5,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[9],
        priority=-2,
        cache_salt="mine",
        stop="zzz",
    )
    opened, params = client.last, client.last.params
    assert (opened.priority, opened.salt) == (-2, "mine")
    assert (params.n, params.temperature, params.top_p, params.top_k) == (2, 0.25, 0.5, 7)
    assert (params.min_p, params.repetition_penalty) == (0.125, 1.5)
    assert (params.presence_penalty, params.frequency_penalty) == (-1, 2)
    assert params.logit_bias == {7: -100, 8: 2.5}
    assert (params.seed, params.max_tokens, params.min_tokens) == (-3, 5, 2)
    assert params.ignore_eos and params.stop_token_ids == (9,)
    assert not params.stop  # found in the text, on this side
    assert params.logprobs is None


def test_nulls_and_nothing_are_the_same(client, complete):
    complete()
    plain = client.last.params
    complete(n=None, temperature=None, stop=None, logit_bias=None, seed=None, suffix=None)
    assert client.last.params == plain
    assert (plain.n, plain.temperature, plain.top_p, plain.max_tokens) == (1, 1, 1, 16)


def test_top_p_of_zero_leaves_the_likeliest(client, complete):
    complete(top_p=0)
    assert 0 < client.last.params.top_p < 1e-6


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
@pytest.mark.parametrize(
    ("stop", "text"),
    [("lo wo", "Hel"), (["xyz", "o", "l"], "He"), ("rld!", "Hello wo"), ("H", ""), ("?", None)],
)
def test_a_stop_string_ends_an_answer_wherever_tokens_end(
    client, complete, stream, stop, text, tokens_per_step
):
    whole = "Hello world!"
    client.reply = lambda prompt, index: whole
    client.tokens_per_step = tokens_per_step
    answer = complete(stop=stop)
    assert answer["choices"][0]["text"] == (whole if text is None else text)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert texts(stream(stop=stop))[0] == answer["choices"][0]["text"]
    if text is not None:
        stops = [stop] if isinstance(stop, str) else stop
        length = min(whole.find(s) + len(s) for s in stops if s in whole)
        assert answer["usage"]["completion_tokens"] == length
        ended_first = client.last.num_sent > len(whole)
        assert client.last.dropped == ([] if ended_first else [0])


def test_a_stop_string_ends_one_sample_and_not_the_others(client, complete):
    client.reply = lambda prompt, index: ["one", "two", "three"][index]
    client.tokens_per_step = 2
    choices = complete(n=3, stop="w")["choices"]
    assert [choice["text"] for choice in choices] == ["one", "t", "three"]
    assert client.last.dropped == [1]


def test_no_stop_string_counts_before_min_tokens(client, complete):
    client.reply = lambda prompt, index: "aXbXc"
    assert complete(stop="X", min_tokens=3)["choices"][0]["text"] == "aXb"


def test_a_beginning_of_a_stop_string_at_the_end_is_text(client, complete, stream):
    client.reply = lambda prompt, index: "text##"
    assert complete(stop="###")["choices"][0]["text"] == "text##"
    assert texts(stream(stop="###"))[0] == "text##"


def test_characters_come_whole(client, complete, stream):
    client.reply = lambda prompt, index: "né€🙂"
    assert complete()["choices"][0]["text"] == "né€🙂"
    chunks = stream()
    assert texts(chunks)[0] == "né€🙂"
    assert {choice["text"] for chunk in chunks for choice in chunk["choices"]} <= set("né€🙂") | {
        ""
    }
    assert complete(max_tokens=2)["choices"][0]["text"] == "n"


def test_echo_begins_with_the_prompt(client, complete, stream):
    assert complete(prompt=["ab", tokens_of("c")], echo=True)["choices"][1]["text"] == "cHello!"
    assert texts(stream(prompt=["ab", "c"], echo=True, n=2)) == {
        0: "abHello!",
        1: "abHello!",
        2: "cHello!",
        3: "cHello!",
    }


def test_logprobs_name_tokens_and_where_they_begin(client, complete, stream):
    client.reply = lambda prompt, index: "né"
    answer = complete(logprobs=1, max_tokens=3)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["n", r"bytes:\xc3", r"bytes:\xa9"],
        "token_logprobs": [-1.5, -2.5, -3.5],
        "top_logprobs": [
            {"o": -0.5, "n": -1.5},
            {r"bytes:\xc4": -0.5, r"bytes:\xc3": -2.5},
            {r"bytes:\xaa": -0.5, r"bytes:\xa9": -3.5},
        ],
        "text_offset": [0, 1, 1],
    }
    chunks = stream(logprobs=1, max_tokens=3)
    parts = [c["logprobs"] for chunk in chunks for c in chunk["choices"]]
    for key in logprobs:
        assert [item for part in parts for item in part[key]] == logprobs[key]
    assert client.last.params.logprobs == 1


def test_best_of_gives_the_likeliest_answers(client, complete):
    """The script's log-probabilities fall with the position, so a short answer is likelier."""
    client.reply = lambda prompt, index: "x" * [5, 2, 4, 3][index]
    answer = complete(n=2, best_of=4)
    assert [choice["text"] for choice in answer["choices"]] == ["xx", "xxx"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 5 + 2 + 4 + 3 + 4
    assert client.last.params.num_samples == 4


def test_a_stream_gives_usage_at_its_end_if_asked(client, stream):
    chunks = stream(stream_options={"include_usage": True}, n=2)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 14
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert not any("usage" in chunk for chunk in stream())
    assert len({chunk["id"] for chunk in chunks}) == 1
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
    assert sorted(filter(None, reasons)) == ["stop", "stop"]


def test_an_error_in_the_midst_of_a_stream_is_its_last_event(client, served):
    client.reply = lambda prompt, index: ("Hello", RuntimeError("boom"))
    response = httpx.post(f"{served[1]}/v1/completions", json={"prompt": "a", "stream": True})
    assert response.status_code == 200
    events = response.text.split("\n\n")
    assert json.loads(events[-2].removeprefix("data: "))["error"]["type"] == "server_error"
    assert "[DONE]" not in response.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"logit_bias": {str(260): 1}}, "logit_bias"),
        ({"logit_bias": {"7": 101}}, "logit_bias.7"),
        ({"logit_bias": {"seven": 1}}, "logit_bias.seven"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"min_tokens": 9, "max_tokens": 8}, None),
        ({"prompt": [260]}, None),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"] * 128, "n": 9}, "prompt"),
        ({"stop": [""]}, "stop[0]"),
        ({"temperature": "x"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10**30}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_fields_name(client, served, body, param):
    response = httpx.post(f"{served[1]}/v1/completions", json={"prompt": "a", **body})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not client.opened


def test_a_prompt_longer_than_the_model_takes_is_refused_with_the_numbers(client, served):
    for prompt in ("x" * 6000, [1] * 6000):
        response = httpx.post(f"{served[1]}/v1/completions", json={"prompt": prompt})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "6000" in error["message"] and "5999" in error["message"]
    assert not client.opened


def test_end_tokens_have_no_text(client, complete):
    assert EOS in tokens_of("<eos>")
    answer = complete()
    assert answer["choices"][0]["text"] == "Hello!"

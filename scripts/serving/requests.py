"""Requests of mixed kinds, the same ones for a seed."""

from __future__ import annotations

import math
import random
from typing import Any

from serving.client import CHAT, COMPLETIONS, Leave
from serving.load import Job
from serving.prompts import words

PROMPT_TOKENS = (5, 600)
CHAT_WORDS = (5, 120)
ANSWER_TOKENS = (1, 64)
LONG_ANSWER_TOKENS = 400
# Plain tokens of about every vocabulary.
TOKEN_IDS = range(40, 250)
STOPS = ("\n\n", ". ", "e")
# A client that leaves does so between these times, or as soon as so many pieces have come.
LEAVING_SECONDS = (0.02, 6.0)
LEAVING_PIECES = 12


def plain_request() -> Job:
    return Job({"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8})


def mixed_requests(count: int, leaving: float, seed: int) -> list[Job]:
    """Chats and completions; a share of `leaving` of the clients don't wait for the end."""
    rng = random.Random(seed)
    jobs = [_mixed(rng) for _ in range(count)]
    for number in rng.sample(range(count), round(leaving * count)):
        job = jobs[number]
        jobs[number] = Job(job.body, job.path, _leave(rng, job.body["stream"]))
    return jobs


def long_requests(count: int, seed: int) -> list[Job]:
    """Answers that take long, half of them streamed."""
    rng = random.Random(seed)
    return [
        Job(
            {
                "prompt": _token_ids(rng, rng.randint(10, 40)),
                "max_tokens": LONG_ANSWER_TOKENS,
                "ignore_eos": True,
                "stream": number % 2 == 0,
            },
            COMPLETIONS,
        )
        for number in range(count)
    ]


def _mixed(rng: random.Random) -> Job:
    body: dict[str, Any] = {
        "max_tokens": rng.randint(*ANSWER_TOKENS),
        "temperature": rng.choice((0, 0.8, 1.0)),
        "n": rng.choices((1, 2, 3), (7, 2, 1))[0],
        "stream": rng.random() < 0.5,
    }
    if rng.random() < 0.25:
        body["stop"] = rng.sample(STOPS, rng.randint(1, 2))
    if rng.random() < 0.5:
        body["seed"] = rng.randrange(1000)
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if rng.random() < 0.5:
        return Job(
            {**body, "prompt": _token_ids(rng, round(_between(rng, *PROMPT_TOKENS)))}, COMPLETIONS
        )
    messages = [{"role": "user", "content": words(rng, round(_between(rng, *CHAT_WORDS)))}]
    if rng.random() < 0.3:
        shared = words(random.Random(rng.randrange(4)), CHAT_WORDS[1] // 2)
        messages.insert(0, {"role": "system", "content": shared})
    return Job({**body, "messages": messages}, CHAT)


def _leave(rng: random.Random, is_stream: bool) -> Leave:
    seconds = _between(rng, *LEAVING_SECONDS)
    pieces = rng.randint(1, LEAVING_PIECES) if is_stream and rng.random() < 0.5 else None
    return Leave(seconds, pieces)


def _token_ids(rng: random.Random, count: int) -> list[int]:
    return rng.choices(TOKEN_IDS, k=count)


def _between(rng: random.Random, low: float, high: float) -> float:
    """Small ones more often: as many from 10 to 20 as from 100 to 200."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))

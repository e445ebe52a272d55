"""A closed loop of clients: each sends its next request when its last one has ended."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from serving.client import CHAT, Leave, Reply, ask, make_client

# Between the starts of two clients. mlx_lm.server listens with a backlog of 5, and resets some of
# 16 connections that come at once.
STAGGER_SECONDS = 0.02


@dataclass(frozen=True)
class Job:
    """A request; `leave` if its client doesn't wait for the end."""

    body: dict[str, Any]
    path: str = CHAT
    leave: Leave | None = None


@dataclass(frozen=True)
class Target:
    """A server: its address without /v1, its model's name, an API key if it wants one."""

    url: str
    model: str
    key: str | None = None


async def run_jobs(
    target: Target,
    jobs: Sequence[Job],
    concurrency: int,
    timeout: float,
    on_reply: Callable[[Reply], None] = lambda reply: None,
) -> list[Reply]:
    """Replies in the order of the jobs."""
    replies: list[Reply | None] = [None] * len(jobs)
    numbers = iter(range(len(jobs)))

    async with make_client(target.url, concurrency, timeout, target.key) as client:

        async def work(delay: float) -> None:
            await asyncio.sleep(delay)
            for number in numbers:
                job = jobs[number]
                body = {"model": target.model, **job.body}
                reply = replies[number] = await ask(client, job.path, body, job.leave)
                on_reply(reply)

        num_clients = min(concurrency, len(jobs))
        await asyncio.gather(*(work(i * STAGGER_SECONDS) for i in range(num_clients)))
    return [reply for reply in replies if reply is not None]


@dataclass(frozen=True)
class Phase:
    """The replies to one load, and how long it took as a whole."""

    replies: list[Reply]
    seconds: float


def run_phase(target: Target, jobs: Sequence[Job], concurrency: int, timeout: float) -> Phase:
    start = time.perf_counter()
    replies = asyncio.run(run_jobs(target, jobs, concurrency, timeout))
    return Phase(replies, time.perf_counter() - start)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent are not above; nan of none."""
    if not values:
        return math.nan
    rank = max(1, math.ceil(len(values) * percent / 100))
    return sorted(values)[rank - 1]


def summarize(phases: Sequence[Phase]) -> dict[str, Any]:
    """Throughput and latencies, in seconds, of all phases together."""
    replies = [reply for phase in phases for reply in phase.replies]
    whole = [reply for reply in replies if reply.error is None]
    seconds = sum(phase.seconds for phase in phases)
    firsts = [reply.first_seconds for reply in whole if reply.first_seconds is not None]
    gaps = [gap for reply in whole for gap in reply.gaps]
    totals = [reply.seconds for reply in whole]
    num_tokens = sum(reply.num_tokens for reply in whole)
    return {
        "num_requests": len(replies),
        "num_errors": len(replies) - len(whole),
        "errors": sorted({reply.error for reply in replies if reply.error is not None}),
        "seconds": seconds,
        "num_prompt_tokens": sum(reply.num_prompt_tokens for reply in whole),
        "num_output_tokens": num_tokens,
        "output_tokens_per_s": num_tokens / seconds,
        "requests_per_s": len(whole) / seconds,
        **{f"ttft_p{p}_s": percentile(firsts, p) for p in (50, 90, 99)},
        **{f"itl_p{p}_s": percentile(gaps, p) for p in (50, 99)},
        **{f"e2e_p{p}_s": percentile(totals, p) for p in (50, 90, 99)},
    }

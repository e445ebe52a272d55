"""A request and its samples: what the scheduler moves between waiting and running."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from mlx_paged.blocks.prefix import Chain
from mlx_paged.blocks.sequence import Sequence
from mlx_paged.engine.grammar import GrammarState
from mlx_paged.engine.params import SamplingParams


@dataclass
class RequestMetrics:
    """Times on the `time.perf_counter` clock, in seconds, and counts."""

    arrival_time: float = field(default_factory=time.perf_counter)
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_output_tokens: int = 0

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival until the request first ran."""
        return _difference(self.first_scheduled_time, self.arrival_time)

    @property
    def time_to_first_token(self) -> float | None:
        return _difference(self.first_token_time, self.arrival_time)

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds per token after the first one, of the request's samples together."""
        seconds = _difference(self.finished_time, self.first_token_time)
        return None if seconds is None else seconds / max(1, self.num_output_tokens - 1)


def _difference(end: float | None, start: float | None) -> float | None:
    return None if end is None or start is None else end - start


class Request:
    """A prompt, its parameters, and the samples drawn from it.

    Attributes:
        seed: of its randomness; the engine's choice, if `params` has none.
        grammar: where each of its answers begins in `params.grammar`.

    Args:
        request_id: unique among the requests that are running or waiting.
        prompt_token_ids: at least one.
        params: how samples are drawn.
        max_tokens: tokens per sample at most, `params.max_tokens` made definite.
        priority: a lower number goes first, under the policy "priority".
        end_token_ids: what ends an answer.
        salt: only requests of one salt share cached prefixes.
        streams: whether its text is wanted as it comes.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        max_tokens: int,
        priority: int = 0,
        end_token_ids: frozenset[int] = frozenset(),
        salt: str = "",
        streams: bool = False,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.max_tokens = max_tokens
        self.priority = priority
        self.end_token_ids = end_token_ids
        self.salt = salt
        self.streams = streams
        self.seed = 0
        self.grammar: GrammarState | None = None
        self.num_finished = 0
        self.samples: list[Sample] = []
        self.metrics = RequestMetrics()

    @property
    def is_finished(self) -> bool:
        return self.num_finished == self.params.num_samples


class Sample:
    """One answer of a request: its sequence of tokens and its place in the schedule.

    A request begins with one sample. When its prompt is stored, the others fork from it.

    Attributes:
        sort_key: where the sample stands among those waiting and running; lowest first.
        num_tokens: tokens of the sequence, a drawn one that isn't read back yet included.
        num_scheduled_tokens: tokens computed in the step being planned.
        max_num_tokens: tokens of the sequence at the answer's greatest length.
        num_forks: samples that will fork from this one once its prompt is stored.
        stored: its K/V outside the pool, while it is swapped out.
        num_stored_tokens: tokens that `stored` holds.
        draw: how its next token is drawn; the sampler's.
        text: what turns its tokens into text; the engine's.
    """

    __slots__ = (
        "chain",
        "cumulative_logprob",
        "draw",
        "finish_reason",
        "index",
        "is_running",
        "logprobs",
        "max_num_tokens",
        "num_forks",
        "num_preemptions",
        "num_scheduled_tokens",
        "num_stored_tokens",
        "num_tokens",
        "request",
        "sequence",
        "sort_key",
        "stop_reason",
        "stored",
        "text",
    )

    def __init__(
        self, request: Request, index: int, sequence: Sequence, chain: Chain | None
    ) -> None:
        self.request = request
        self.index = index
        self.sequence = sequence
        self.chain = chain
        self.sort_key: tuple[float, ...] = ()
        self.num_tokens = sequence.num_tokens
        self.num_scheduled_tokens = 0
        self.num_forks = 0
        self.is_running = False
        self.num_preemptions = 0
        self.stored: Any = None
        self.num_stored_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.cumulative_logprob = 0.0
        self.max_num_tokens = request.num_prompt_tokens + request.max_tokens
        self.logprobs: list[Any] | None = None
        self.text: Any = None
        self.draw: Any = None
        request.samples.append(self)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_lost(self) -> bool:
        """Whether its K/V were to be swapped out, and a step failed before they were."""
        return self.num_stored_tokens > 0 and self.stored is None

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.request.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.sequence.token_ids[self.request.num_prompt_tokens :]

    @property
    def is_decoding(self) -> bool:
        """Whether only the last token is left to compute."""
        return self.num_tokens - self.sequence.num_cached_tokens == 1

    @property
    def draws(self) -> bool:
        """Whether the step being planned computes its last token, so that the next is drawn."""
        return self.sequence.num_cached_tokens + self.num_scheduled_tokens == self.num_tokens

    def __repr__(self) -> str:
        cached = f"{self.sequence.num_cached_tokens}/{self.num_tokens}"
        return f"Sample({self.request.request_id!r}, {self.index}, {cached} tokens cached)"

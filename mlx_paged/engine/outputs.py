"""What the engine hands out: tokens as they come, and finished requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mlx_paged.engine.request import Request, RequestMetrics, Sample


class Logprob(NamedTuple):
    """A token's log-probability, and how many tokens are likelier, plus one."""

    logprob: float
    rank: int


@dataclass
class CompletionOutput:
    """One answer of a request.

    Attributes:
        index: of the sample that it is.
        token_ids: the end token included, if one ended the answer; its text is not.
        logprobs: for each token, log-probabilities by token id: the chosen one's and the most
            likely ones'. None if they weren't asked for.
        finish_reason: "stop" for an end token or a stop string, "length", "abort", or "error"
            where the model's logits were not numbers or the grammar got too complex.
        stop_reason: the stop string, or the one of `stop_token_ids`; None for the model's end.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """A finished request, with its best answers first if `best_of` asked for a choice."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt: str | None = None
    finished: bool = True


@dataclass(slots=True)
class TokenOutput:
    """One more token of an answer.

    Attributes:
        request_id, index: which sample of which request.
        token_id: the token; -1 where the logits were not numbers.
        text: what can be shown since the last one: whole characters, nothing of a stop string.
        logprobs: as in `CompletionOutput`, of this token.
        finish_reason: why the answer ends here; None if it goes on.
        completes: whether it is the last token of the request's last sample.
        request_output: the whole request, where it `completes`.
    """

    request_id: str
    index: int
    token_id: int
    text: str = ""
    logprobs: dict[int, Logprob] | None = None
    finish_reason: str | None = None
    completes: bool = False
    request_output: RequestOutput | None = None

    @property
    def token_ids(self) -> list[int]:
        return [self.token_id]


def completion_output(sample: Sample) -> CompletionOutput:
    """A sample's answer so far."""
    return CompletionOutput(
        index=sample.index,
        text=sample.text.text if sample.text else "",
        token_ids=sample.output_token_ids,
        cumulative_logprob=None if sample.logprobs is None else sample.cumulative_logprob,
        logprobs=None if sample.request.params.logprobs is None else sample.logprobs,
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
    )


def request_output(request: Request) -> RequestOutput:
    """A request's answers: those of `best_of` with the highest mean log-probability first."""
    samples = sorted(request.samples, key=lambda sample: sample.index)
    if len(samples) > request.params.n:
        samples.sort(
            key=lambda sample: sample.cumulative_logprob / max(1, len(sample.logprobs or ())),
            reverse=True,
        )
    outputs = [completion_output(sample) for sample in samples[: request.params.n]]
    return RequestOutput(request.request_id, request.prompt_token_ids, outputs, request.metrics)

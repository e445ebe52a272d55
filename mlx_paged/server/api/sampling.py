"""Requests' fields as the engine's parameters."""

from __future__ import annotations

from typing import Any

from mlx_paged.engine.params import SamplingParams
from mlx_paged.server.api.context import Context
from mlx_paged.server.api.errors import invalid
from mlx_paged.server.api.fields import SamplingFields

# OpenAI's API takes 0 for "only the likeliest token"; the engine needs a share above 0.
LEAST_TOP_P = 1e-9


def sampling_params(
    request: SamplingFields,
    context: Context,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    best_of: int | None = None,
    grammar: str | None = None,
) -> SamplingParams:
    """Parameters without stop strings: those are found in the text, on this side.

    Args:
        logprobs: how many of the most likely tokens are wanted; None for no log-probabilities.
        best_of: answers to sample; the engine is asked for all of them.

    Raises:
        ApiError: fields that contradict each other, or a token that the model doesn't have.
    """
    n = request.n or 1
    if best_of is not None and best_of > n:
        n, logprobs = best_of, logprobs or 0
    try:
        return SamplingParams(
            n=n,
            temperature=_given(request.temperature, 1.0),
            top_p=max(LEAST_TOP_P, _given(request.top_p, 1.0)),
            top_k=request.top_k or 0,
            min_p=request.min_p or 0.0,
            repetition_penalty=_given(request.repetition_penalty, 1.0),
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias=_logit_bias(request, context),
            seed=request.seed,
            max_tokens=max_tokens,
            min_tokens=request.min_tokens or 0,
            stop_token_ids=tuple(request.stop_token_ids or ()),
            ignore_eos=bool(request.ignore_eos),
            logprobs=logprobs,
            grammar=grammar,
        )
    except ValueError as error:
        raise invalid(str(error)) from error


def _logit_bias(request: SamplingFields, context: Context) -> dict[int, float]:
    bias = {int(token_id): value for token_id, value in (request.logit_bias or {}).items()}
    info = context.client.info
    if bias and info is not None and max(bias) >= info.vocab_size:
        raise invalid(
            f"logit_bias names token {max(bias)}; the model's tokens are from 0 to "
            f"{info.vocab_size - 1}.",
            "logit_bias",
        )
    return bias


def _given(value: Any, default: float) -> float:
    return default if value is None else value

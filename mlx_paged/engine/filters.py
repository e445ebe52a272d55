"""Top-k, top-p and min-p, for rows with different settings in one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx

from mlx_paged.engine.params import SamplingParams


def filter_logits(logits: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    """Set the logits of tokens that a row's filters drop to -inf.

    Each filter keeps the tokens from some least logit upwards; tokens that tie with it stay.
    The fewest rows and values are sorted: rows with top-k need their k largest only.

    Args:
        logits: divided by the temperature, [D, vocab_size] float32.
        params: D rows' parameters.
    """
    vocab_size = logits.shape[-1]
    ks = [min(p.top_k, vocab_size) or vocab_size for p in params]
    few = [i for i, k in enumerate(ks) if k < vocab_size]
    many = [i for i, p in enumerate(params) if p.top_p < 1 and ks[i] == vocab_size]
    least = mx.full((len(params), 1), -mx.inf)
    for rows in (few, many):
        if rows:
            index = mx.array(rows)
            most = max(ks[i] for i in rows)
            largest = -mx.sort(-mx.topk(logits[index], most, axis=-1), axis=-1)
            top_ps = [params[i].top_p for i in rows]
            least[index] = _least_kept(largest, [ks[i] for i in rows], top_ps)
    if any(p.min_p > 0 for p in params):
        shares = mx.array([math.log(p.min_p) if p.min_p else -math.inf for p in params])
        least = mx.maximum(least, logits.max(axis=-1, keepdims=True) + shares[:, None])
    elif not (few or many):
        return logits
    return mx.where(logits >= least, logits, -mx.inf)


def _least_kept(largest: mx.array, ks: list[int], top_ps: list[float]) -> mx.array:
    """The least logit that top-k, then top-p keep, [R, 1], of a row's largest, sorted down."""
    ranks = mx.arange(largest.shape[-1])
    largest = mx.where(ranks < mx.array(ks)[:, None], largest, -mx.inf)
    probabilities = mx.softmax(largest, axis=-1, precise=True)
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    num_kept = (before < mx.array(top_ps)[:, None]) & (largest > -mx.inf)
    last = mx.maximum(num_kept.sum(axis=-1, keepdims=True) - 1, 0)
    return mx.take_along_axis(largest, last, axis=-1)

"""Repetition, presence and frequency penalties, on the few tokens that a sequence holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

if TYPE_CHECKING:
    from mlx_paged.engine.sampler import Draw


class TokenCounts:
    """How often each token is in an answer, its prompt's tokens with 0 times."""

    def __init__(self, prompt_token_ids: list[int]) -> None:
        self.counts = dict.fromkeys(prompt_token_ids, 0)

    def add(self, token_id: int) -> None:
        self.counts[token_id] = self.counts.get(token_id, 0) + 1

    def copy(self) -> TokenCounts:
        """For a fork of the sequence."""
        child = TokenCounts([])
        child.counts = self.counts.copy()
        return child


def penalise(logits: mx.array, draws: Mapping[int, Draw]) -> mx.array:
    """Apply penalties.

    Args:
        logits: [D, vocab_size] float32.
        draws: rows that may have penalties, by index; those that do have `counts`.
    """
    row_ids: list[int] = []
    token_ids: list[int] = []
    factors: list[float] = []
    taken_off: list[float] = []
    for row, draw in draws.items():
        params, tokens = draw.params, draw.counts
        if not params.has_penalties:
            continue
        assert tokens is not None
        row_ids += [row] * len(tokens.counts)
        token_ids += tokens.counts
        factors += [params.repetition_penalty] * len(tokens.counts)
        counts = np.fromiter(tokens.counts.values(), np.float64, len(tokens.counts))
        taken_off += (
            params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
        ).tolist()
    if not row_ids:
        return logits
    at = mx.array(row_ids), mx.array(token_ids)
    values, factor = logits[at], mx.array(factors, mx.float32)
    values = mx.where(values > 0, values / factor, values * factor)
    logits = mx.array(logits)
    logits[at] = values - mx.array(taken_off, mx.float32)
    return logits

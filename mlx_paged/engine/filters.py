"""Top-k, top-p and min-p, for rows with different settings in one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx

from mlx_paged.engine.params import SamplingParams


class Filters:
    """Sets the logits of tokens that a row's filters drop to -inf.

    Each filter keeps the tokens from some least logit upwards; tokens that tie with it stay.
    The fewest rows and values are sorted: rows with top-k need their k largest only.

    Args:
        params: D rows' parameters.
        vocab_size: of the logits.
    """

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int) -> None:
        self.num_rows = len(params)
        ks = [min(p.top_k, vocab_size) or vocab_size for p in params]
        few = [i for i, k in enumerate(ks) if k < vocab_size]
        many = [i for i, p in enumerate(params) if p.top_p < 1 and ks[i] == vocab_size]
        self.sorted_rows = [
            _SortedRows(rows, [ks[i] for i in rows], [params[i].top_p for i in rows])
            for rows in (few, many)
            if rows
        ]
        self.min_shares: mx.array | None = None
        if any(p.min_p > 0 for p in params):
            shares = [math.log(p.min_p) if p.min_p else -math.inf for p in params]
            self.min_shares = mx.array(shares, mx.float32)[:, None]

    def __call__(self, logits: mx.array) -> mx.array:
        """Filter logits that were divided by the temperature, [D, vocab_size] float32."""
        if not self.sorted_rows and self.min_shares is None:
            return logits
        least = mx.full((self.num_rows, 1), -mx.inf)
        for rows in self.sorted_rows:
            least[rows.index] = rows.least_kept(logits)
        if self.min_shares is not None:
            least = mx.maximum(least, logits.max(axis=-1, keepdims=True) + self.min_shares)
        return mx.where(logits >= least, logits, -mx.inf)


class _SortedRows:
    """Rows whose largest logits are sorted, for top-k and top-p."""

    def __init__(self, rows: list[int], ks: list[int], top_ps: list[float]) -> None:
        self.index = mx.array(rows)
        self.most = max(ks)
        self.ks = mx.array(ks)[:, None]
        self.top_ps = mx.array(top_ps, mx.float32)[:, None]

    def least_kept(self, logits: mx.array) -> mx.array:
        """The least logit that top-k, then top-p keep, [R, 1]."""
        largest = -mx.sort(-mx.topk(logits[self.index], self.most, axis=-1), axis=-1)
        ranks = mx.arange(self.most)
        largest = mx.where(ranks < self.ks, largest, -mx.inf)
        probabilities = mx.softmax(largest, axis=-1, precise=True)
        before = mx.cumsum(probabilities, axis=-1) - probabilities
        is_kept = (before < self.top_ps) & (largest > -mx.inf)
        last = mx.maximum(is_kept.sum(axis=-1, keepdims=True) - 1, 0)
        return mx.take_along_axis(largest, last, axis=-1)

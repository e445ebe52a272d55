"""Inputs for the prefill kernel, as those of `kernel_cases` for decode, and its float64 results."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from kernel_cases import Case, Floats, as_floats

from mlx_paged.kernels import paged_prefill_attention
from mlx_paged.kernels.prefill_launch import PrefillLaunch, default_prefill_launch
from mlx_paged.kernels.quantized import QuantizedArray

CORES = 16


@dataclass(frozen=True)
class PrefillCase(Case):
    """Sequences of `lens` tokens of which the last `new` are computed."""

    lens: tuple[int, ...] = (37, 1, 100, 21)
    new: tuple[int, ...] = (37, 1, 7, 16)
    launch: PrefillLaunch | None = None  # type: ignore[assignment]

    @property
    def choices(self) -> PrefillLaunch:
        """The launch, by default that of a chip with `CORES`."""
        return self.launch or default_prefill_launch(self.shape, CORES)

    @property
    def row_starts(self) -> list[int]:
        return [0, *np.cumsum(self.new).tolist()]

    @cached_property
    def queries(self) -> mx.array:
        """[new tokens, query heads, head_dim]: the last of each sequence's, chunked or not."""
        heads = self.shape.num_query_heads
        rows = [
            self._normal(length, 0, heads, length)[:, length - new :].swapaxes(0, 1)
            for length, new in zip(self.lens, self.new, strict=True)
        ]
        queries = mx.concatenate(rows) * self.query_factor
        return -mx.abs(queries) if self.is_cold else queries

    def pool_in_codes(self, tokens: list[mx.array], bits: int, group_size: int) -> QuantizedArray:
        """The pool in codes, with NaN for scales and biases wherever no token is stored."""
        pool = self.pool(tokens)
        return QuantizedArray(*mx.quantize(pool, group_size=group_size, bits=bits), bits)

    def reference(self) -> Floats:
        """Causal attention in float64 on the same rounded inputs, with one token's window."""
        queries = as_floats(self.queries).reshape(
            sum(self.new), self.num_kv_heads, self.group_size, self.head_dim
        )
        out = np.zeros(queries.shape)
        start = 0
        for seq, (length, new) in enumerate(zip(self.lens, self.new, strict=True)):
            rows = slice(start, start := start + new)
            behind = np.arange(length - new, length)[:, None] - np.arange(length)
            seen = (behind >= 0) & (behind < (self.window or length))
            scores = np.einsum("nkgd,ktd->kgnt", queries[rows], as_floats(self.keys[seq]))
            scores = np.where(seen, scores * self.scale, -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[rows] = np.einsum("kgnt,ktd->nkgd", weights, as_floats(self.values[seq]))
        return out.reshape(self.queries.shape)

    def attend(self, **changes: Any) -> mx.array:
        """The kernel's result, [new tokens, query heads, head_dim]."""
        arguments = {
            "queries": self.queries,
            "key_pool": self.pool(self.keys),
            "value_pool": self.pool(self.values),
            "block_tables": self.tables,
            "context_lens": self.context_lens,
            "row_starts": self.row_starts,
            "scale": self.scale,
            "max_context_len": self.max_len,
            "window": self.window,
            "launch": self.launch,
        }
        return paged_prefill_attention(**{**arguments, **changes})


def dequantized(array: QuantizedArray) -> mx.array:
    """scale * code + bias, computed in float32 and rounded once."""
    words = np.array(array.codes)
    shifts = np.arange(0, 32, array.bits, dtype=np.uint32)
    codes = (words[..., None] >> shifts) & (2**array.bits - 1)
    groups = codes.reshape(*array.scales.shape, array.group_size).astype(np.float32)
    scales, biases = (as_floats(part).astype(np.float32) for part in array.parts[1:])
    elements = groups * scales[..., None] + biases[..., None]
    return mx.array(elements.reshape(array.shape)).astype(array.dtype)

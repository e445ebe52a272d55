"""The prefill kernel: time on a Mac beside MLX's own attention, error and bytes anywhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged.kernels import metal, paged_prefill_attention
from mlx_paged.kernels.prefill_launch import PrefillLaunch
from mlx_paged.kernels.quantized import PoolArray

from .counts import Reports
from .metal_arms import MetalArms
from .timing import Arm, Clock, measure
from .workload import KV, Order, Workload, as_float64, max_error

Row = dict[str, Any]


@dataclass(frozen=True)
class Prefill:
    """Sequences of equal lengths, whose last `num_new` tokens are computed in one pass."""

    workload: Workload
    num_new: int

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return len(self.workload.lens) * self.num_new

    def queries(self) -> mx.array:
        """[new tokens, query heads, head_dim]."""
        longer = replace(self.workload, lens=(1,) * self.num_tokens)
        return longer.queries()

    def attend(
        self,
        queries: mx.array,
        pools: tuple[PoolArray, PoolArray],
        tables: mx.array,
        launch: PrefillLaunch | None = None,
    ) -> mx.array:
        starts = range(0, self.num_tokens + 1, self.num_new)
        return paged_prefill_attention(
            queries,
            *pools,
            tables,
            self.workload.context_lens,
            starts,
            scale=self.workload.scale,
            max_context_len=self.workload.max_len,
            launch=launch,
        )

    def reference(self, kv: KV, block_size: int, order: Order) -> npt.NDArray[np.float64]:
        """Causal attention in float64 with numpy, [new tokens, query heads, head_dim].

        Over elements as the kernel has them in threadgroup memory: rounded to the shape's dtype.
        """
        shape, length = self.workload.shape, self.workload.max_len
        queries = as_float64(self.queries()).reshape(
            -1, self.num_new, shape.num_kv_heads, shape.group_size, shape.head_dim
        )
        tables = self.workload.tables(block_size, order)
        keys, values = (
            as_float64(self._rounded(self.workload.pool(flat, block_size)))[tables]
            .swapaxes(1, 2)
            .reshape(len(tables), shape.num_kv_heads, -1, shape.head_dim)[:, :, :length]
            for flat in (kv.keys, kv.values)
        )
        scores = np.einsum("snkgd,sktd->skgnt", queries, keys)
        last = np.arange(length - self.num_new, length)[:, None]
        scores = np.where(np.arange(length) <= last, scores * self.workload.scale, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out = np.einsum("skgnt,sktd->snkgd", weights, values)
        return out.reshape(self.num_tokens, shape.num_query_heads, shape.head_dim)

    def _rounded(self, pool: PoolArray) -> mx.array:
        return mx.array(as_float64(pool).astype(np.float32)).astype(self.workload.shape.dtype)

    def reduced(self, max_tokens: int) -> Prefill:
        """The same kind of work for an executor."""
        workload = self.workload.reduced(max_tokens)
        num_new = max(1, self.num_new * workload.max_len // self.workload.max_len)
        return Prefill(workload, num_new)


def times(prefill: Prefill, rows: list[Row], clock: Clock, track: Any) -> dict[str, float]:
    """Add the kernel's times on this Mac to the rows; return those of MLX's own attention.

    That attends over keys and values that aren't quantised, whatever the pool's are.
    """
    workload, queries = prefill.workload, prefill.queries()
    caches = MetalArms(workload)
    by_sequence = queries.reshape(-1, prefill.num_new, *queries.shape[1:]).swapaxes(1, 2)
    mx.eval(by_sequence)

    def arm(row: Row) -> Arm:
        size = row["block_size"]
        tables = mx.array(workload.tables(size, row["order"]))

        def call(i: int) -> list[mx.array]:
            return [prefill.attend(queries, caches.pools(i, size), tables)]

        return Arm(f"{size} {row['order']}", call, workload.kv_bytes, queries.nbytes)

    def mlx_call(i: int) -> list[mx.array]:
        keys, values = caches.plain.contiguous(i)
        return [
            mx.fast.scaled_dot_product_attention(
                by_sequence, keys, values, scale=workload.scale, mask="causal"
            )
        ]

    arms = [arm(row) for row in rows]
    mlx_arm = Arm("MLX", mlx_call, workload.plain.kv_bytes, queries.nbytes)
    seconds = measure([mlx_arm, *arms], clock, track)
    for row, timed in zip(rows, arms, strict=True):
        row["prefill_ms"] = seconds[timed.name] * 1e3
        row["prefill_tokens_per_s"] = prefill.num_tokens / seconds[timed.name]
        row["prefill_of_mlx_rate"] = seconds["MLX"] / seconds[timed.name]
    return {"ms": seconds["MLX"] * 1e3, "tokens_per_s": prefill.num_tokens / seconds["MLX"]}


def count(prefill: Prefill, block_size: int, order: Order, launch: PrefillLaunch) -> Row:
    """Run one pass on this machine's processor: what is loaded, also with one head in a tile.

    The error is the Metal device's where there is one.
    """
    workload, kv = prefill.workload, prefill.workload.kv()
    pools = workload.pool(kv.keys, block_size), workload.pool(kv.values, block_size)
    arguments = prefill.queries(), pools, mx.array(workload.tables(block_size, order))
    keys = ("key_codes", "key_scales", "key_biases") if workload.shape.kv_bits else ("key_pool",)
    needed = workload.kv_bytes / 2
    row: Row = {}
    for key, choices in (
        ("kv_bytes_loaded_over_needed_by_head", replace(launch, heads=1)),
        ("kv_bytes_loaded_over_needed", launch),
    ):
        reports = Reports()
        with metal.using(reports):
            out = prefill.attend(*arguments, choices)
            mx.eval(out)
        prefilled = reports.reports[0]
        row[key] = sum(prefilled[name].bytes_loaded for name in keys) / needed
    if metal.is_available():
        out = prefill.attend(*arguments, launch)
    return row | {"max_error": max_error(out, prefill.reference(kv, block_size, order))}

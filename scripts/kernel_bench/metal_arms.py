"""What is timed on a Mac: attention and a plain copy, paged and contiguous, and MLX's attention."""

from __future__ import annotations

from functools import cached_property

import mlx.core as mx

from mlx_paged.kernels import contiguous_decode_attention, paged_decode_attention
from mlx_paged.kernels.copy import contiguous_copy, paged_copy
from mlx_paged.kernels.launch import DecodeLaunch
from mlx_paged.kernels.quantized import PoolArray

from .timing import Arm, Call
from .workload import Order, Workload

# K and V of one arm's calls, one after the other, are at least this much: the system cache of an
# Ultra holds about a tenth.
DISTINCT_BYTES = 2**30


class MetalArms:
    """Arms over the same distinct caches, which they read in turn."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.queries = workload.queries()
        self.context_lens = workload.context_lens
        copies = max(2, -(-DISTINCT_BYTES // workload.kv_bytes))
        self.caches = [workload.kv(copy) for copy in range(copies)]
        mx.eval(self.queries, [kv.arrays for kv in self.caches])

    @cached_property
    def plain(self) -> MetalArms:
        """Arms of the same work without quantisation, which has no contiguous variant."""
        return MetalArms(self.workload.plain) if self.workload.shape.kv_bits else self

    def attention(self, block_size: int, order: Order, launch: DecodeLaunch | None = None) -> Arm:
        tables = mx.array(self.workload.tables(block_size, order))

        def call(i: int) -> list[mx.array]:
            return [
                paged_decode_attention(
                    self.queries,
                    *self.pools(i, block_size),
                    tables,
                    self.context_lens,
                    scale=self.workload.scale,
                    max_context_len=self.workload.max_len,
                    launch=launch,
                )
            ]

        return self._attention_arm(f"attention {block_size} {order}", call)

    def contiguous_attention(self, launch: DecodeLaunch | None = None) -> Arm:
        def call(i: int) -> list[mx.array]:
            return [
                contiguous_decode_attention(
                    self.queries,
                    *self.contiguous(i),
                    self.context_lens,
                    scale=self.workload.scale,
                    max_context_len=self.workload.max_len,
                    launch=launch,
                )
            ]

        return self._attention_arm("attention contiguous", call)

    def mlx_attention(self) -> Arm:
        """MLX's own kernel, padded to the longest sequence if lengths differ."""
        mask = None
        if len(set(self.workload.lens)) > 1:
            mask = mx.arange(self.workload.max_len) < self.context_lens[:, None, None, None]

        def call(i: int) -> list[mx.array]:
            keys, values = self.contiguous(i)
            queries = self.queries[:, :, None]
            return [
                mx.fast.scaled_dot_product_attention(
                    queries, keys, values, scale=self.workload.scale, mask=mask
                )
            ]

        return self._attention_arm("mlx attention", call)

    def copy(self, block_size: int, order: Order) -> Arm:
        tables = mx.array(self.workload.tables(block_size, order))

        def call(i: int) -> list[mx.array]:
            keys, values = self.pools(i, block_size)
            assert isinstance(keys, mx.array) and isinstance(values, mx.array)
            longest = self.workload.max_len
            copies = paged_copy(keys, values, tables, self.context_lens, max_context_len=longest)
            return list(copies)

        return self._copy_arm(f"copy {block_size} {order}", call)

    def contiguous_copy(self) -> Arm:
        def call(i: int) -> list[mx.array]:
            longest = self.workload.max_len
            copies = contiguous_copy(
                *self.contiguous(i), self.context_lens, max_context_len=longest
            )
            return list(copies)

        return self._copy_arm("copy contiguous", call)

    def pools(self, i: int, block_size: int) -> tuple[PoolArray, PoolArray]:
        kv = self.caches[i % len(self.caches)]
        return self.workload.pool(kv.keys, block_size), self.workload.pool(kv.values, block_size)

    def contiguous(self, i: int) -> tuple[mx.array, mx.array]:
        kv = self.caches[i % len(self.caches)]
        return self.workload.contiguous(kv.keys), self.workload.contiguous(kv.values)

    def _attention_arm(self, name: str, call: Call) -> Arm:
        return Arm(name, call, self.workload.kv_bytes, self.queries.nbytes)

    def _copy_arm(self, name: str, call: Call) -> Arm:
        written = self.workload.padded_kv_bytes
        return Arm(name, call, self.workload.kv_bytes + written, written)

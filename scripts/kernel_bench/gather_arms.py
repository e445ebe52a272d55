"""What is timed where there is no Metal: attention in MLX operations, and MLX's own contiguous."""

from __future__ import annotations

import mlx.core as mx

from mlx_paged.cache import Batch, Row
from mlx_paged.cache.gather import gather_decode_attention

from .timing import Arm
from .workload import Order, Workload


class GatherArms:
    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.queries = workload.queries()
        self.kv = workload.kv()
        mx.eval(self.queries, self.kv.arrays)

    def attention(self, block_size: int, order: Order) -> Arm:
        keys = self.workload.pool(self.kv.keys, block_size)
        values = self.workload.pool(self.kv.values, block_size)
        tables = self.workload.tables(block_size, order)
        rows = [
            Row(table[: -(-length // block_size)].tolist(), length - 1, 1)
            for table, length in zip(tables, self.workload.lens, strict=True)
        ]
        batch = Batch.of(rows, block_size)

        def call(_: int) -> list[mx.array]:
            scale = self.workload.scale
            return [gather_decode_attention(self.queries, keys, values, batch, scale)]

        name = f"attention {block_size} {order}"
        return Arm(name, call, self.workload.kv_bytes, self.queries.nbytes)

    def contiguous_attention(self) -> Arm:
        """The same group of heads a KV head, in MLX's matrix products, without a table."""
        plain = self.workload.plain
        kv = plain.kv()
        keys, values = plain.contiguous(kv.keys), plain.contiguous(kv.values)
        is_token = (
            mx.arange(self.workload.max_len) < self.workload.context_lens[:, None, None, None]
        )
        shape = self.workload.shape

        def call(_: int) -> list[mx.array]:
            queries = (self.queries * self.workload.scale).reshape(
                len(self.workload.lens), shape.num_kv_heads, shape.group_size, shape.head_dim
            )
            scores = mx.where(is_token, queries @ keys.swapaxes(-1, -2), -mx.inf)
            return [mx.softmax(scores, axis=-1, precise=True) @ values]

        return Arm("attention contiguous", call, plain.kv_bytes, self.queries.nbytes)

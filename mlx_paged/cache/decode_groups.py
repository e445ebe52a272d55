"""Decode rows in groups of similar length, as the gather path attends them."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np
import numpy.typing as npt

# A row is padded to at most twice its tokens, or to this many.
MIN_GROUP_TOKENS = 128


def group_by_length(token_counts: npt.NDArray[np.int32]) -> list[npt.NDArray[np.intp]]:
    """Row indices in groups, each in ascending order, the longest rows' group first.

    The longest row of a group has at most twice the tokens of any other, or at most
    `MIN_GROUP_TOKENS`.
    """
    order = np.argsort(-token_counts, kind="stable")
    groups = []
    while len(order):
        longest = int(token_counts[order[0]])
        shortest = 0 if longest <= MIN_GROUP_TOKENS else longest / 2
        num_rows = int(np.count_nonzero(token_counts[order] >= shortest))
        groups.append(np.sort(order[:num_rows]))
        order = order[num_rows:]
    return groups


class DecodeGroups:
    """All rows with one new token, in groups.

    Attributes:
        groups: one after the other.
        order: where each row stands among the groups' rows, [R].
    """

    def __init__(
        self,
        tables: npt.NDArray[np.int32],
        token_counts: npt.NDArray[np.int32],
        block_size: int,
        window: int | None = None,
    ) -> None:
        seen = token_counts if window is None else np.minimum(token_counts, window)
        rows = group_by_length(seen)
        self.groups = [
            DecodeGroup(indices, tables, token_counts, block_size, window) for indices in rows
        ]
        self.order = mx.array(np.argsort(np.concatenate(rows)).astype(np.int32))


class DecodeGroup:
    """Rows of one new token each, with their full blocks and their tails.

    A tail is the block that holds a row's last token. The blocks before it are full. Rows
    with fewer full blocks than others list one of the group's full blocks again, whose
    scores are then masked: it is written throughout, so its zero weights make zeros.

    With a window, the blocks before it are left out, and the tokens before it masked.

    Attributes:
        rows: indices into the batch, [R].
        num_full_blocks: most full blocks of a row, F.
        full_tables: their ids, [R, F].
        tail_blocks: ids of the last blocks, [R].
        is_token: which of the F full blocks' and the tail's slots hold a token that the row
            sees, [R, 1, 1, (F + 1) * block_size].
        is_tail_token: the same for the tail alone, [R, 1, block_size, 1].
    """

    def __init__(
        self,
        rows: npt.NDArray[np.intp],
        tables: npt.NDArray[np.int32],
        token_counts: npt.NDArray[np.int32],
        block_size: int,
        window: int | None = None,
    ) -> None:
        tables, token_counts = tables[rows], token_counts[rows]
        first_token = np.maximum(token_counts - (window or token_counts), 0)
        first_block, tail = first_token // block_size, (token_counts - 1) // block_size
        num_full = tail - first_block
        self.num_full_blocks = int(num_full.max())
        is_full = np.arange(self.num_full_blocks) < num_full[:, None]
        columns = first_block[:, None] + np.arange(self.num_full_blocks)
        full_tables = np.take_along_axis(tables, np.minimum(columns, tail[:, None]), 1)
        if not is_full.all():
            full_tables = np.where(is_full, full_tables, full_tables[is_full][0])
        slots = np.arange(block_size)
        in_tail = slots < (token_counts - tail * block_size)[:, None]
        in_tail &= slots >= (first_token - tail * block_size)[:, None]
        is_token = np.concatenate([np.repeat(is_full, block_size, axis=1), in_tail], axis=1)
        is_token[:, :block_size] &= slots >= (first_token % block_size)[:, None]

        self.rows = mx.array(rows.astype(np.int32))
        self.full_tables = mx.array(full_tables)
        self.tail_blocks = mx.array(np.take_along_axis(tables, tail[:, None], 1)[:, 0])
        self.is_token = mx.array(is_token[:, None, None, :])
        self.is_tail_token = mx.array(in_tail[:, None, :, None])
        self._pairs = cache(self._make_pairs)

    def query_pairs(self, num_kv_heads: int) -> tuple[mx.array, mx.array]:
        """Which query group meets which (block, head) tile of the pool, [R, F, num_kv_heads]."""
        queries, _, tiles = self._pairs(num_kv_heads)
        return queries, tiles

    def weight_pairs(self, num_kv_heads: int) -> tuple[mx.array, mx.array]:
        """Which (row, block, head) of weights meets which tile, [R, F, num_kv_heads]."""
        _, weights, tiles = self._pairs(num_kv_heads)
        return weights, tiles

    def _make_pairs(self, num_kv_heads: int) -> tuple[mx.array, mx.array, mx.array]:
        # Heads innermost, as in the pool: reading it in order takes half the time.
        heads = np.arange(num_kv_heads, dtype=np.int32)
        tiles = np.array(self.full_tables)[..., None] * num_kv_heads + heads
        rows = np.arange(len(tiles), dtype=np.int32)[:, None, None]
        queries = np.broadcast_to(rows * num_kv_heads + heads, tiles.shape)
        weights = np.arange(tiles.size).reshape(tiles.shape)
        return (
            mx.array(queries.astype(np.uint32)),
            mx.array(weights.astype(np.uint32)),
            mx.array(tiles.astype(np.uint32)),
        )

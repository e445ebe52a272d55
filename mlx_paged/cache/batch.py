"""What one forward pass needs to know about its tokens: positions, slots, block tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged.cache.decode_groups import DecodeGroups

IntArray = npt.NDArray[np.int32]


class SlotMapping:
    """Where each of N tokens' K and V are stored: slot `blocks[i] * block_size + offsets[i]`.

    Args:
        slots: slot numbers, [N], such as those of `Sequence.slots`.
        block_size: tokens per block.
    """

    def __init__(self, slots: npt.ArrayLike, block_size: int) -> None:
        self.blocks, self.offsets = np.divmod(np.asarray(slots, np.int32), block_size)
        self.block_size = block_size
        self.rows = cache(self._rows)

    def _rows(self, num_kv_heads: int) -> mx.array:
        """Where each token's and head's row is among all rows of a pool, [N * num_kv_heads, 1]."""
        tiles = self.blocks[:, None] * num_kv_heads + np.arange(num_kv_heads, dtype=np.int32)
        rows = tiles * self.block_size + self.offsets[:, None]
        return mx.array(rows.reshape(-1, 1))


class Row(NamedTuple):
    """One sequence's part in a batch: its table, and which of its tokens are computed."""

    block_table: Sequence[int]
    num_cached_tokens: int
    num_new_tokens: int


class RowArrays(NamedTuple):
    """Some of a batch's rows, as the kernels take them.

    Attributes:
        block_tables: [R, most blocks of a row] int32.
        context_lens: tokens of each row once this pass has written its own, [R] int32.
        max_context_len: the largest of them.
    """

    block_tables: mx.array
    context_lens: mx.array
    max_context_len: int


@dataclass(frozen=True)
class Batch:
    """A flat list of N tokens of S sequences, one sequence after the other, without padding.

    Rows with one new token come first; they are attended together.

    Attributes:
        block_size: tokens per block.
        tables: block ids, [S, most blocks of a row]; entries past a row's blocks are 0.
        num_cached: tokens stored before this pass, [S].
        num_new: tokens computed in this pass, [S]; their sum is N.
    """

    block_size: int
    tables: IntArray
    num_cached: IntArray
    num_new: IntArray

    @classmethod
    def of(cls, rows: Sequence[Row | tuple[Sequence[int], int, int]], block_size: int) -> Batch:
        """From rows of (block table, number of cached tokens, number of new tokens)."""
        num_cached = np.array([row[1] for row in rows], np.int32)
        num_new = np.array([row[2] for row in rows], np.int32)
        if np.any((num_new[1:] == 1) & (num_new[:-1] > 1)):
            raise ValueError(f"rows with one new token must come first, not {num_new.tolist()}")
        num_entries = np.array([len(row[0]) for row in rows])
        missing = num_entries * block_size < num_cached + num_new
        if np.any(missing):
            row = int(np.argmax(missing))
            raise ValueError(
                f"row {row} has {num_entries[row]} blocks of {block_size} tokens for "
                f"{num_cached[row]} cached and {num_new[row]} new tokens; reserve them first"
            )
        tables = np.zeros((len(rows), num_entries.max(initial=1)), np.int32)
        tables[np.arange(tables.shape[1]) < num_entries[:, None]] = np.fromiter(
            chain.from_iterable(row[0] for row in rows), np.int32, num_entries.sum()
        )
        return cls(block_size, tables, num_cached, num_new)

    @property
    def num_tokens(self) -> int:
        return int(self.num_new.sum())

    @cached_property
    def num_decode_rows(self) -> int:
        """Rows with one new token."""
        return int(np.count_nonzero(self.num_new == 1))

    @cached_property
    def token_counts(self) -> IntArray:
        """Tokens of each row that are stored once this pass has written its own, [S]."""
        return self.num_cached + self.num_new

    @cached_property
    def row_starts(self) -> IntArray:
        """Index in the flat list of each row's first token, and N at the end, [S + 1]."""
        return np.concatenate([[0], np.cumsum(self.num_new)]).astype(np.int32)

    @cached_property
    def positions(self) -> mx.array:
        """Each token's position in its sequence, [N] int32."""
        return mx.array(self._positions)

    @cached_property
    def slot_mapping(self) -> SlotMapping:
        """The slot of each token, [N]."""
        rows = np.repeat(np.arange(len(self.num_new)), self.num_new)
        in_table, offsets = np.divmod(self._positions, self.block_size)
        return SlotMapping(self.tables[rows, in_table] * self.block_size + offsets, self.block_size)

    @cached_property
    def block_tables(self) -> mx.array:
        """`tables` as an array, [S, most blocks of a row] int32."""
        return mx.array(self.tables)

    @cached_property
    def context_lens(self) -> mx.array:
        """`token_counts` as an array, [S] int32."""
        return mx.array(self.token_counts)

    @cached_property
    def cu_seqlens_q(self) -> mx.array:
        """`row_starts` as an array, [S + 1] int32."""
        return mx.array(self.row_starts)

    @cached_property
    def decode_rows(self) -> RowArrays:
        """The rows with one new token."""
        return self._row_arrays(slice(0, self.num_decode_rows))

    @cached_property
    def prefill_rows(self) -> RowArrays:
        """The rows with several new tokens."""
        return self._row_arrays(slice(self.num_decode_rows, None))

    def _row_arrays(self, rows: slice) -> RowArrays:
        longest = int(self.token_counts[rows].max())
        return RowArrays(self.block_tables[rows], self.context_lens[rows], longest)

    def decode_groups(self, window: int | None = None) -> DecodeGroups:
        """The rows with one new token, grouped for the gather path, by what `window` shows."""
        if window not in self._decode_groups:
            num_rows = self.num_decode_rows
            self._decode_groups[window] = DecodeGroups(
                self.tables[:num_rows], self.token_counts[:num_rows], self.block_size, window
            )
        return self._decode_groups[window]

    def row_table(self, row: int, first_token: int = 0) -> mx.array:
        """The blocks of a row that hold its tokens from `first_token` on, [blocks] int32.

        An array of its own.
        """
        first_block = first_token // self.block_size
        if (row, first_block) not in self._row_tables:
            num_blocks = -(-int(self.token_counts[row]) // self.block_size)
            self._row_tables[row, first_block] = mx.array(self.tables[row, first_block:num_blocks])
        return self._row_tables[row, first_block]

    @cached_property
    def _decode_groups(self) -> dict[int | None, DecodeGroups]:
        return {}

    @cached_property
    def _row_tables(self) -> dict[tuple[int, int], mx.array]:
        return {}

    @cached_property
    def prefill_starts(self) -> list[int]:
        """`row_starts` among the rows with several new tokens alone."""
        first = self.num_decode_rows
        starts: list[int] = (self.row_starts[first:] - self.row_starts[first]).tolist()
        return starts

    @cached_property
    def _positions(self) -> IntArray:
        first = np.repeat(self.num_cached - self.row_starts[:-1], self.num_new)
        return first + np.arange(self.num_tokens, dtype=np.int32)

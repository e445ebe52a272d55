"""A batch's flat arrays against the definition, slot by slot."""

import numpy as np
import pytest

from mlx_paged.blocks import BlockPool, Sequence
from mlx_paged.cache import Batch, SlotMapping

ROWS = [([4, 1], 5, 1), ([9], 0, 1), ([3, 7, 2], 3, 6), ([0, 5, 6], 0, 9)]


def test_flat_arrays_of_a_mixed_batch():
    batch = Batch.of(ROWS, block_size=4)
    assert batch.positions.tolist() == [5, 0, 3, 4, 5, 6, 7, 8, *range(9)]
    assert batch.context_lens.tolist() == [6, 1, 9, 9]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 2, 8, 17]
    assert batch.block_tables.tolist() == [[4, 1, 0], [9, 0, 0], [3, 7, 2], [0, 5, 6]]
    assert batch.num_tokens == 17
    assert batch.num_decode_rows == 2


def test_slots_are_those_of_the_sequences():
    pool = BlockPool(20, 3)
    sequences = [Sequence(pool) for _ in range(4)]
    for num_cached in (4, 9, 2, 5):  # interleave the tables
        for sequence in sequences:
            sequence.reserve(num_cached)
            sequence.num_cached_tokens = num_cached
    rows = []
    expected = []
    for sequence, new in zip(sequences, (1, 1, 7, 2), strict=True):
        sequence.reserve(new)
        rows.append((sequence.block_table, sequence.num_cached_tokens, new))
        expected += sequence.slots(sequence.num_cached_tokens, sequence.num_cached_tokens + new)
    mapping = Batch.of(rows, 3).slot_mapping
    assert (mapping.blocks * 3 + mapping.offsets).tolist() == expected
    other = SlotMapping(expected, 3)
    np.testing.assert_array_equal(np.array(other.blocks), np.array(mapping.blocks))


def test_one_token_rows_must_come_first():
    with pytest.raises(ValueError, match=r"must come first, not \[1, 5, 1\]"):
        Batch.of([([0], 0, 1), ([1, 2], 0, 5), ([3], 0, 1)], 4)


def test_a_row_without_room_is_refused():
    with pytest.raises(ValueError, match="row 1 has 1 blocks of 4 tokens for 4 cached and 1 new"):
        Batch.of([([0, 2], 4, 1), ([1], 4, 1)], 4)

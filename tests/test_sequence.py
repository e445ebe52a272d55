"""A sequence's table against a brute-force model that stores every token by itself."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_paged.blocks import BlockPool, OutOfBlocks, Sequence


def cached(sequence, num_tokens):
    """Reserve for num_tokens and pretend that a forward pass stored them."""
    copies = sequence.reserve(num_tokens)
    sequence.num_cached_tokens += num_tokens
    return copies


def test_reserve_takes_blocks_only_when_the_last_is_full():
    sequence = Sequence(BlockPool(8, 4))
    tables = []
    for num_tokens in (3, 1, 1, 8):
        assert cached(sequence, num_tokens) == []
        tables.append(list(sequence.block_table))
    assert tables == [[0], [0], [0, 1], [0, 1, 2, 3]]


def test_slots_follow_the_table():
    pool = BlockPool(8, 4)
    sequence = Sequence(pool)
    cached(sequence, 4)
    pool.allocate(2)
    sequence.reserve(2)
    assert sequence.block_table == [0, 3]
    assert sequence.slots(2, 6) == [2, 3, 12, 13]
    with pytest.raises(ValueError, match="8 are reserved"):
        sequence.slots(4, 9)


def test_the_first_to_write_copies_and_the_last_writes_in_place():
    """The text's share.py: four samples of a 44-token prompt, block 16."""
    pool = BlockPool(32, 16)
    samples = [Sequence(pool)]
    cached(samples[0], 44)
    samples += [samples[0].fork() for _ in range(3)]
    copies = [cached(s, 1) for _ in range(63) for s in samples]
    assert [c for c in copies if c] == [[(2, 3)], [(2, 4)], [(2, 5)]]
    assert [s.block_table for s in samples] == [
        [0, 1, 3, 6, 10, 14, 18],
        [0, 1, 4, 7, 11, 15, 19],
        [0, 1, 5, 8, 12, 16, 20],
        [0, 1, 2, 9, 13, 17, 21],
    ]
    pool.check_integrity(s.block_table for s in samples)


def test_a_fork_at_a_block_border_needs_no_copy():
    pool = BlockPool(8, 4)
    sequence = Sequence(pool)
    cached(sequence, 8)
    child = sequence.fork()
    assert cached(child, 1) == cached(sequence, 1) == []
    assert [child.block_table, sequence.block_table] == [[0, 1, 2], [0, 1, 3]]


def test_a_fork_leaves_blocks_reserved_for_later_tokens_to_its_parent():
    pool = BlockPool(8, 4)
    sequence = Sequence(pool)
    cached(sequence, 4)
    sequence.reserve(1)
    child = sequence.fork()
    assert child.block_table == [0]
    assert cached(child, 1) == []
    assert [child.block_table, sequence.block_table] == [[0, 2], [0, 1]]


@pytest.mark.parametrize("num_free", [0, 1])
def test_reserve_is_all_or_nothing(num_free):
    """Five tokens more need a copy of the shared last block and one new block."""
    pool = BlockPool(2 + num_free, 4)
    sequence = Sequence(pool, [7] * 6)
    cached(sequence, 6)
    child = sequence.fork()
    with pytest.raises(OutOfBlocks, match="2 more blocks are needed"):
        child.reserve(5)
    assert child.block_table == sequence.block_table == [0, 1]
    assert pool.num_free_blocks == num_free
    pool.check_integrity([child.block_table, sequence.block_table])


def test_trim_gives_back_the_blocks_that_hold_nothing():
    pool = BlockPool(8, 4)
    sequence = Sequence(pool)
    cached(sequence, 10)
    sequence.trim(2)
    assert sequence.block_table == [0, 1]
    sequence.trim(8)
    assert sequence.block_table == [] and pool.num_free_blocks == 8
    with pytest.raises(ValueError, match="0 are cached"):
        sequence.trim(1)


def test_writing_into_a_trimmed_block_takes_its_name_away():
    class Index(set):
        forget = set.remove

    pool = BlockPool(8, 4, index=Index())
    sequence = Sequence(pool)
    cached(sequence, 8)
    pool.index.update([0, 1])
    sequence.trim(2)
    cached(sequence, 1)
    assert pool.index == {0}


def test_free_returns_the_tail_first_so_that_a_prefix_outlives_it():
    class Index(set):
        forget = set.remove

    pool = BlockPool(3, 4, index=Index())
    sequence = Sequence(pool, range(12))
    cached(sequence, 12)
    pool.index.update([0, 1, 2])
    sequence.free()
    assert pool.free_queue == [2, 1, 0]
    assert sequence.num_tokens == 12 and sequence.num_cached_tokens == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 256), st.lists(st.integers(1, 70), max_size=12))
def test_any_chunks_need_exactly_the_ceiling_of_blocks(block_size, chunks):
    sequence = Sequence(BlockPool(900, block_size))
    for num_tokens in chunks:
        needed = sequence.num_blocks_to_reserve(num_tokens)
        before = sequence.pool.num_free_blocks
        cached(sequence, num_tokens)
        assert before - sequence.pool.num_free_blocks == needed
        assert len(sequence.block_table) == -(-sequence.num_cached_tokens // block_size)


class Storage(RuleBasedStateMachine):
    """Real tables over a dict of slots, against one plain list of values per sequence."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(12, 3)
        self.memory = {}  # slot: value
        self.pairs = []  # (sequence, the values that it must read back)
        self.counter = 0

    def write(self, sequence, values, num_tokens):
        free = self.pool.free_queue
        before = list(sequence.block_table)
        try:
            copies = sequence.reserve(num_tokens)
        except OutOfBlocks:
            assert (self.pool.free_queue, sequence.block_table) == (free, before)
            return
        block = self.pool.block_size
        for source, destination in copies:
            for i in range(block):
                self.memory[destination * block + i] = self.memory.get(source * block + i)
        start = sequence.num_cached_tokens
        for slot in sequence.slots(start, start + num_tokens):
            self.counter += 1
            self.memory[slot] = self.counter
            values.append(self.counter)
        sequence.num_cached_tokens += num_tokens

    @rule(num_tokens=st.integers(1, 10))
    def admit(self, num_tokens):
        self.pairs.append((Sequence(self.pool), []))
        self.write(*self.pairs[-1], num_tokens)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), num_tokens=st.integers(1, 4))
    def extend(self, data, num_tokens):
        self.write(*data.draw(st.sampled_from(self.pairs)), num_tokens)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def fork(self, data):
        sequence, values = data.draw(st.sampled_from(self.pairs))
        self.pairs.append((sequence.fork(), list(values)))

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def free(self, data):
        index = data.draw(st.integers(0, len(self.pairs) - 1))
        self.pairs.pop(index)[0].free()

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def trim(self, data):
        sequence, values = data.draw(st.sampled_from(self.pairs))
        num_tokens = data.draw(st.integers(0, len(values)))
        sequence.trim(num_tokens)
        del values[len(values) - num_tokens :]

    @invariant()
    def every_sequence_reads_what_it_wrote(self):
        for sequence, values in self.pairs:
            slots = sequence.slots(0, sequence.num_cached_tokens)
            assert [self.memory[slot] for slot in slots] == values

    @invariant()
    def pool_is_consistent(self):
        self.pool.check_integrity(sequence.block_table for sequence, _ in self.pairs)


TestStorage = Storage.TestCase
TestStorage.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

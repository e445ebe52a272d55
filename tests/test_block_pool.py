"""The pool hands out blocks, counts references, and refuses what would corrupt it."""

import subprocess
import sys

import pytest

from mlx_paged.blocks import BlockPool, OutOfBlocks, Sequence


class Names:
    """The smallest index: a set of block ids, and a record of what was forgotten."""

    def __init__(self, *block_ids):
        self.named = set(block_ids)
        self.forgotten = []

    def __contains__(self, block_id):
        return block_id in self.named

    def forget(self, block_id):
        self.named.remove(block_id)
        self.forgotten.append(block_id)


def test_fresh_blocks_come_in_ascending_order():
    pool = BlockPool(4, 16)
    assert [pool.allocate(), pool.allocate(2), pool.allocate()] == [[0], [1, 2], [3]]
    assert pool.num_free_blocks == 0


def test_a_released_block_is_reused_next_unless_it_has_a_name():
    pool = BlockPool(5, 16, index=Names(1, 3))
    pool.allocate(4)
    pool.index = Names(1, 3)
    for block_id in (0, 3, 2, 1):
        pool.release(block_id)
    assert pool.free_queue == [2, 0, 4, 3, 1]
    assert pool.allocate(4) == [2, 0, 4, 3]
    assert pool.index.forgotten == [3]


def test_revive_takes_a_free_block_out_of_the_queue():
    pool = BlockPool(3, 16)
    pool.allocate(3)
    pool.release(1)
    pool.revive(1)
    pool.revive(2)
    assert pool.num_free_blocks == 0
    assert [pool.ref_count(b) for b in range(3)] == [1, 1, 2]
    pool.check_integrity([[0, 1, 2], [2]])


def test_an_empty_pool_raises_and_changes_nothing():
    pool = BlockPool(3, 16)
    pool.allocate()
    with pytest.raises(OutOfBlocks, match="3 more blocks are needed, and 2 of the pool's 3"):
        pool.allocate(3)
    assert pool.free_queue == [1, 2]
    pool.check_integrity([[0]])


@pytest.mark.parametrize("call", ["share", "release"])
def test_a_free_block_can_neither_be_shared_nor_released(call):
    pool = BlockPool(2, 16)
    pool.allocate()
    with pytest.raises(ValueError, match="block 1 is free"):
        getattr(pool, call)(1)
    pool.check_integrity([[0]])


def test_a_double_release_raises():
    pool = BlockPool(2, 16)
    pool.allocate()
    pool.release(0)
    with pytest.raises(ValueError, match="released once too often"):
        pool.release(0)
    pool.check_integrity([])


@pytest.mark.parametrize("call", ["share", "release", "revive", "ref_count"])
@pytest.mark.parametrize("block_id", [-1, 2])
def test_an_unknown_block_raises(call, block_id):
    with pytest.raises(ValueError, match="blocks 0 to 1"):
        getattr(BlockPool(2, 16), call)(block_id)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (-1, 16), (1, 0), (1, 257)])
def test_impossible_sizes_are_refused(num_blocks, block_size):
    with pytest.raises(ValueError, match=r"at least 1 block|from 1 to 256"):
        BlockPool(num_blocks, block_size)


def test_integrity_notices_a_leak_and_a_lost_reference():
    pool = BlockPool(3, 16)
    pool.allocate(2)
    with pytest.raises(RuntimeError, match="the tables list"):
        pool.check_integrity([[0]])
    with pytest.raises(RuntimeError, match="the tables list"):
        pool.check_integrity([[0, 1], [1]])
    pool._free[1] = None
    with pytest.raises(RuntimeError, match="differ from the free queue"):
        pool.check_integrity()


def test_blocks_work_where_mlx_cannot_be_imported():
    program = (
        "import sys; sys.modules['mlx'] = sys.modules['mlx.core'] = sys.modules['numpy'] = None\n"
        "import pkgutil, importlib, mlx_paged.blocks as blocks\n"
        "names = [m.name for m in pkgutil.iter_modules(blocks.__path__)]\n"
        "for name in names: importlib.import_module('mlx_paged.blocks.' + name)\n"
        "s = blocks.Sequence(blocks.BlockPool(4, 2), [1, 2, 3]); s.reserve(3)\n"
        "print(s.block_table, 'block_pool' in names, 'sequence' in names)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout == "[0, 1] True True\n", run.stderr


def test_the_source_texts_interleaving():
    """Two prompts of 4 and 11 tokens taking turns for 99 steps, as in the text's same.py."""
    pool = BlockPool(64, 16)
    sequences = [Sequence(pool), Sequence(pool)]
    for step in range(100):
        for sequence, prompt in zip(sequences, (4, 11), strict=True):
            num_new = prompt if step == 0 else 1
            sequence.reserve(num_new)
            sequence.num_cached_tokens += num_new
    assert sequences[0].block_table == [0, 3, 5, 7, 9, 11, 13]
    assert sequences[1].block_table == [1, 2, 4, 6, 8, 10, 12]
    assert pool.num_free_blocks == 50

"""The pool's arrays: writes land in their slots, copies copy, and nothing else changes."""

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import tiny_config, tiny_model

from mlx_paged.cache import KVPool, SlotMapping


def random_pool(dtype=mx.float32, num_blocks=6, block_size=4):
    pool = KVPool(2, 3, 8, num_blocks, block_size, dtype)
    for arrays in (pool.keys, pool.values):
        for layer, array in enumerate(arrays):
            arrays[layer] = mx.random.normal(array.shape).astype(dtype)
    mx.eval(pool.keys, pool.values)
    return pool


def contents(pool):
    """All arrays of the pool as one numpy array, [K or V, layer, block, head, offset, dim]."""
    return np.stack([[np.array(a) for a in arrays] for arrays in (pool.keys, pool.values)])


@pytest.mark.parametrize("slots", [[13], [5, 22, 0, 23]])
def test_write_changes_the_named_slots_and_no_others(slots):
    pool = random_pool()
    expected = contents(pool)
    keys = mx.random.normal((len(slots), 3, 8))
    values = mx.random.normal((len(slots), 3, 8))
    pool.write(1, keys, values, SlotMapping(slots, 4))
    for i, slot in enumerate(slots):
        expected[0, 1, slot // 4, :, slot % 4] = np.array(keys)[i]
        expected[1, 1, slot // 4, :, slot % 4] = np.array(values)[i]
    np.testing.assert_array_equal(contents(pool), expected)


def test_copied_blocks_equal_their_sources_even_where_a_source_is_overwritten():
    pool = random_pool()
    expected = contents(pool)
    expected[:, :, [1, 4, 5]] = expected[:, :, [0, 1, 0]]
    pool.copy_blocks([(0, 1), (1, 4), (0, 5)])
    np.testing.assert_array_equal(contents(pool), expected)


def test_a_dtype_other_than_the_pools_is_refused():
    pool = random_pool(mx.float16)
    rows = mx.zeros((1, 3, 8), mx.bfloat16)
    with pytest.raises(ValueError, match=r"holds mlx\.core\.float16, but the model writes"):
        pool.write(0, rows, rows, SlotMapping([0], 4))


def test_rolling_back_forgets_writes_that_were_never_evaluated():
    pool = random_pool()
    expected = contents(pool)
    before = pool.checkpoint()
    rows = mx.ones((1, 3, 8))
    for layer in range(2):
        pool.write(layer, rows, rows, SlotMapping([7], 4))
    pool.roll_back(before)
    np.testing.assert_array_equal(contents(pool), expected)


def test_an_array_that_mlx_cannot_index_is_refused_with_what_fits():
    with pytest.raises(ValueError, match="at most 65535 blocks of this shape fit"):
        KVPool(1, 8, 128, 65536, 32)


def test_sizes_in_bytes():
    pool = KVPool(28, 2, 128, num_blocks=3, block_size=16, dtype=mx.float16)
    assert pool.block_nbytes == 458_752
    assert pool.nbytes == 3 * 458_752 == sum(a.nbytes for a in pool.keys + pool.values)


@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
def test_a_pool_takes_its_shape_from_the_model(model_type):
    changes = {"head_dim": 80} if model_type == "llama" else {}
    model = tiny_model(tiny_config(model_type, **changes), mx.bfloat16)
    pool = KVPool.for_model(model, num_blocks=2, block_size=8)
    assert pool.keys[1].shape == (2, 2, 8, changes.get("head_dim", 32))
    assert pool.keys[1].dtype == mx.bfloat16

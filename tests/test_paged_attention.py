"""Gathered attention against float64, with NaN in every slot that no token was written to."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged.cache import Batch, choose_path, gather, paged_attention
from mlx_paged.cache.decode_groups import MIN_GROUP_TOKENS, group_by_length
from mlx_paged.kernels import metal

# Output rounding of values of order one, and in float32 that of sums over a few hundred keys.
BOUNDS = {mx.float32: 5e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}
MIXED = [(0, 1), (15, 1), (16, 1), (299, 1), (130, 1), (0, 30), (20, 7), (0, 16), (250, 33)]


def rounded(rng, shape, dtype):
    """Normal values that `dtype` holds exactly, as float32 and for the reference."""
    return np.array(
        mx.array(rng.standard_normal(shape, np.float32)).astype(dtype).astype(mx.float32)
    )


def reference(queries, keys, values, num_cached, window=None):
    """Causal attention in float64, [tokens, heads, dim], one query at a time."""
    queries, keys, values = (a.astype(np.float64) for a in (queries, keys, values))
    num_new, num_heads, dim = queries.shape
    group = num_heads // keys.shape[1]
    output = np.empty_like(queries)
    for i in range(num_new):
        for head in range(num_heads):
            stop = num_cached + i + 1
            seen = slice(max(0, stop - (window or stop)), stop)
            scores = keys[seen, head // group] @ queries[i, head] / np.sqrt(dim)
            weights = np.exp(scores - scores.max())
            output[i, head] = weights @ values[seen, head // group] / weights.sum()
    return output


def largest_error(rows, block_size, num_kv_heads, group, dim, dtype, window=None):
    """Attend over rows of (cached, new) tokens in shuffled blocks of a pool full of NaN.

    Blocks before a row's windows are NaN too, as nobody needs to read them.
    """
    rng = np.random.default_rng(0)
    counts = [-(-(cached + new) // block_size) for cached, new in rows]
    free = list(rng.permutation(sum(counts) + 3))
    key_pool = np.full((len(free), num_kv_heads, block_size, dim), np.nan, np.float32)
    value_pool = key_pool.copy()
    queries, expected, specs = [], [], []
    for (cached, new), count in zip(rows, counts, strict=True):
        table = [int(free.pop()) for _ in range(count)]
        shape = (cached + new, num_kv_heads, dim)
        keys, values = rounded(rng, shape, dtype), rounded(rng, shape, dtype)
        first_seen = max(0, cached + 1 - window) if window else 0
        for i in range(first_seen // block_size * block_size, cached + new):
            key_pool[table[i // block_size], :, i % block_size] = keys[i]
            value_pool[table[i // block_size], :, i % block_size] = values[i]
        queries.append(rounded(rng, (new, num_kv_heads * group, dim), dtype))
        expected.append(reference(queries[-1], keys, values, cached, window))
        specs.append((table, cached, new))
    arrays = (mx.array(a).astype(dtype) for a in (np.concatenate(queries), key_pool, value_pool))
    batch = Batch.of(specs, block_size)
    output = paged_attention(*arrays, batch, dim**-0.5, "gather", window)
    assert output.dtype == dtype
    return np.abs(np.array(output.astype(mx.float32)) - np.concatenate(expected)).max()


@pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: str(dtype).split(".")[-1])
@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
def test_mixed_rows_at_every_block_size_and_dtype(block_size, dtype):
    assert largest_error(MIXED, block_size, 2, 3, 64, dtype) < BOUNDS[dtype]


@pytest.mark.parametrize(
    ("num_kv_heads", "group", "dim"), [(1, 1, 32), (2, 6, 80), (1, 8, 128), (3, 1, 96), (1, 2, 20)]
)
def test_head_counts_and_dims(num_kv_heads, group, dim):
    assert largest_error(MIXED, 16, num_kv_heads, group, dim, mx.float32) < BOUNDS[mx.float32]


@pytest.mark.parametrize(
    "rows",
    [[(0, 1)], [(n, 1) for n in (7, 8, 9)], [(0, 2)], [(500, 600)], [(63, 1)] * 5 + [(64, 64)]],
    ids=str,
)
def test_single_rows_borders_and_tiles(rows):
    assert largest_error(rows, 8, 1, 2, 32, mx.float32) < BOUNDS[mx.float32]


@pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: str(dtype).split(".")[-1])
@pytest.mark.parametrize("window", [1, 8, 33, 250])
@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
def test_windows_of_mixed_rows(block_size, window, dtype):
    assert largest_error(MIXED, block_size, 2, 3, 64, dtype, window) < BOUNDS[dtype]


@pytest.mark.parametrize("window", [299, 300, 301])
def test_a_window_as_long_as_the_longest_row(window):
    assert largest_error(MIXED, 16, 1, 2, 32, mx.float32, window) < BOUNDS[mx.float32]


@pytest.mark.parametrize("window", [20, 140])
@pytest.mark.parametrize("rows", [[(600, 1)], [(500, 600)], [(600, 1), (30, 1)]], ids=str)
def test_windows_of_long_rows(rows, window):
    assert largest_error(rows, 8, 1, 2, 32, mx.float32, window) < BOUNDS[mx.float32]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_mix_of_rows(data):
    decode = data.draw(st.lists(st.tuples(st.integers(0, 300), st.just(1)), max_size=6))
    prefill = st.tuples(st.integers(0, 100), st.integers(2, 40))
    rows = decode + data.draw(st.lists(prefill, min_size=not decode, max_size=4))
    block_size = data.draw(st.sampled_from([1, 2, 7, 8, 16, 32]))
    window = data.draw(st.none() | st.integers(1, 320))
    assert largest_error(rows, block_size, 2, 2, 16, mx.float32, window) < BOUNDS[mx.float32]


def test_a_decode_step_with_a_window_gathers_the_blocks_that_it_reaches():
    rows = [(list(range(400)), 6000, 1), (list(range(400, 402)), 20, 1)]
    batch = Batch.of(rows, 16)
    (group,) = batch.decode_groups(window=100).groups
    assert group.num_full_blocks == 7
    assert batch.row_table(0, first_token=6000 - 99).tolist() == list(range(368, 376))


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40))
def test_no_row_is_padded_past_twice_its_length(token_counts):
    counts = np.array(token_counts, np.int32)
    groups = group_by_length(counts)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(counts)))
    for rows in groups:
        longest = counts[rows].max()
        assert longest <= MIN_GROUP_TOKENS or longest <= 2 * counts[rows].min()


def test_metal_is_refused_where_there_is_none():
    if mx.metal.is_available():
        pytest.skip("this machine has Metal")
    assert choose_path("auto") == "gather"
    with pytest.raises(ValueError, match="MLX finds none here; use attention 'auto' or 'gather'"):
        choose_path("metal")


def test_a_path_must_be_one_that_there_is():
    with pytest.raises(ValueError, match="not 'flash'"):
        choose_path("flash")


def test_head_dims_without_a_kernel_are_gathered():
    with metal.using(lambda **_: None):
        assert choose_path("auto", 64) == choose_path("metal", 64) == "metal"
        assert choose_path("auto", 20) == "gather"
        with pytest.raises(ValueError, match="and the model's is 20; use attention 'auto'"):
            choose_path("metal", 20)


@pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: str(dtype).split(".")[-1])
@pytest.mark.parametrize("window", [None, 20, 29])
def test_prefill_by_mlxs_own_attention_for_gpus(window, dtype, monkeypatch):
    monkeypatch.setattr(gather, "_attend_causal", gather._attend_fused)
    # Off a GPU it keeps scores in the pool's dtype, so that its error is larger.
    assert largest_error(MIXED, 16, 2, 3, 64, dtype, window) < 2 * BOUNDS[dtype]

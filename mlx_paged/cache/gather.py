"""Paged attention in MLX operations, for machines without Metal kernels.

Scores are taken in base 2, as the kernels do: MLX's pow is 2.6 times as fast as its exp on an
x86 CPU. Sums and softmax are in float32, whatever the pool's dtype.
"""

from __future__ import annotations

import math
from typing import TypeGuard

import mlx.core as mx

from mlx_paged.cache.batch import Batch
from mlx_paged.cache.decode_groups import DecodeGroup
from mlx_paged.kernels.quantized import PoolArray

LOG2_E = math.log2(math.e)

# A prefill tile's scores are at most this many elements (32 MiB), unless 16 rows need more.
MAX_TILE_SCORES = 2**23
MAX_TILE_TOKENS = 256

# Below this many tokens a block, one matrix product per block costs more than a copy.
MIN_IN_PLACE_BLOCK_SIZE = 8

# A single row of up to this many tokens costs less copied: fewer operations on a CPU. Its last bits
# then aren't those that it has in a batch, as with a BLAS's products of a single row.
SHORT_ROW_TOKENS = 128


def gather_decode_attention(
    queries: mx.array,
    key_pool: PoolArray,
    value_pool: PoolArray,
    batch: Batch,
    scale: float,
    window: int | None = None,
) -> mx.array:
    """Attention of the rows with one new token, [R, num_heads, head_dim].

    Rows are taken in groups of similar length, so that a short one is never padded to the
    longest of the batch. With a window, that is the length of what it shows.
    """
    if batch.num_decode_rows == 1:
        num_seen = int(batch.token_counts[0])
        if min(num_seen, window or num_seen) <= SHORT_ROW_TOKENS:
            return _attend_row(queries, key_pool, value_pool, batch, 0, scale, window)
    decode = batch.decode_groups(window)
    if len(decode.groups) == 1:
        return _attend_group(queries, key_pool, value_pool, decode.groups[0], scale)
    outputs = [
        _attend_group(queries[group.rows], key_pool, value_pool, group, scale)
        for group in decode.groups
    ]
    return mx.concatenate(outputs)[decode.order]


def _attend_group(
    queries: mx.array, key_pool: PoolArray, value_pool: PoolArray, group: DecodeGroup, scale: float
) -> mx.array:
    """Attend over each row's full blocks and its tail, the last block, apart.

    Only a tail has unwritten slots. They may hold NaN, so its scores and values are selected.
    """
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads, block_size = key_pool.shape[1:3]
    scaled = queries.astype(mx.float32) * (scale * LOG2_E)
    scaled = scaled.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)

    tail_keys = key_pool[group.tail_blocks].astype(mx.float32)
    scores = scaled @ tail_keys.swapaxes(-1, -2)
    if group.num_full_blocks:
        scores = mx.concatenate([_full_scores(scaled, key_pool, group), scores], axis=-1)
    weights, total = _softmax_terms(mx.where(group.is_token, scores, -mx.inf))

    num_full_tokens = group.num_full_blocks * block_size
    tail_values = mx.where(group.is_tail_token, value_pool[group.tail_blocks], 0)
    output = weights[..., num_full_tokens:] @ tail_values.astype(mx.float32)
    if group.num_full_blocks:
        output = output + _full_outputs(weights[..., :num_full_tokens], value_pool, group)
    return (output / total).reshape(queries.shape).astype(queries.dtype)


def _full_scores(queries: mx.array, key_pool: PoolArray, group: DecodeGroup) -> mx.array:
    """Scores of [R, num_kv_heads, G, head_dim] with each row's full blocks, [..., tokens]."""
    num_rows, num_kv_heads, num_queries, head_dim = queries.shape
    if not _multiplies_in_place(key_pool):
        keys = _collect(key_pool, group.full_tables).astype(mx.float32)
        return queries @ keys.swapaxes(-1, -2)
    scores = mx.gather_mm(
        queries.reshape(-1, num_queries, head_dim),
        key_pool.reshape(-1, *key_pool.shape[2:]).swapaxes(-1, -2),
        *group.query_pairs(num_kv_heads),
    )
    by_head = scores.transpose(0, 2, 3, 1, 4)
    return by_head.reshape(num_rows, num_kv_heads, num_queries, -1)


def _full_outputs(weights: mx.array, value_pool: PoolArray, group: DecodeGroup) -> mx.array:
    """Weighted sums of the values in each row's full blocks, [R, num_kv_heads, G, head_dim]."""
    num_rows, num_kv_heads, num_queries, _ = weights.shape
    if not _multiplies_in_place(value_pool):
        return weights @ _collect(value_pool, group.full_tables).astype(mx.float32)
    block_size = value_pool.shape[2]
    by_block = weights.reshape(num_rows, num_kv_heads, num_queries, -1, block_size)
    outputs = mx.gather_mm(
        by_block.transpose(0, 3, 1, 2, 4).reshape(-1, num_queries, block_size),
        value_pool.reshape(-1, *value_pool.shape[2:]),
        *group.weight_pairs(num_kv_heads),
    )
    return outputs.sum(axis=1)


def _multiplies_in_place(pool: PoolArray) -> TypeGuard[mx.array]:
    """Whether blocks can be multiplied where they lie, through gather_mm, without a copy.

    MLX has it for float32 on a CPU. Elsewhere (float16 on a CPU throws), and where they have to
    be dequantised, blocks are collected.
    """
    return (
        isinstance(pool, mx.array)
        and pool.dtype == mx.float32
        and pool.shape[2] >= MIN_IN_PLACE_BLOCK_SIZE
        and mx.default_device() == mx.Device(mx.cpu)
    )


def _collect(pool: PoolArray, tables: mx.array) -> mx.array:
    """Copy blocks [..., B] into contiguous rows, [..., num_kv_heads, B * block_size, head_dim]."""
    blocks = pool[tables].swapaxes(-4, -3)
    return blocks.reshape(*blocks.shape[:-3], -1, blocks.shape[-1])


def gather_prefill_attention(
    queries: mx.array,
    key_pool: PoolArray,
    value_pool: PoolArray,
    batch: Batch,
    scale: float,
    window: int | None = None,
) -> mx.array:
    """Causal attention of the rows with several new tokens, [tokens, num_heads, head_dim].

    Rows are taken one by one and in tiles of queries, so that neither the score matrix nor
    anything above the diagonal's tiles, or before the windows', is ever built.
    """
    first = int(batch.row_starts[batch.num_decode_rows])
    outputs = []
    for row in range(batch.num_decode_rows, len(batch.num_new)):
        start, stop = batch.row_starts[row : row + 2] - first
        new = queries[int(start) : int(stop)]
        outputs.append(_attend_row(new, key_pool, value_pool, batch, row, scale, window))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def _attend_row(
    queries: mx.array,
    key_pool: PoolArray,
    value_pool: PoolArray,
    batch: Batch,
    row: int,
    scale: float,
    window: int | None,
) -> mx.array:
    """Causal attention of one row's new tokens, over copies of the keys and values they see."""
    num_tokens = int(batch.token_counts[row])
    first = _first_seen(num_tokens - len(queries), window)
    table = batch.row_table(row, first)
    seen = slice(
        first % batch.block_size, num_tokens - first // batch.block_size * batch.block_size
    )
    keys = _collect(key_pool, table)[:, seen]
    values = _collect(value_pool, table)[:, seen]
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    if on_cpu and (len(queries) > 1 or queries.dtype != mx.float32):
        return _attend_causal(queries, keys, values, scale, window)
    return _attend_fused(queries, keys, values, scale, window)


def _first_seen(position: int, window: int | None) -> int:
    """Position of the first token that the token at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def _attend_fused(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, window: int | None
) -> mx.array:
    """The same as `_attend_causal`, by MLX's own function, which keeps to tiles on GPUs."""
    num_new, num_keys = len(queries), keys.shape[1]
    mask: mx.array | str | None = None
    if num_new > 1:
        is_whole = window is None or num_keys <= window
        mask = "causal" if is_whole else _is_seen(num_new, num_keys, window)
    output = mx.fast.scaled_dot_product_attention(
        queries.swapaxes(0, 1)[None], keys[None], values[None], scale=scale, mask=mask
    )
    return output[0].swapaxes(0, 1)


def _attend_causal(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, window: int | None
) -> mx.array:
    """Attention of the last tokens of one sequence, [tokens, num_heads, head_dim]."""
    keys, values = keys.astype(mx.float32), values.astype(mx.float32)
    num_new, num_heads, _ = queries.shape
    num_cached = keys.shape[1] - num_new
    size = MAX_TILE_SCORES // (num_heads * keys.shape[1])
    size = max(16, min(MAX_TILE_TOKENS, size))
    tiles = []
    for start in range(0, num_new, size):
        tile = queries[start : start + size]
        position = num_cached + start
        seen = slice(_first_seen(position, window), position + tile.shape[0])
        tiles.append(_attend_tile(tile, keys[:, seen], values[:, seen], scale, window))
    return tiles[0] if len(tiles) == 1 else mx.concatenate(tiles)


def _attend_tile(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, window: int | None
) -> mx.array:
    """Attention of queries whose last one sees up to the last key, each before it one key less."""
    num_queries, _, head_dim = queries.shape
    num_kv_heads, num_keys, _ = keys.shape
    scaled = queries.astype(mx.float32) * (scale * LOG2_E)
    by_head = scaled.reshape(num_queries, num_kv_heads, -1, head_dim).transpose(1, 2, 0, 3)
    rows = by_head.reshape(num_kv_heads, -1, head_dim)
    scores = (rows @ keys.swapaxes(-1, -2)).reshape(num_kv_heads, -1, num_queries, num_keys)
    # Adding is enough here: every key up to num_keys is written.
    weights, total = _softmax_terms(
        scores + mx.where(_is_seen(num_queries, num_keys, window), 0.0, -mx.inf)
    )
    output = weights.reshape(num_kv_heads, -1, num_keys) @ values
    output = output.reshape(num_kv_heads, -1, num_queries, head_dim) / total
    return output.transpose(2, 0, 1, 3).reshape(queries.shape).astype(queries.dtype)


def _is_seen(num_queries: int, num_keys: int, window: int | None) -> mx.array:
    """Which keys each of the last `num_queries` tokens sees, [num_queries, num_keys]."""
    positions, keys = mx.arange(num_keys - num_queries, num_keys)[:, None], mx.arange(num_keys)
    if window is None:
        return keys <= positions
    return (keys <= positions) & (keys > positions - window)


def _softmax_terms(scores: mx.array) -> tuple[mx.array, mx.array]:
    """Numerator and denominator of the softmax of base-2 scores over the last axis."""
    weights = mx.power(2.0, scores - scores.max(axis=-1, keepdims=True))
    return weights, weights.sum(axis=-1, keepdims=True)

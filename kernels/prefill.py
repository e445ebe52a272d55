"""Launches the prefill kernel: new tokens of many sequences attend over what is cached of each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise, product

import mlx.core as mx
import numpy as np

from . import metal
from .decode import MERGE, NO_WINDOW
from .defaults import num_cores
from .launch import MAX_BLOCK_SIZE, DecodeShape
from .metal import SIMD_WIDTH, Kernel, Launch
from .prefill_launch import PrefillLaunch, default_prefill_launch
from .quantized import PoolArray, parts
from .shapes import attention_shape

HEADERS = ("paging.metal", "softmax.metal", "matrix.metal", "staging.metal")


def _prefill_kernel(is_partial: bool, is_quantized: bool) -> Kernel:
    flags = {"QUANTIZED": is_quantized, "PARTIAL": is_partial}
    defines = tuple(name for name, is_set in flags.items() if is_set)
    pool = ("codes", "scales", "biases") if is_quantized else ("pool",)
    inputs = ["queries", *(f"{of}_{part}" for of in ("key", "value") for part in pool)]
    inputs += ["block_tables", "context_lens", "tiles", "scale", "window"]
    if is_partial:
        inputs.append("split_tokens")
    return Kernel(
        "_".join(["prefill", *map(str.lower, defines)]),
        "prefill.metal",
        tuple(inputs),
        ("partial_out", "partial_stats") if is_partial else ("out",),
        HEADERS,
        defines,
    )


# By (writes partial results, reads quantised rows).
PREFILL = {flags: _prefill_kernel(*flags) for flags in product((False, True), repeat=2)}


def paged_prefill_attention(
    queries: mx.array,
    key_pool: PoolArray,
    value_pool: PoolArray,
    block_tables: mx.array,
    context_lens: mx.array,
    row_starts: Sequence[int],
    *,
    scale: float,
    max_context_len: int,
    window: int | None = None,
    launch: PrefillLaunch | None = None,
) -> mx.array:
    """Causal attention of each sequence's last tokens over its blocks, read where they lie.

    Args:
        queries: [N, query heads, head_dim], of the pools' dtype: the new tokens of one sequence
            after the other, of which each may have any number.
        key_pool, value_pool: [blocks, KV heads, block_size, head_dim], row contiguous: see
            `metal.require_row_contiguous`. A strided pool isn't copied and gives NaN. Quantised
            pools, both in one format, are dequantised as they are read.
        block_tables: int32 [S, max blocks], of which those of `context_lens` tokens are read.
        context_lens: int32 [S], tokens of each sequence in its blocks, new ones included.
        row_starts: host integers [S + 1]: where in `queries` each sequence starts, N at the end.
        scale: of the scores, usually head_dim**-0.5.
        max_context_len: at least the largest of `context_lens`, which only the device knows.
        window: how many tokens a token sees, itself included; all by default.
        launch: launch choices, by default those that suit the shape.

    Returns [N, query heads, head_dim] in the queries' dtype. A token's bits depend on its sequence
    alone, not on the batch nor on how the sequence was cut into chunks, unless keys are split; they
    are where tiles are few and sequences long. Raises ValueError for shapes, dtypes or launch
    choices that the kernel doesn't take.
    """
    shape = attention_shape(queries, key_pool, value_pool)
    starts = tuple(map(int, row_starts))
    _check_rows(queries.shape[0], starts, block_tables, context_lens)
    block_size = key_pool.shape[2]
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ValueError(f"the kernel takes block sizes 1 to {MAX_BLOCK_SIZE}, not {block_size}")
    if not 0 <= max_context_len <= block_tables.shape[1] * block_size:
        raise ValueError(
            f"max_context_len {max_context_len} doesn't fit tables of {block_tables.shape[1]} "
            f"blocks of {block_size} tokens"
        )
    if window is not None and not 1 <= window <= NO_WINDOW:
        raise ValueError(f"a window is of at least 1 token, the token itself, not {window}")
    if queries.shape[0] == 0:
        return mx.zeros_like(queries)
    choices = _choices(shape, launch)
    tiles = tile_list(starts, choices.heads, choices.rows)
    inputs = [queries, *parts(key_pool), *parts(value_pool), block_tables, context_lens, tiles]
    inputs += [_scalar(scale, mx.float32), _scalar(window or NO_WINDOW, mx.int32)]
    num_queries, num_tiles = queries.shape[0], tiles.shape[0]
    num_splits = 1
    if window is None:  # which leaves little to split
        threadgroups = num_tiles * shape.num_kv_heads * choices.head_splits(shape.group_size)
        split_tokens = choices.tokens_per_split(threadgroups, max_context_len)
        num_splits = max(1, -(-max_context_len // split_tokens))
    prefill = _launch(shape, choices, block_size, num_tiles, num_queries, num_splits)
    if num_splits == 1:
        return prefill(*inputs)[0]
    partial_out, partial_stats = prefill(*inputs, _scalar(split_tokens, mx.int32))
    return _merge(shape, partial_out, partial_stats)


@lru_cache(maxsize=16)
def tile_list(row_starts: tuple[int, ...], heads: int, rows: int) -> mx.array:
    """What each threadgroup of a KV head takes, int32 [tiles, 4].

    A tile is (sequence, first of its rows, the sequence's first query, how many queries it has),
    where a sequence has a row for each query and head. A sequence's last rows, which see the most,
    come first, so that the longest work isn't begun last. Kept, since all layers ask for the same.
    """
    tiles = [
        (seq, row, start, stop - start)
        for seq, (start, stop) in enumerate(pairwise(row_starts))
        for row in reversed(range(0, (stop - start) * heads, rows))
    ]
    return mx.array(np.array(tiles, np.int32))


@lru_cache(maxsize=256)
def _launch(
    shape: DecodeShape,
    choices: PrefillLaunch,
    block_size: int,
    num_tiles: int,
    num_queries: int,
    num_splits: int,
) -> Launch:
    """A launch whose template has nothing of lengths, so that no prompt compiles anything anew."""
    rows = (num_queries, shape.num_query_heads)
    is_partial = num_splits > 1
    split_rows = (*rows, num_splits)
    is_quantized = shape.kv_bits is not None
    stored = [("BITS", shape.kv_bits), ("QUANT_GROUP", shape.kv_group_size)]
    return PREFILL[is_partial, is_quantized].launch(
        template=[
            *(stored if is_quantized else ()),
            ("T", shape.dtype),
            ("D", shape.head_dim),
            ("KV_HEADS", shape.num_kv_heads),
            ("GROUP", shape.group_size),
            ("BLOCK", block_size),
            ("HEADS", choices.heads),
            ("KEYS", choices.keys),
            ("SIMDGROUPS", choices.simdgroups),
            ("COLUMN_SPLITS", choices.column_splits),
        ],
        threadgroups=(
            shape.num_kv_heads * choices.head_splits(shape.group_size),
            num_tiles,
            num_splits,
        ),
        threads=(choices.num_threads, 1, 1),
        threadgroup_bytes=choices.threadgroup_bytes(shape),
        output_shapes=[(*split_rows, shape.head_dim), (*split_rows, 2)]
        if is_partial
        else [(*rows, shape.head_dim)],
        output_dtypes=[mx.float32, mx.float32] if is_partial else [shape.dtype],
    )


def _merge(shape: DecodeShape, partial_out: mx.array, partial_stats: mx.array) -> mx.array:
    """Join the splits by decode's kernel, to which they are splits of one token each."""
    num_queries, num_heads, num_splits, head_dim = partial_out.shape
    merge = MERGE.launch(
        template=[
            ("T", shape.dtype),
            ("D", head_dim),
            ("QUERY_HEADS", num_heads),
            ("SPLIT_SMALLEST", 1),
            ("SPLIT_LARGEST", 1),
            ("SPLIT_ENOUGH", 1),
        ],
        threadgroups=(num_heads, num_queries, 1),
        threads=(SIMD_WIDTH, 1, 1),
        threadgroup_bytes=0,
        output_shapes=[(num_queries, num_heads, head_dim)],
        output_dtypes=[shape.dtype],
    )
    return merge(partial_out, partial_stats, _full(num_queries, num_splits))[0]


@lru_cache(maxsize=16)
def _full(size: int, value: int) -> mx.array:
    return mx.array(np.full(size, value, np.int32))


@lru_cache(maxsize=64)
def _choices(shape: DecodeShape, launch: PrefillLaunch | None) -> PrefillLaunch:
    choices = launch or default_prefill_launch(shape, num_cores(metal.chip()))
    choices.check(shape)
    return choices


@lru_cache(maxsize=64)
def _scalar(value: float, dtype: mx.Dtype) -> mx.array:
    return mx.array(value, dtype)


def _check_rows(
    num_queries: int,
    row_starts: tuple[int, ...],
    block_tables: mx.array,
    context_lens: mx.array,
) -> None:
    num_sequences = len(row_starts) - 1
    is_rising = all(start <= stop for start, stop in pairwise(row_starts))
    if not row_starts or not is_rising or (row_starts[0], row_starts[-1]) != (0, num_queries):
        raise ValueError(
            f"row_starts rise from 0 to the number of queries, {num_queries}, and not as "
            f"{list(row_starts)}"
        )
    for name, array, ndim in (("block_tables", block_tables, 2), ("context_lens", context_lens, 1)):
        if array.dtype != mx.int32 or array.ndim != ndim or array.shape[0] != num_sequences:
            raise ValueError(
                f"{name} are int32 with {num_sequences} rows, one per sequence, not "
                f"{array.dtype} of {array.shape}"
            )

"""Launches the decode kernel: one query token per sequence attends over its cached tokens."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import mlx.core as mx

from . import tuned
from .launch import MAX_BLOCK_SIZE, DecodeLaunch, DecodeShape
from .metal import SIMD_WIDTH, Kernel, Launch
from .quantized import PoolArray, parts
from .shapes import attention_shape

NO_WINDOW = 2**31 - 1  # further back than any token

HEADERS = ("paging.metal", "softmax.metal", "tile.metal")
QUANTIZED_HEADERS = ("paging.metal", "softmax.metal", "quantized_tile.metal")
_PARTIALS = ("partial_out", "partial_stats")


def _decode_kernel(is_paged: bool, is_partial: bool, is_quantized: bool) -> Kernel:
    pools = ("pool",) if not is_quantized else ("codes", "scales", "biases")
    arrays = [f"{of}_{part}" for of in ("key", "value") for part in pools]
    tables = ("block_tables",) if is_paged else ()
    flags = {"PAGED": is_paged, "QUANTIZED": is_quantized, "PARTIAL": is_partial}
    defines = tuple(name for name, is_set in flags.items() if is_set)
    return Kernel(
        "_".join(["decode", *map(str.lower, defines)]),
        "decode.metal",
        ("queries", *arrays, "context_lens", "scale", "window", *tables),
        _PARTIALS if is_partial else ("out",),
        QUANTIZED_HEADERS if is_quantized else HEADERS,
        defines,
    )


# By (has a block table, writes partial results, reads quantised rows).
DECODE = {
    variant: _decode_kernel(*variant)
    for variant in product((True, False), repeat=3)
    if variant[0] or not variant[2]
}
MERGE = Kernel("merge", "merge.metal", (*_PARTIALS, "context_lens"), ("out",), ("softmax.metal",))


def paged_decode_attention(
    queries: mx.array,
    key_pool: PoolArray,
    value_pool: PoolArray,
    block_tables: mx.array,
    context_lens: mx.array,
    *,
    scale: float,
    max_context_len: int,
    window: int | None = None,
    launch: DecodeLaunch | None = None,
) -> mx.array:
    """Attention of one query token per sequence over blocks, read where they lie.

    Args:
        queries: [sequences, query heads, head_dim], of the pools' dtype.
        key_pool, value_pool: [blocks, KV heads, block_size, head_dim], row contiguous: see
            `metal.require_row_contiguous`. A strided pool isn't copied and gives NaN. Quantised
            pools, both in one format, are dequantised as they are read.
        block_tables: int32 [sequences, max blocks]. Entries past a sequence's blocks aren't read.
        context_lens: int32 [sequences], cached tokens of each; a sequence with none gives zeros.
        scale: of the scores, usually head_dim**-0.5.
        max_context_len: at least the largest of `context_lens`, which only the device knows.
        window: how many of its last tokens a sequence attends over; all by default. What is
            before isn't read, so its blocks may be gone.
        launch: launch choices, by default those that suit the chip and the shape.

    Returns [sequences, query heads, head_dim] in the queries' dtype. A row's bits depend on that
    sequence alone, not on its batch. Raises ValueError for shapes, dtypes or launch choices that
    the kernel doesn't take.
    """
    shape = attention_shape(queries, key_pool, value_pool)
    _check_lens(context_lens, queries.shape[0])
    block_size = key_pool.shape[2]
    _check_tables(block_tables, queries.shape[0], block_size, max_context_len)
    if window is not None and not 1 <= window <= NO_WINDOW:
        raise ValueError(f"a window is of at least 1 token, and not of {window}")
    pools = [*parts(key_pool), *parts(value_pool)]
    inputs = [queries, *pools, context_lens, *_scalars(scale, window), block_tables]
    if window is not None:
        context_lens = mx.minimum(context_lens, window)  # what the splits are of
        max_context_len = min(max_context_len, window)
    return _attend(inputs, context_lens, shape, block_size, max_context_len, launch, is_paged=True)


def contiguous_decode_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    context_lens: mx.array,
    *,
    scale: float,
    max_context_len: int,
    launch: DecodeLaunch | None = None,
) -> mx.array:
    """The same kernel without a block table: the baseline that paging is measured against.

    `keys` and `values` are [sequences, KV heads, capacity, head_dim]; all else is as in
    `paged_decode_attention`, down to the bits of the result.
    """
    shape = attention_shape(queries, keys, values)
    _check_lens(context_lens, queries.shape[0])
    capacity = keys.shape[2]
    if keys.shape[0] != queries.shape[0] or not 0 <= max_context_len <= capacity:
        raise ValueError(
            f"keys of shape {keys.shape} can't hold {queries.shape[0]} sequences of up to "
            f"{max_context_len} tokens"
        )
    inputs = [queries, keys, values, context_lens, *_scalars(scale, None)]
    return _attend(inputs, context_lens, shape, capacity, max_context_len, launch, is_paged=False)


def _attend(
    inputs: list[mx.array],
    context_lens: mx.array,
    shape: DecodeShape,
    block_size: int,
    max_context_len: int,
    choices: DecodeLaunch | None,
    is_paged: bool,
) -> mx.array:
    num_sequences = inputs[0].shape[0]
    if num_sequences == 0:
        return mx.zeros_like(inputs[0])
    choices = choices or tuned.choose(shape)
    num_splits = choices.splits.most(max_context_len)
    decode, merge = _launches(shape, choices, block_size, num_sequences, num_splits, is_paged)
    outputs = decode(*inputs)
    if merge:
        outputs = merge(*outputs, context_lens)
    return outputs[0]


@lru_cache(maxsize=1024)
def _launches(
    shape: DecodeShape,
    choices: DecodeLaunch,
    block_size: int,
    num_sequences: int,
    num_splits: int,
    is_paged: bool,
) -> tuple[Launch, Launch | None]:
    """The decode kernel's launch, and where there are several splits the merge kernel's.

    Kept, since every layer of every step asks for the same: a call's share of the host's time is
    10 us with them and 30 us without.
    """
    choices.check(shape.head_dim, shape.num_quant_groups)
    group_size = shape.group_size
    out_shape = (num_sequences, shape.num_query_heads, shape.head_dim)
    rows = (num_sequences, shape.num_query_heads, num_splits)
    is_partial = num_splits > 1
    decode = DECODE[is_paged, is_partial, shape.kv_bits is not None].launch(
        template=_template(shape, choices, block_size),
        threadgroups=(
            shape.num_kv_heads * choices.head_splits(group_size),
            num_sequences,
            num_splits,
        ),
        threads=(choices.num_threads(group_size), 1, 1),
        threadgroup_bytes=choices.threadgroup_bytes(shape),
        output_shapes=[(*rows, shape.head_dim), (*rows, 2)] if is_partial else [out_shape],
        output_dtypes=[mx.float32, mx.float32] if is_partial else [shape.dtype],
    )
    if not is_partial:
        return decode, None
    merge = MERGE.launch(
        template=[
            ("T", shape.dtype),
            ("D", shape.head_dim),
            ("QUERY_HEADS", shape.num_query_heads),
            *_split_template(choices),
        ],
        threadgroups=(shape.num_query_heads, num_sequences, 1),
        threads=(SIMD_WIDTH, 1, 1),
        threadgroup_bytes=0,
        output_shapes=[out_shape],
        output_dtypes=[shape.dtype],
    )
    return decode, merge


def _template(
    shape: DecodeShape, choices: DecodeLaunch, block_size: int
) -> list[tuple[str, mx.Dtype | int]]:
    """Everything that is known before the launch; lengths, table widths and split counts are not,
    so that generating a sequence compiles nothing."""
    quantized = [("BITS", shape.kv_bits), ("QUANT_GROUP", shape.kv_group_size)]
    return [
        *(quantized if shape.kv_bits else ()),
        ("T", shape.dtype),
        ("D", shape.head_dim),
        ("KV_HEADS", shape.num_kv_heads),
        ("GROUP", shape.group_size),
        ("BLOCK", block_size),
        ("HEADS", choices.heads),
        ("HEAD_GROUPS", choices.head_groups(shape.group_size)),
        ("LANES", choices.lanes),
        ("VEC", choices.vector(shape.head_dim)),
        ("KEYS", choices.keys),
        ("SLICES", choices.slices),
        *_split_template(choices),
    ]


def _split_template(choices: DecodeLaunch) -> list[tuple[str, int]]:
    splits = choices.splits
    return [
        ("SPLIT_SMALLEST", splits.smallest),
        ("SPLIT_LARGEST", splits.largest),
        ("SPLIT_ENOUGH", splits.enough),
    ]


@lru_cache(maxsize=64)
def _scalars(scale: float, window: int | None) -> tuple[mx.array, mx.array]:
    return mx.array(scale, mx.float32), mx.array(window or NO_WINDOW, mx.int32)


def _check_lens(context_lens: mx.array, num_sequences: int) -> None:
    if context_lens.dtype != mx.int32 or context_lens.shape != (num_sequences,):
        raise ValueError(
            f"context_lens are int32 of shape ({num_sequences},), not {context_lens.dtype} of "
            f"{context_lens.shape}"
        )


def _check_tables(
    block_tables: mx.array, num_sequences: int, block_size: int, max_context_len: int
) -> None:
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ValueError(f"the kernel takes block sizes 1 to {MAX_BLOCK_SIZE}, not {block_size}")
    if block_tables.dtype != mx.int32 or block_tables.ndim != 2:
        raise ValueError(
            f"block_tables are int32 [sequences, blocks], not {block_tables.dtype} of "
            f"{block_tables.shape}"
        )
    if block_tables.shape[0] != num_sequences:
        raise ValueError(f"{num_sequences} queries with {block_tables.shape[0]} block tables")
    if not 0 <= max_context_len <= block_tables.shape[1] * block_size:
        raise ValueError(
            f"max_context_len {max_context_len} doesn't fit tables of {block_tables.shape[1]} "
            f"blocks of {block_size} tokens"
        )

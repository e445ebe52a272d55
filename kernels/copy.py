"""Launches the copy kernel, the benchmark's measure of reading scattered blocks alone."""

from __future__ import annotations

import mlx.core as mx

from .metal import Kernel

_VECTOR = 4  # elements, as in the decode kernel
_THREADS = 256
_OUTPUTS = ("keys", "values")
PAGED = Kernel(
    "copy_paged",
    "copy.metal",
    ("key_pool", "value_pool", "context_lens", "block_tables"),
    _OUTPUTS,
    ("paging.metal",),
    ("PAGED",),
)
CONTIGUOUS = Kernel(
    "copy", "copy.metal", ("key_pool", "value_pool", "context_lens"), _OUTPUTS, ("paging.metal",)
)


def paged_copy(
    key_pool: mx.array,
    value_pool: mx.array,
    block_tables: mx.array,
    context_lens: mx.array,
    *,
    max_context_len: int,
) -> tuple[mx.array, mx.array]:
    """All cached rows as two [sequences, KV heads, max_context_len, head_dim], zero past the end.

    Pools are row contiguous [blocks, KV heads, block_size, head_dim], tables and lengths int32.
    """
    inputs = [key_pool, value_pool, context_lens, block_tables]
    return _copy(PAGED, inputs, max_context_len)


def contiguous_copy(
    keys: mx.array, values: mx.array, context_lens: mx.array, *, max_context_len: int
) -> tuple[mx.array, mx.array]:
    """The same from contiguous [sequences, KV heads, capacity, head_dim], without a table."""
    return _copy(CONTIGUOUS, [keys, values, context_lens], max_context_len)


def _copy(
    kernel: Kernel, inputs: list[mx.array], max_context_len: int
) -> tuple[mx.array, mx.array]:
    _, num_kv_heads, block_size, head_dim = inputs[0].shape
    num_sequences = inputs[2].shape[0]
    vectors = head_dim // _VECTOR
    tokens = _THREADS // vectors
    shape = (num_sequences, num_kv_heads, max_context_len, head_dim)
    launch = kernel.launch(
        template=[
            ("T", inputs[0].dtype),
            ("D", head_dim),
            ("KV_HEADS", num_kv_heads),
            ("BLOCK", block_size),
            ("TOKENS", max_context_len),
        ],
        threadgroups=(1, -(-max_context_len // tokens), num_sequences * num_kv_heads),
        threads=(vectors, tokens, 1),
        threadgroup_bytes=0,
        output_shapes=[shape, shape],
        output_dtypes=[inputs[0].dtype] * 2,
    )
    keys, values = launch(*inputs)
    return keys, values

"""What queries and pools must have in common, whichever kernel takes them."""

from __future__ import annotations

import mlx.core as mx

from .launch import DTYPES, HEAD_DIMS, DecodeShape
from .quantized import PoolArray, QuantizedArray


def attention_shape(queries: mx.array, keys: PoolArray, values: PoolArray) -> DecodeShape:
    """The shape of an attention over `keys` and `values` [blocks, KV heads, block_size, head_dim].

    Raises:
        ValueError: queries [rows, query heads, head_dim] don't fit them, or no kernel does.
    """
    if queries.ndim != 3 or len(keys.shape) != 4 or keys.shape != values.shape:
        raise ValueError(
            "queries are [rows, query heads, head_dim] and both pools [blocks, KV heads, "
            f"block_size, head_dim], not {queries.shape}, {keys.shape} and {values.shape}"
        )
    if not queries.dtype == keys.dtype == values.dtype or queries.dtype not in DTYPES:
        raise ValueError(
            f"queries, keys and values share one dtype of {', '.join(map(str, DTYPES))}, and "
            f"are {queries.dtype}, {keys.dtype} and {values.dtype}"
        )
    _, num_query_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    if head_dim != keys.shape[3] or head_dim not in HEAD_DIMS:
        raise ValueError(
            f"the kernel takes head_dim {HEAD_DIMS}, the same for queries and pools, and not "
            f"{head_dim} and {keys.shape[3]}: use the gather path"
        )
    if num_query_heads % num_kv_heads:
        raise ValueError(
            f"{num_query_heads} query heads can't share {num_kv_heads} KV heads evenly"
        )
    stored = _stored(keys, values)
    return DecodeShape(num_query_heads, num_kv_heads, head_dim, queries.dtype, *stored)


def _stored(keys: PoolArray, values: PoolArray) -> tuple[int, int] | tuple[()]:
    """Bits of a code and size of a group, if the pools are quantised."""
    formats = {
        (array.bits, array.group_size) if isinstance(array, QuantizedArray) else ()
        for array in (keys, values)
    }
    if len(formats) > 1:
        raise ValueError(
            f"keys and values are stored in one format, not in bits and groups of {formats}"
        )
    return formats.pop()

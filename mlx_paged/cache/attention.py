"""Attention over scattered blocks: the one place that chooses Metal kernels or gathering."""

from __future__ import annotations

from typing import Literal, get_args

import mlx.core as mx

from mlx_paged.cache.batch import Batch
from mlx_paged.cache.gather import gather_decode_attention, gather_prefill_attention
from mlx_paged.kernels import metal, paged_decode_attention, paged_prefill_attention
from mlx_paged.kernels.launch import HEAD_DIMS
from mlx_paged.kernels.quantized import PoolArray

AttentionPath = Literal["auto", "metal", "gather"]


def choose_path(
    attention: AttentionPath = "auto", head_dim: int | None = None
) -> Literal["metal", "gather"]:
    """The attention path that a request for `attention` gets on this machine.

    Args:
        attention: "auto" takes Metal kernels where they run, and gathers elsewhere.
        head_dim: of the model, which the kernels must have been written for.
    """
    if attention not in get_args(AttentionPath):
        raise ValueError(f"attention is 'auto', 'metal' or 'gather', not {attention!r}")
    if attention == "gather":
        return "gather"
    fits = head_dim is None or head_dim in HEAD_DIMS
    if metal.is_available() and fits:
        return "metal"
    if attention == "metal" and not fits:
        raise ValueError(
            f"the Metal kernels take head dimensions {', '.join(map(str, HEAD_DIMS))}, and the "
            f"model's is {head_dim}; use attention 'auto' or 'gather'"
        )
    if attention == "metal":
        raise ValueError(
            "the Metal kernels need a Mac with a Metal device, and MLX finds none here; "
            "use attention 'auto' or 'gather'"
        )
    return "gather"


def paged_attention(
    queries: mx.array,
    key_pool: PoolArray,
    value_pool: PoolArray,
    batch: Batch,
    scale: float,
    path: Literal["metal", "gather"],
    window: int | None = None,
) -> mx.array:
    """Causal attention of a flat batch over the K and V in its blocks.

    Args:
        queries: [N, num_heads, head_dim].
        key_pool, value_pool: [num_blocks, num_kv_heads, block_size, head_dim], with the new
            tokens written.
        batch: rows, block tables and lengths of the N tokens.
        scale: factor of the scores.
        path: "metal" attends over the blocks where they lie; "gather" collects them with MLX
            operations.
        window: how many tokens a token sees, itself included; all before it if None. Blocks
            that lie before the window aren't read.

    Returns:
        [N, num_heads, head_dim]. What unwritten slots hold, NaN included, reaches no output.
    """
    if window is not None and window >= batch.token_counts.max():
        window = None
    num_decode = batch.num_decode_rows
    outputs = []
    if num_decode:
        decode = _metal_decode if path == "metal" else gather_decode_attention
        outputs.append(decode(queries[:num_decode], key_pool, value_pool, batch, scale, window))
    if num_decode < batch.num_tokens:
        new = queries[num_decode:]
        prefill = _metal_prefill if path == "metal" else gather_prefill_attention
        outputs.append(prefill(new, key_pool, value_pool, batch, scale, window))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def _metal_decode(
    queries: mx.array,
    key_pool: PoolArray,
    value_pool: PoolArray,
    batch: Batch,
    scale: float,
    window: int | None,
) -> mx.array:
    tables, lens, longest = batch.decode_rows
    return paged_decode_attention(
        queries,
        key_pool,
        value_pool,
        tables,
        lens,
        scale=scale,
        max_context_len=longest,
        window=window,
    )


def _metal_prefill(
    queries: mx.array,
    key_pool: PoolArray,
    value_pool: PoolArray,
    batch: Batch,
    scale: float,
    window: int | None,
) -> mx.array:
    tables, lens, longest = batch.prefill_rows
    return paged_prefill_attention(
        queries,
        key_pool,
        value_pool,
        tables,
        lens,
        batch.prefill_starts,
        scale=scale,
        max_context_len=longest,
        window=window,
    )

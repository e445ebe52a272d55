"""One forward pass over some sequences: the smallest way to use a pool."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import mlx.core as mx
import mlx.nn as nn

from mlx_paged.blocks import Sequence
from mlx_paged.cache.attention import AttentionPath
from mlx_paged.cache.batch import Batch, Row
from mlx_paged.cache.kv_pool import KVPool
from mlx_paged.cache.paged_cache import PagedCache


def step(
    model: nn.Module,
    pool: KVPool,
    sequences: SequenceOf[Sequence],
    num_new_tokens: SequenceOf[int],
    attention: AttentionPath = "auto",
) -> mx.array:
    """Compute the next tokens of every sequence and store their K and V.

    Sequences with one new token come first.

    Args:
        model: one of `mlx_paged.models`.
        pool: where the sequences' blocks are.
        sequences: whose `token_ids` reach at least `num_new_tokens` past what is cached.
        num_new_tokens: of each sequence.
        attention: "auto", "metal" or "gather".

    Returns:
        Evaluated logits after each sequence's last new token, [S, vocab_size].

    Raises:
        OutOfBlocks: the pool can't hold the tokens; sequences before the one that found no
            room keep what they reserved.
    """
    copies: list[tuple[int, int]] = []
    try:
        for sequence, n in zip(sequences, num_new_tokens, strict=True):
            copies += sequence.reserve(n)
    finally:
        pool.copy_blocks(copies)
    rows, tokens = [], []
    for sequence, n in zip(sequences, num_new_tokens, strict=True):
        first = sequence.num_cached_tokens
        rows.append(Row(sequence.block_table, first, n))
        tokens += sequence.token_ids[first : first + n]
    batch = Batch.of(rows, pool.block_size)
    cache = PagedCache(pool, batch, attention)
    logits = model(mx.array(tokens), cache, batch.cu_seqlens_q[1:] - 1)
    mx.eval(logits, pool.arrays)
    for sequence, n in zip(sequences, num_new_tokens, strict=True):
        sequence.num_cached_tokens += n
    return logits

"""The cache as a model sees it: positions for rope, and attention."""

from __future__ import annotations

import mlx.core as mx

from mlx_paged.cache.attention import AttentionPath, choose_path, paged_attention
from mlx_paged.cache.batch import Batch
from mlx_paged.cache.kv_pool import KVPool


class PagedCache:
    """One forward pass of `batch` over `pool`.

    Args:
        pool: where K and V are stored.
        batch: the tokens of this pass, whose slots have been reserved.
        attention: "metal", "gather", or "auto" for Metal kernels where Metal is.
    """

    def __init__(self, pool: KVPool, batch: Batch, attention: AttentionPath = "auto") -> None:
        self.pool = pool
        self.batch = batch
        self.path = choose_path(attention, pool.head_dim)

    @property
    def positions(self) -> mx.array:
        """Position of each token in its sequence, [N] int32."""
        return self.batch.positions

    def attend(
        self,
        layer: int,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        window: int | None = None,
    ) -> mx.array:
        """Store the new keys and values, then attend over all that the sequences hold.

        Args:
            layer: index of the layer.
            queries: [N, num_heads, head_dim].
            keys, values: of the new tokens, [N, num_kv_heads, head_dim].
            scale: factor of the scores.
            window: how many tokens a token sees, itself included; all before it if None. What
                is before a window stays in the pool, for prefixes that others share.

        Returns:
            [N, num_heads, head_dim]. Each token sees its sequence up to itself.
        """
        self.pool.write(layer, keys, values, self.batch.slot_mapping)
        pools = self.pool.keys[layer], self.pool.values[layer]
        return paged_attention(queries, *pools, self.batch, scale, self.path, window)

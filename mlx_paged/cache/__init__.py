"""The paged KV cache as arrays: the pool, one pass's batch, and attention over blocks."""

from mlx_paged.cache.attention import choose_path, paged_attention
from mlx_paged.cache.batch import Batch, Row, SlotMapping
from mlx_paged.cache.forward_pass import step
from mlx_paged.cache.kv_pool import KVPool
from mlx_paged.cache.mlx_lm_cache import PagedKVCache, make_paged_prompt_cache
from mlx_paged.cache.paged_cache import PagedCache

__all__ = [
    "Batch",
    "KVPool",
    "PagedCache",
    "PagedKVCache",
    "Row",
    "SlotMapping",
    "choose_path",
    "make_paged_prompt_cache",
    "paged_attention",
    "step",
]

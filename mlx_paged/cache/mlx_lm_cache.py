"""A drop-in cache for mlx-lm: its unmodified models and generation loop, on a paged pool."""

from __future__ import annotations

import weakref
from collections.abc import Sequence as SequenceOf
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, create_attention_mask

from mlx_paged.blocks import Sequence
from mlx_paged.cache.batch import SlotMapping
from mlx_paged.cache.kv_pool import KVPool
from mlx_paged.kernels.quantized import PoolArray


def make_paged_prompt_cache(model: nn.Module, pool: KVPool) -> list[PagedKVCache]:
    """Caches for one prompt, to pass to mlx-lm as `prompt_cache`.

    Blocks come from `pool` as the prompt and the answer grow, and go back when the caches are
    dropped. Several prompts can share a pool, each with caches of its own.

    Raises:
        ValueError: the model needs another kind of cache than plain full attention, or has
            other layers than the pool.
    """
    wanted = model.make_cache() if hasattr(model, "make_cache") else [KVCache()] * len(model.layers)
    others = sorted({type(cache).__name__ for cache in wanted if type(cache) is not KVCache})
    if others:
        raise ValueError(
            f"this model keeps its state in {', '.join(others)}; only models of full attention "
            "alone, whose layers all take a KVCache, run on a paged pool by mlx-lm's functions "
            "(mlx_paged.LLM runs Llama and Qwen2 with windows)"
        )
    if len(wanted) != pool.num_layers:
        raise ValueError(f"the model has {len(wanted)} layers and the pool {pool.num_layers}")
    prompt = _Prompt(pool)
    return [PagedKVCache(prompt, layer) for layer in range(pool.num_layers)]


class _Prompt:
    """The sequence that the layers' caches share. The first layer of a pass reserves for all."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.sequence = Sequence(pool.blocks)
        weakref.finalize(self, self.sequence.free)

    def reserve(self, stop: int) -> None:
        """Make room for tokens up to `stop`, unless an earlier layer has."""
        start = self.sequence.num_cached_tokens
        if stop > start:
            self.pool.copy_blocks(self.sequence.reserve(stop - start))
            slots = self.sequence.slots(start, stop)
            self.slot_mapping = SlotMapping(slots, self.pool.block_size)
            self.block_table = mx.array(self.sequence.block_table)
            self.sequence.num_cached_tokens = stop

    def trim(self, num_tokens: int) -> None:
        """Keep `num_tokens`, unless an earlier layer has trimmed to them."""
        if num_tokens < self.sequence.num_cached_tokens:
            self.sequence.trim(self.sequence.num_cached_tokens - num_tokens)
            self.block_table = mx.array(self.sequence.block_table, mx.int32)


class PagedKVCache:
    """One layer's cache, with the interface of mlx-lm's `KVCache`.

    Attributes:
        offset: tokens stored in this layer.
    """

    def __init__(self, prompt: _Prompt, layer: int) -> None:
        self._prompt = prompt
        self._layer = layer
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store new K and V, [1, num_kv_heads, tokens, head_dim], and return all, gathered."""
        if keys.shape[0] != 1:
            raise ValueError(
                f"a paged prompt cache holds one sequence, not a batch of {keys.shape[0]}; make "
                "one for each, or use mlx_paged.LLM for batches"
            )
        prompt, pool = self._prompt, self._prompt.pool
        stop = self.offset + keys.shape[2]
        prompt.reserve(stop)
        self.offset = stop
        new_keys, new_values = keys[0].swapaxes(0, 1), values[0].swapaxes(0, 1)
        pool.write(self._layer, new_keys, new_values, prompt.slot_mapping)
        if self._layer == pool.num_layers - 1:
            # mlx-lm dispatches a step while the one before it runs and still holds the pool, so
            # that every write would copy it. The graph is built by now: wait here.
            mx.synchronize()
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Copies of the stored K and V in order, [1, num_kv_heads, offset, head_dim]."""
        pool = self._prompt.pool
        return (
            self._gather(pool.keys[self._layer]),
            self._gather(pool.values[self._layer]),
        )

    def _gather(self, array: PoolArray) -> mx.array:
        blocks = array[self._prompt.block_table].swapaxes(0, 1)
        return blocks.reshape(1, blocks.shape[0], -1, blocks.shape[-1])[:, :, : self.offset]

    @property
    def state(self) -> tuple[Any, ...]:
        """K, V and the number of tokens, as mlx-lm's prompt caches are saved."""
        return (None, None, 0) if self.empty() else (*self.keys_and_values(), self.offset)

    @state.setter
    def state(self, state: SequenceOf[Any]) -> None:
        keys, values, offset = state
        self.trim(self.offset)
        if offset:
            self.update_and_fetch(keys[:, :, :offset], values[:, :, :offset])

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return create_attention_mask(*args, offset=self.offset, **kwargs)

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Drop the last n tokens and give back the blocks that then hold none."""
        n = min(self.offset, n)
        self.offset -= n
        self._prompt.trim(self.offset)
        return n

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.offset == 0

    @property
    def nbytes(self) -> int:
        """Bytes of this layer's blocks, reserved slots included."""
        pool = self._prompt.pool
        num_blocks = len(self._prompt.sequence.block_table)
        return num_blocks * pool.block_nbytes // pool.num_layers

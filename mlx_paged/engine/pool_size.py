"""How many blocks the pool gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_paged.cache import Batch, KVPool, PagedCache
from mlx_paged.cache.kv_format import BlockShape, kv_shape
from mlx_paged.cache.kv_pool import MAX_ARRAY_ELEMENTS
from mlx_paged.engine.options import EngineOptions
from mlx_paged.engine.params import SamplingParams
from mlx_paged.engine.sampler import Draw, Draws, sample
from mlx_paged.memory import MemoryLimit, memory_limit

MIB = 2**20
GIB = 2**30
CPU_KV_MEMORY = GIB


def num_pool_blocks(
    options: EngineOptions,
    block: BlockShape,
    weights_nbytes: int,
    measure_activations: Callable[[], int],
    limit: MemoryLimit | None = None,
) -> int:
    """Blocks that `options` ask for or, by default, that memory has room for.

    On a GPU the pool gets `memory_fraction` of the recommended working set, minus the weights
    and the activations' measured peak. On a CPU it gets `CPU_KV_MEMORY`.

    Args:
        options: `num_blocks` or `kv_memory` decide if they are given.
        block: of the model.
        weights_nbytes: bytes of the model's weights.
        measure_activations: gives the peak of a step's activations, in bytes. Only called
            where the size depends on it.
        limit: the machine's memory, if it is a GPU's; found out by default.

    Raises:
        ValueError: there is no room for a block, with the numbers.
    """
    if options.num_blocks is not None:
        if options.num_blocks < 1:
            raise ValueError(f"the pool needs at least 1 block, not {options.num_blocks}")
        return options.num_blocks
    most = MAX_ARRAY_ELEMENTS // block.num_elements
    if options.kv_memory is not None:
        num_blocks = options.kv_memory // block.nbytes
        if num_blocks < 1:
            raise ValueError(
                f"a KV cache of {options.kv_memory / MIB:.1f} MiB has no room for a block of "
                f"{block.nbytes / MIB:.1f} MiB; give it more, or make block_size "
                f"({options.block_size}) smaller"
            )
        return min(num_blocks, most)
    if limit is None and has_gpu():
        limit = memory_limit()
    if limit is None:
        return min(max(1, CPU_KV_MEMORY // block.nbytes), most)
    activations = measure_activations()
    room = int(limit.nbytes * options.memory_fraction) - weights_nbytes - activations
    if room < block.nbytes:
        raise ValueError(
            f"no room for a KV cache: {options.memory_fraction:.0%} of "
            f"{limit.nbytes / GIB:.2f} GiB ({limit.source}) minus {weights_nbytes / GIB:.2f} GiB "
            f"of weights and {activations / GIB:.2f} GiB of activations leaves "
            f"{room / GIB:.2f} GiB, and a block takes "
            f"{block.nbytes / MIB:.1f} MiB; use a smaller or quantised model, or lower "
            "max_num_batched_tokens or max_num_seqs"
        )
    return min(room // block.nbytes, most)


def has_gpu() -> bool:
    """Whether MLX computes on a GPU by default."""
    return mx.default_device() == mx.Device(mx.gpu)


def set_wired_limit() -> None:
    """Let the GPU keep its whole recommended working set wired, as mlx-lm does."""
    recommended = mx.device_info().get("max_recommended_working_set_size")
    if recommended:
        mx.set_wired_limit(int(recommended))


def make_pool(model: nn.Module, options: EngineOptions, dtype: mx.Dtype | None = None) -> KVPool:
    """The pool for a model of `mlx_paged.models`, in its dtype unless told otherwise."""
    args, block_size = model.args, options.block_size
    dtype = dtype or model.layers[0].input_layernorm.weight.dtype

    def pool(num_blocks: int) -> KVPool:
        shape = (args.num_hidden_layers, *kv_shape(args), num_blocks, block_size)
        return KVPool(*shape, dtype, options.kv_bits, options.kv_group_size)

    block = BlockShape.of_model(args, block_size, options.kv_format(dtype))
    weights: Any = tree_flatten(model.parameters())
    weights_nbytes = sum(array.nbytes for _, array in weights)
    num_blocks = num_pool_blocks(
        options,
        block,
        weights_nbytes,
        lambda: _measure_activations(model, options, pool),
    )
    return pool(num_blocks)


def _measure_activations(
    model: nn.Module, options: EngineOptions, make: Callable[[int], KVPool]
) -> int:
    """Peak bytes of the largest step: one prompt's chunk, and a draw for every sequence."""
    num_tokens = options.num_batched_tokens
    num_blocks = -(-num_tokens // options.block_size)
    pool = make(num_blocks)
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    batch = Batch.of([(range(num_blocks), 0, num_tokens)], options.block_size)
    cache = PagedCache(pool, batch, options.attention)
    rows = mx.arange(options.max_num_seqs) % num_tokens
    logits = model(mx.zeros(num_tokens, mx.int32), cache, rows)
    draws = Draws([Draw(SamplingParams(top_p=0.9, logprobs=1), 0)] * rows.size)
    mx.eval(sample(logits, draws, np.arange(rows.size)).arrays, pool.arrays)
    mx.synchronize()
    peak = mx.get_peak_memory() - before
    del pool, batch, cache, logits
    mx.clear_cache()
    return peak

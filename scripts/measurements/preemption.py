"""What it costs to give up a sequence's blocks and have its K and V back later."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import mlx.core as mx

from mlx_paged.blocks import Sequence
from mlx_paged.cache import KVPool, step
from mlx_paged.engine.swap import copy_in, copy_out
from mlx_paged.loader import Loaded

CHUNK = 512


@dataclass(frozen=True)
class Cost:
    """Seconds for one sequence: copied out and in again, or computed again."""

    swap_out: float
    swap_in: float
    recompute: float

    @property
    def swap(self) -> float:
        return self.swap_out + self.swap_in


def cost(loaded: Loaded, block_size: int, num_tokens: int, repeats: int) -> Cost:
    """Medians of some repeats; the sequence's blocks lie scattered in the pool."""
    num_blocks = -(-num_tokens // block_size)
    pool = KVPool.for_model(loaded.model, 2 * num_blocks, block_size, loaded.dtype)
    rng = random.Random(0)
    block_ids = rng.sample(range(pool.num_blocks), num_blocks)
    token_ids = [rng.randrange(loaded.model.args.vocab_size) for _ in range(num_tokens)]
    contents: list[Any] = []

    def swap_out() -> None:
        contents[:] = copy_out(pool, block_ids)

    def swap_in() -> None:
        copy_in(pool, block_ids, contents)
        mx.eval(pool.keys, pool.values)

    def recompute() -> None:
        sequence = Sequence(pool.blocks, token_ids)
        while sequence.num_cached_tokens < num_tokens:
            num_left = num_tokens - sequence.num_cached_tokens
            step(loaded.model, pool, [sequence], [min(CHUNK, num_left)])
        sequence.free()

    return Cost(*(_seconds(function, repeats) for function in (swap_out, swap_in, recompute)))


def _seconds(function: Callable[[], None], repeats: int) -> float:
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return median(times)

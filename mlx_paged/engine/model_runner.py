"""Runs a step on the model: builds its graph, dispatches it, reads back what it drew."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged.cache import KVPool, PagedCache, choose_path
from mlx_paged.cache.attention import AttentionPath
from mlx_paged.cache.kv_pool import Checkpoint
from mlx_paged.engine.block_tables import BlockTables
from mlx_paged.engine.request import Sample
from mlx_paged.engine.sampler import Draw, Drawn, Draws, Positions, draw_key, sample
from mlx_paged.engine.schedule import Schedule
from mlx_paged.engine.swap import copy_in, copy_out


@dataclass
class Step:
    """A step's graph.

    Attributes:
        plan: what it computes.
        draws: the samples that draw a token. One that forks here draws its forks' too.
        drawn: the tokens, in the order of `draws`; None if no sample draws one.
        how: they were drawn.
    """

    plan: Schedule
    draws: list[Sample]
    drawn: Drawn | None = None
    how: Draws | None = None


class ModelRunner:
    """A model over a pool of blocks.

    The order of `build`, `wait` for the step before, and `dispatch` is what keeps writes to
    the pool in place. See `KVPool`.

    Args:
        model: called with (tokens, cache, rows), as those in `mlx_paged.models`.
        pool: K and V of its layers.
        attention: the attention path.
    """

    def __init__(self, model: nn.Module, pool: KVPool, attention: AttentionPath = "auto") -> None:
        self.model = model
        self.pool = pool
        self.attention = choose_path(attention, pool.head_dim)
        self.block_tables = BlockTables(pool.block_size)
        self._checkpoint: Checkpoint | None = None

    def move_blocks(self, plan: Schedule) -> None:
        """Swap out, copy and swap in, before the step's graph is built."""
        for swapped, block_ids in plan.swapped_out:
            swapped.stored = copy_out(self.pool, block_ids)
        self.pool.copy_blocks(plan.copies)
        for swapped in plan.swapped_in:
            block_ids = swapped.sequence.block_table[: swapped.sequence.num_cached_blocks]
            copy_in(self.pool, block_ids, swapped.stored)
            swapped.stored = None

    def build(self, plan: Schedule, previous: Step | None = None) -> Step:
        """The graph of a step.

        Args:
            plan: its rows. The tokens that it computes are counted as not yet stored.
            previous: the step before, if its tokens have not been read back; every sample of
                `plan` draws in both.
        """
        self._checkpoint = self.pool.checkpoint()
        try:
            return self._build(plan, previous)
        except Exception:
            self.drop()
            raise

    def _build(self, plan: Schedule, previous: Step | None) -> Step:
        if previous is None:
            self.block_tables.forget()
        batch = self.block_tables.batch(plan.samples)
        cache = PagedCache(self.pool, batch, self.attention)
        tokens = self._tokens(plan, previous)
        drawing = plan.samples if previous else [s for s in plan.samples if s.draws]
        if not drawing:
            # Only the K/V are wanted; the last layer's attention is never evaluated.
            self.model(tokens, cache, mx.array([0]))
            return Step(plan, [])
        ends = batch.row_starts[1:] - 1
        if len(drawing) < len(plan.samples):
            ends = ends[[s.draws for s in plan.samples]]
        logits = self.model(tokens, cache, mx.array(ends))
        draws, positions = _draws(drawing, previous)
        if len(positions) > len(drawing):
            repeats = [i for i, s in enumerate(drawing) for _ in range(1 + s.num_forks)]
            logits = logits[mx.array(repeats)]
        return Step(plan, drawing, sample(logits, draws, positions), draws)

    def drop(self) -> None:
        """Forget the graph that was built last."""
        assert self._checkpoint is not None
        self.pool.roll_back(self._checkpoint)
        self._checkpoint = None

    def recover(self) -> None:
        """Drop what is built and what runs, after an error.

        Raises:
            RuntimeError: the pool can't be computed any more.
        """
        if self._checkpoint is not None:
            self.drop()
        self.block_tables.forget()
        mx.eval(self.pool.arrays)

    def dispatch(self, step: Step) -> None:
        """Start a step. The one before must have ended."""
        self._checkpoint = None
        outputs = step.drawn.arrays if step.drawn else []
        mx.async_eval(outputs, self.pool.arrays)

    def wait(self, step: Step) -> list[int]:
        """The tokens drawn, once the step has ended."""
        mx.synchronize()
        token_ids: Any = step.drawn.token_ids.tolist() if step.drawn else []
        return token_ids

    def _tokens(self, plan: Schedule, previous: Step | None) -> mx.array:
        if previous is not None:
            assert previous.drawn is not None
            if previous.draws == plan.samples:
                return previous.drawn.token_ids
            at = {id(s): i for i, s in enumerate(previous.draws)}
            return previous.drawn.token_ids[mx.array([at[id(s)] for s in plan.samples])]
        token_ids: list[int] = []
        for s in plan.samples:
            start = s.sequence.num_cached_tokens
            token_ids += s.sequence.token_ids[start : start + s.num_scheduled_tokens]
        return mx.array(np.array(token_ids, np.int32))


def _draws(samples: list[Sample], previous: Step | None) -> tuple[Draws, Positions]:
    """How and where the samples draw next, and those that fork from them with them."""
    if previous is not None and previous.draws == samples:
        assert previous.how is not None
        return previous.how, np.array([s.num_tokens for s in samples])
    draws, positions = [], []
    for s in samples:
        draw: Draw = s.draw
        draws.append(draw)
        for index in range(1, s.num_forks + 1):
            draws.append(replace(draw, key=draw_key(s.request.seed, index)))
        positions += [s.num_tokens] * (1 + s.num_forks)
    return Draws(draws), np.array(positions)

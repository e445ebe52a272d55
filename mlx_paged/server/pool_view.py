"""What a watcher sees of an engine's pool."""

from __future__ import annotations

from collections.abc import Iterable

from mlx_paged.engine.engine import Engine
from mlx_paged.engine.request import Sample
from mlx_paged.server.messages import PoolView, Table


def pool_view(engine: Engine) -> PoolView:
    """The pool as it is between two steps. Copies are told once."""
    blocks, scheduler = engine.pool.blocks, engine.scheduler
    index = engine.prefix_cache.index if engine.prefix_cache else ()
    copies = list(engine.copies)
    engine.copies.clear()
    return PoolView(
        stats=engine.stats(),
        cached=runs(block_id for block_id in blocks.free_queue if block_id in index),
        tables=[_table(sample) for sample in (*scheduler.running, *scheduler.waiting)],
        copies=copies,
    )


def runs(block_ids: Iterable[int]) -> list[tuple[int, int]]:
    """Block ids in ascending order, as (first, how many) of those that follow each other."""
    found: list[tuple[int, int]] = []
    for block_id in sorted(block_ids):
        first, count = found[-1] if found else (-1, 0)
        if count and block_id == first + count:
            found[-1] = (first, count + 1)
        else:
            found.append((block_id, 1))
    return found


def _table(sample: Sample) -> Table:
    request, sequence = sample.request, sample.sequence
    return Table(
        request.request_id,
        sample.index,
        sample.is_running,
        sequence.block_table,
        request.num_prompt_tokens,
        sequence.num_tokens,
        sequence.num_cached_tokens,
        sample.num_preemptions,
    )

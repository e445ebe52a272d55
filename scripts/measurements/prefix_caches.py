"""Prefix caches that serve visits one after the other: this library's, and one that foresees."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Literal

from measurements.visits import Visit, Workload
from mlx_paged.blocks import BlockPool, Sequence
from mlx_paged.blocks.prefix import BlockIndex, Chain, HashIndex
from mlx_paged.blocks.prefix_cache import PrefixCache
from mlx_paged.blocks.radix import RadixIndex

INDEXES: dict[str, type[BlockIndex]] = {"hash": HashIndex, "radix": RadixIndex}
NEVER = 2**62

Tick = Callable[[], object]


def library_tokens_found(
    workload: Workload, num_blocks: int, index: str = "hash", tick: Tick = bool
) -> int:
    """Prompt tokens that this library's pool and prefix cache give, all visits together.

    A trace whose tokens are names of blocks is cached with one "token" a block.
    """
    has_tokens = workload.visits[0].conversation >= 0
    block_size = workload.block_tokens if has_tokens else 1
    pool = BlockPool(num_blocks, block_size)
    cache = PrefixCache(pool, INDEXES[index](block_size))
    chains: dict[int, Chain] = {}
    num_found = 0
    for visit in workload.visits:
        if visit.conversation not in chains or not has_tokens:
            chains[visit.conversation] = cache.index.chain()
        found = _serve(cache, visit, chains[visit.conversation], has_tokens)
        num_tokens = found if has_tokens else found * workload.block_tokens
        num_found += min(num_tokens, visit.num_prompt_tokens)
        tick()
    return num_found


def _serve(cache: PrefixCache, visit: Visit, chain: Chain, has_tokens: bool) -> int:
    """Tokens found for one visit; its blocks are written, named and given back."""
    pool = cache.pool
    token_ids = [token_id for piece in visit.tokens for token_id in piece]
    sequence = Sequence(pool, token_ids)
    chain.extend(token_ids)
    most = visit.num_prompt_tokens - 1 if has_tokens else visit.num_findable
    match = cache.index.match(chain, most)
    cache.attach(sequence, chain, match)
    num_found = sequence.num_cached_tokens
    num_slots = sequence.num_tokens if has_tokens else visit.num_blocks
    sequence.reserve(num_slots - num_found)
    sequence.num_cached_tokens = sequence.num_tokens
    cache.publish(sequence, chain)
    sequence.free()
    chain.unpublish()
    return num_found


class NamedBlocks:
    """`num_blocks` blocks with names, of which those that no visit uses can be evicted.

    Args:
        order: "lru" evicts the block that was used longest ago; "oracle" the one that will be
            used last, or never. Of equals the one furthest from its sequence's beginning.
    """

    def __init__(self, num_blocks: int, order: Literal["lru", "oracle"]) -> None:
        self.num_blocks = num_blocks
        self.order = order
        self._keys: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[tuple[int, int], int]] = []

    def serve(self, visit: Visit, now: int, next_uses: list[int]) -> int:
        """Leading blocks found. `next_uses` are the numbers of the visits that come back."""
        keys = self._keys
        found = 0
        for name in visit.names[: visit.num_findable]:
            if name not in keys:
                break
            found += 1
        for name in visit.names:
            keys.pop(name, None)
        while len(keys) + visit.num_blocks > self.num_blocks:
            self._evict()
        for depth, name in enumerate(visit.names):
            rank = now if self.order == "lru" else -next_uses[depth]
            keys[name] = (rank, -depth)
            heapq.heappush(self._heap, (keys[name], name))
        return found

    def _evict(self) -> None:
        while True:
            key, name = heapq.heappop(self._heap)
            if self._keys.get(name) == key:
                del self._keys[name]
                return


def tokens_found(
    workload: Workload,
    num_blocks: int,
    order: Literal["lru", "oracle"] = "oracle",
    tick: Tick = bool,
) -> int:
    """Prompt tokens found in `NamedBlocks`, all visits together.

    Raises:
        ValueError: a visit needs more blocks than there are.
    """
    if workload.most_blocks > num_blocks:
        raise ValueError(
            f"a request holds {workload.most_blocks} blocks, and the pool has {num_blocks}"
        )
    blocks, num_found = NamedBlocks(num_blocks, order), 0
    for now, (visit, next_uses) in enumerate(
        zip(workload.visits, _next_uses(workload.visits), strict=True)
    ):
        found = blocks.serve(visit, now, next_uses)
        num_found += min(found * workload.block_tokens, visit.num_prompt_tokens)
        tick()
    return num_found


def _next_uses(visits: list[Visit]) -> list[list[int]]:
    """For each visit and block the number of the next visit that has the block, or NEVER."""
    following: dict[int, int] = {}
    uses: list[list[int]] = []
    for now in reversed(range(len(visits))):
        uses.append([following.get(name, NEVER) for name in visits[now].names])
        following.update(dict.fromkeys(visits[now].names, now))
    return uses[::-1]

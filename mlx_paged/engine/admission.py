"""Which waiting sample starts next, and whether there is room for it."""

from __future__ import annotations

from itertools import islice
from typing import Literal

from mlx_paged.blocks.block_pool import BlockPool
from mlx_paged.blocks.prefix import TOKEN_BYTES, PrefixMatch
from mlx_paged.blocks.prefix_cache import PrefixCache
from mlx_paged.engine.request import Sample

Policy = Literal["fcfs", "priority", "longest-prefix"]

# Waiting samples whose cached prefixes the policy "longest-prefix" compares.
PREFIX_WINDOW = 64


class Admission:
    """Chooses among the waiting samples, which are sorted by their keys. See `Scheduler`."""

    def __init__(
        self, pool: BlockPool, prefix_cache: PrefixCache | None, policy: Policy, ageing_steps: int
    ) -> None:
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.policy = policy
        self.ageing_steps = ageing_steps

    def sort_key(self, num_steps: int, priority: int, number: int) -> tuple[float, ...]:
        """Where a request belongs that arrives after `num_steps` steps, the `number`th."""
        late = priority * self.ageing_steps if self.policy == "priority" else 0
        return (num_steps + late, number, 0)

    def candidates(self, waiting: list[Sample], num_steps: int, most: int) -> list[Sample]:
        """At most `most` waiting samples, next to be admitted first."""
        if self.policy != "longest-prefix" or not self.prefix_cache:
            return list(islice(waiting, most))
        block_size = self.pool.block_size

        def rank(sample: Sample) -> tuple[bool, int]:
            has_aged = num_steps - sample.sort_key[0] >= self.ageing_steps
            is_first = has_aged or sample.num_preemptions > 0
            return (not is_first, -self.match(sample).num_tokens(block_size))

        return sorted(islice(waiting, PREFIX_WINDOW), key=rank)[:most]

    def match(self, sample: Sample) -> PrefixMatch:
        """What the prefix cache holds of a sample."""
        if not self.prefix_cache or sample.num_stored_tokens:
            return PrefixMatch()
        assert sample.chain is not None
        return self.prefix_cache.lookup(sample.sequence, sample.chain)

    def is_being_computed(self, sample: Sample, match: PrefixMatch, running: list[Sample]) -> bool:
        """Whether a running sample will store the next block that this one needs: worth a wait."""
        if not self.prefix_cache or sample.num_stored_tokens:
            return False
        chain = sample.chain
        assert chain is not None
        num_blocks = len(match.block_ids) + 1
        if num_blocks * self.pool.block_size >= sample.num_tokens:
            return False
        num_bytes = num_blocks * self.pool.block_size * TOKEN_BYTES
        for other in reversed(running):
            theirs = other.chain
            if (
                theirs is not None
                and theirs.num_published < num_blocks
                and num_bytes <= len(theirs.tokens)
                and theirs.root == chain.root
                and theirs.tokens[:num_bytes] == chain.tokens[:num_bytes]
            ):
                return True
        return False

    def num_blocks(self, sample: Sample, match: PrefixMatch, num_seqs: int) -> int:
        """Free blocks for all the sample's known tokens, and one to spare per running sample.

        In the next `block_size` steps each running sample takes one block more. With that
        many left, whoever is admitted now isn't preempted before.
        """
        num_needed = -(-sample.num_tokens // self.pool.block_size) - len(match.block_ids)
        if self.prefix_cache:
            num_needed += self.prefix_cache.num_blocks_taken(match)
        return num_needed + num_seqs

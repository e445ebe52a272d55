"""Prompts that begin alike share blocks: looked up on admission, published once written."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_paged.blocks.block_pool import BlockPool
from mlx_paged.blocks.prefix import BlockIndex, Chain, PrefixMatch
from mlx_paged.blocks.sequence import Sequence


@dataclass
class PrefixStats:
    """What the prefix cache saved.

    Attributes:
        num_queries: sequences that were admitted, resumed ones included.
        num_hits: those that found at least one token.
        num_query_tokens: tokens that they held.
        num_saved_tokens: tokens whose K/V were there and need not be computed.
    """

    num_queries: int = 0
    num_hits: int = 0
    num_query_tokens: int = 0
    num_saved_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the tokens that were found."""
        return self.num_saved_tokens / max(1, self.num_query_tokens)


class PrefixCache:
    """The blocks of a pool as a cache of prefixes.

    Args:
        pool: whose freed blocks keep their contents until they are allocated anew.
        index: finds blocks by tokens. It becomes `pool.index`.
    """

    def __init__(self, pool: BlockPool, index: BlockIndex) -> None:
        if index.block_size != pool.block_size:
            raise ValueError(
                f"the index names blocks of {index.block_size} tokens, the pool's have "
                f"{pool.block_size}"
            )
        self.pool, self.index = pool, index
        pool.index = index
        self.stats = PrefixStats()

    def lookup(self, sequence: Sequence, chain: Chain) -> PrefixMatch:
        """What is there for a sequence without blocks. Its last token is always left to compute."""
        chain.extend(sequence.token_ids)
        return self.index.match(chain, sequence.num_tokens - 1)

    def num_blocks_taken(self, match: PrefixMatch) -> int:
        """How many of the blocks found are free, and so leave the free queue on `attach`."""
        return sum(self.pool.ref_count(block_id) == 0 for block_id in match.block_ids)

    def attach(self, sequence: Sequence, chain: Chain, match: PrefixMatch) -> list[tuple[int, int]]:
        """Begin the sequence with the blocks found.

        Returns:
            (source, destination) to copy before the forward pass, if the match ends inside a
            block. The source may be free: it must be read before anything else is written.

        Raises:
            OutOfBlocks: there is none for the copy.
        """
        pool = self.pool
        for block_id in match.block_ids:
            pool.revive(block_id)
        sequence.block_table += match.block_ids
        sequence.num_cached_tokens = match.num_tokens(pool.block_size)
        chain.num_published, chain.node = len(match.block_ids), None
        self._count(sequence)
        if match.partial is None:
            return []
        sequence.block_table += pool.allocate()
        return [(match.partial[0], sequence.block_table[-1])]

    def publish(self, sequence: Sequence, chain: Chain) -> None:
        """Name the blocks that have become full. All cached tokens must have been written."""
        num_full = sequence.num_cached_tokens // self.pool.block_size
        if num_full > chain.num_published:
            chain.extend(sequence.token_ids)
            self.index.publish(chain, sequence.block_table, num_full)

    def _count(self, sequence: Sequence) -> None:
        self.stats.num_queries += 1
        self.stats.num_hits += sequence.num_cached_tokens > 0
        self.stats.num_query_tokens += sequence.num_tokens
        self.stats.num_saved_tokens += sequence.num_cached_tokens

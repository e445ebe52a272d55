"""One sequence of tokens, and the blocks that hold their keys and values."""

from __future__ import annotations

from collections.abc import Iterable

from mlx_paged.blocks.block_pool import BlockPool


class Sequence:
    """Token ids, a block table, and how many of the tokens have their K/V stored.

    Token i lies in slot `block_table[i // block_size] * block_size + i % block_size`. Before
    a forward pass over n more tokens, `reserve(n)`; after it, add n to `num_cached_tokens`.

    Attributes:
        token_ids: the prompt and what was generated; K/V may be stored for a part of it.
        block_table: block ids, in the order of the tokens. Blocks past the cached tokens are
            reserved for the next ones.
        num_cached_tokens: tokens whose K/V are stored.
    """

    def __init__(self, pool: BlockPool, token_ids: Iterable[int] = ()) -> None:
        self.pool = pool
        self.token_ids = list(token_ids)
        self.block_table: list[int] = []
        self.num_cached_tokens = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that hold at least one cached token."""
        return -(-self.num_cached_tokens // self.pool.block_size)

    def num_blocks_to_reserve(self, num_new_tokens: int) -> int:
        """Free blocks that `reserve(num_new_tokens)` would take."""
        size, table = self.pool.block_size, self.block_table
        num_blocks = -(-(self.num_cached_tokens + num_new_tokens) // size)
        next_block = self.num_cached_tokens // size
        copies = next_block < len(table) and self.pool.is_shared(table[next_block])
        return max(0, num_blocks - len(table)) + copies

    def reserve(self, num_new_tokens: int) -> list[tuple[int, int]]:
        """Make room for tokens after the cached ones: copy-on-write first, then new blocks.

        Only the block that the next token goes into can be shared, since a fork shares no
        block without cached tokens. If it is, a new block takes its place in the table.

        Returns:
            (source, destination) block ids to copy, in every layer, before the forward pass.

        Raises:
            OutOfBlocks: the pool can't give all of them; nothing has changed.
        """
        pool, table, size = self.pool, self.block_table, self.pool.block_size
        next_block = self.num_cached_tokens // size
        copies = next_block < len(table) and pool.is_shared(table[next_block])
        num_missing = (self.num_cached_tokens + num_new_tokens - 1) // size + 1 - len(table)
        if not copies and num_missing <= 0:
            return []
        new_blocks = pool.allocate(max(0, num_missing) + copies)
        pairs = []
        if copies:
            pairs.append((table[next_block], new_blocks[0]))
            pool.release(table[next_block])
            table[next_block] = new_blocks.pop(0)
        table.extend(new_blocks)
        return pairs

    def slots(self, start: int, stop: int) -> list[int]:
        """Slots of tokens start to stop - 1, whose blocks must have been reserved."""
        size, table = self.pool.block_size, self.block_table
        if not 0 <= start <= stop <= len(table) * size:
            raise ValueError(
                f"tokens {start} to {stop} have no slots: {len(table) * size} are reserved"
            )
        return [table[i // size] * size + i % size for i in range(start, stop)]

    def fork(self) -> Sequence:
        """A second sequence with the same tokens, sharing every block that holds some."""
        child = Sequence(self.pool, self.token_ids)
        child.block_table = self.block_table[: self.num_cached_blocks]
        child.num_cached_tokens = self.num_cached_tokens
        for block_id in child.block_table:
            self.pool.share(block_id)
        return child

    def trim(self, num_tokens: int) -> None:
        """Drop the K/V of the last `num_tokens` cached tokens, and the blocks that then hold none.

        `token_ids` stay as they are.
        """
        if not 0 <= num_tokens <= self.num_cached_tokens:
            raise ValueError(
                f"{num_tokens} tokens cannot be trimmed: {self.num_cached_tokens} are cached"
            )
        self.num_cached_tokens -= num_tokens
        self._release_from(self.num_cached_blocks)
        if self.num_cached_tokens % self.pool.block_size:
            self.pool.forget_name(self.block_table[-1])

    def free(self) -> None:
        """Give every block back. The tokens stay, so that their K/V can be computed again."""
        self.num_cached_tokens = 0
        self._release_from(0)

    def _release_from(self, first: int) -> None:
        # The tail goes first: with least recently used reuse, a prefix outlives what follows it.
        for block_id in reversed(self.block_table[first:]):
            self.pool.release(block_id)
        del self.block_table[first:]

"""Which blocks of the KV pool are free, and how often each of the others is used."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Protocol

MAX_BLOCK_SIZE = 256


class OutOfBlocks(RuntimeError):
    """The pool has fewer free blocks than were asked for. Nothing has changed."""

    def __init__(self, num_needed: int, num_free: int, num_blocks: int) -> None:
        super().__init__(
            f"{num_needed} more blocks are needed, and {num_free} of the pool's {num_blocks} "
            "are free"
        )
        self.num_needed = num_needed
        self.num_free = num_free


class PrefixIndex(Protocol):
    """What the pool asks of an index that names blocks by the tokens they hold."""

    def __contains__(self, block_id: object) -> bool:
        """Whether the block has a name, so that a later prompt could use it."""

    def forget(self, block_id: int) -> None:
        """Drop the block's name: its contents are about to change."""


class BlockPool:
    """Reference counts and the free queue of `num_blocks` blocks of `block_size` tokens.

    The free queue is ordered: blocks are allocated from its front. At first it holds every
    block in ascending order. A released block that `index` names goes to the back, so that
    named blocks are reused least recently used first; a block without a name goes to the
    front, since nothing is lost with it. A free block keeps its name until it is allocated.
    """

    def __init__(self, num_blocks: int, block_size: int, index: PrefixIndex | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, not {num_blocks}")
        if not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise ValueError(
                f"the block size must be from 1 to {MAX_BLOCK_SIZE} tokens, not {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.index = index
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def free_queue(self) -> list[int]:
        """Free block ids, next to be allocated first."""
        return list(self._free)

    def ref_count(self, block_id: int) -> int:
        """How many block tables list the block; 0 if it is free."""
        self._check_id(block_id)
        return self._ref_counts[block_id]

    def is_shared(self, block_id: int) -> bool:
        """Whether more than one block table lists the block, so that it is read-only."""
        return self._ref_counts[block_id] > 1

    def allocate(self, num_blocks: int = 1) -> list[int]:
        """Take blocks from the front of the free queue, each with one reference.

        Raises:
            OutOfBlocks: fewer than `num_blocks` are free; none is taken.
        """
        free = self._free
        if num_blocks > len(free):
            raise OutOfBlocks(num_blocks, len(free), self.num_blocks)
        block_ids = [free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        if self.index is not None:
            for block_id in block_ids:
                self.forget_name(block_id)
        return block_ids

    def share(self, block_id: int) -> None:
        """Add a reference to a block that is in use."""
        if self.ref_count(block_id) == 0:
            raise ValueError(f"block {block_id} is free, so it cannot be shared; revive it instead")
        self._ref_counts[block_id] += 1

    def revive(self, block_id: int) -> None:
        """Add a reference to a block that may be free: its contents are wanted again."""
        if self.ref_count(block_id) == 0:
            del self._free[block_id]
        self._ref_counts[block_id] += 1

    def release(self, block_id: int) -> None:
        """Drop a reference. A block without any is free, and keeps its contents until reused."""
        if self.ref_count(block_id) == 0:
            raise ValueError(f"block {block_id} is free already: it was released once too often")
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] == 0:
            self._free[block_id] = None
            if self.index is None or block_id not in self.index:
                self._free.move_to_end(block_id, last=False)

    def forget_name(self, block_id: int) -> None:
        """Make sure that no prefix finds the block: it is about to be written."""
        if self.index is not None and block_id in self.index:
            self.index.forget(block_id)

    def check_integrity(self, block_tables: Iterable[Iterable[int]] | None = None) -> None:
        """Raise RuntimeError unless free + used = all, and counts equal the tables' entries.

        Args:
            block_tables: every table that refers to this pool, to compare the counts with.
        """
        free = {b for b, count in enumerate(self._ref_counts) if count == 0}
        if free != set(self._free):
            raise RuntimeError(
                f"blocks without a reference {sorted(free)} differ from the free queue "
                f"{sorted(self._free)}"
            )
        if min(self._ref_counts) < 0:
            raise RuntimeError(f"a reference count is negative: {self._ref_counts}")
        if block_tables is not None:
            entries = Counter(block_id for table in block_tables for block_id in table)
            counts = {b: count for b, count in enumerate(self._ref_counts) if count}
            if entries != counts:
                raise RuntimeError(f"the tables list {dict(entries)}, the pool counts {counts}")

    def _check_id(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(
                f"there is no block {block_id}: the pool has blocks 0 to {self.num_blocks - 1}"
            )

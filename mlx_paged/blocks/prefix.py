"""Blocks named by their tokens and everything before them: the hash chain of prefix caching."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

TOKEN_BYTES = 4
assert array("I").itemsize == TOKEN_BYTES


def encode_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as fixed-width big-endian bytes, which compare and sort as the ids do."""
    words = array("I", token_ids)
    words.byteswap()
    return words.tobytes()


@dataclass
class PrefixMatch:
    """What the cache holds of a prompt's beginning.

    Attributes:
        block_ids: full blocks that can be shared, in the order of the tokens.
        partial: a block whose first tokens come next, and how many of them; a copy of the
            block can be continued from there.
    """

    block_ids: list[int] = field(default_factory=list)
    partial: tuple[int, int] | None = None

    def num_tokens(self, block_size: int) -> int:
        """Tokens that need not be computed."""
        return len(self.block_ids) * block_size + (self.partial[1] if self.partial else 0)


class Chain:
    """A sequence's tokens as an index reads them, and how many of its blocks are published.

    Tokens are only ever appended, so what was encoded or hashed once is kept: it is asked
    for again at each attempt to admit the sequence, and after each preemption.
    """

    __slots__ = ("names", "node", "num_published", "root", "tokens")

    def __init__(self, root: bytes) -> None:
        self.root = root
        self.tokens = bytearray()
        self.names: list[bytes] = []
        self.node: object = None
        self.num_published = 0

    def extend(self, token_ids: list[int]) -> None:
        """Take over the tokens that are new in `token_ids`, the whole sequence's."""
        num_known = len(self.tokens) // TOKEN_BYTES
        if num_known < len(token_ids):
            self.tokens += encode_tokens(token_ids[num_known:])

    def copy(self) -> Chain:
        """For a fork of the sequence."""
        child = Chain(self.root)
        child.tokens, child.names = self.tokens.copy(), self.names.copy()
        child.node, child.num_published = self.node, self.num_published
        return child

    def unpublish(self) -> None:
        """The sequence has given its blocks back."""
        self.num_published, self.node = 0, None


class BlockIndex(ABC):
    """Names blocks by the tokens they hold, and finds them by a prompt's tokens.

    A name stays with its block from the time the block is full and written until the pool
    allocates the block anew, so a free block can be found too. Of two blocks with the same
    content, the first has the name.

    Args:
        block_size: tokens per block.
        extra_keys: what else the K/V depend on: model, adapter, KV dtype.
    """

    def __init__(self, block_size: int, extra_keys: Iterable[str] = ()) -> None:
        self.block_size = block_size
        self.block_nbytes = block_size * TOKEN_BYTES
        self.extra_keys = tuple(extra_keys)

    def chain(self, salt: str = "") -> Chain:
        """The chain of a new sequence. Only sequences of one salt find each other's blocks."""
        return Chain(hashlib.sha256(repr((self.extra_keys, salt)).encode()).digest())

    @abstractmethod
    def match(self, chain: Chain, max_tokens: int) -> PrefixMatch:
        """The longest beginning of the chain's tokens, up to `max_tokens`, that blocks hold."""

    @abstractmethod
    def publish(self, chain: Chain, block_table: list[int], num_blocks: int) -> None:
        """Name the first `num_blocks` blocks of the table, which must be full and written."""

    @abstractmethod
    def forget(self, block_id: int) -> None:
        """Drop the block's name: its contents are about to change."""

    @abstractmethod
    def __contains__(self, block_id: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int:
        """Blocks that have a name."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise RuntimeError unless names and blocks refer to each other one to one."""


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


class HashIndex(BlockIndex):
    """Full blocks in a table, each under the hash of its parent's hash and its own tokens.

    What was hashed is kept and compared on a hit, so even two prefixes of one hash cannot
    be taken for each other.
    """

    def __init__(
        self,
        block_size: int,
        extra_keys: Iterable[str] = (),
        digest: Callable[[bytes], bytes] = _sha256,
    ) -> None:
        super().__init__(block_size, extra_keys)
        self._digest = digest
        self._blocks: dict[bytes, int] = {}
        self._named: dict[int, tuple[bytes, bytes]] = {}

    def match(self, chain: Chain, max_tokens: int) -> PrefixMatch:
        found: list[int] = []
        num_blocks = min(max_tokens, len(chain.tokens) // TOKEN_BYTES) // self.block_size
        for _, name, content in self._names(chain, 0, num_blocks):
            block_id = self._blocks.get(name)
            if block_id is None or self._named[block_id][1] != content:
                break
            found.append(block_id)
        return PrefixMatch(found)

    def publish(self, chain: Chain, block_table: list[int], num_blocks: int) -> None:
        blocks, named = self._blocks, self._named
        for i, name, content in self._names(chain, chain.num_published, num_blocks):
            block_id = block_table[i]
            if name not in blocks and block_id not in named:
                blocks[name] = block_id
                named[block_id] = (name, content)
        chain.num_published = max(chain.num_published, num_blocks)

    def forget(self, block_id: int) -> None:
        name, _ = self._named.pop(block_id)
        del self._blocks[name]

    def _names(self, chain: Chain, start: int, stop: int) -> Iterator[tuple[int, bytes, bytes]]:
        """Names of the chain's blocks start to stop - 1, and what they are hashes of."""
        names, size, digest = chain.names, self.block_nbytes, self._digest
        tokens = bytes(chain.tokens)
        name = names[start - 1] if start else chain.root
        for i in range(start, stop):
            content = name + tokens[i * size : (i + 1) * size]
            if i < len(names):
                name = names[i]
            else:
                name = digest(content)
                names.append(name)
            yield i, name, content

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._named

    def __len__(self) -> int:
        return len(self._named)

    def check_integrity(self) -> None:
        there = {name: block_id for block_id, (name, _) in self._named.items()}
        if there != self._blocks:
            raise RuntimeError(f"names {self._blocks} differ from the blocks' names {there}")

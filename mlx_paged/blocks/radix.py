"""A tree over tokens, one block a node: prefixes are found up to the exact token."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from mlx_paged.blocks.prefix import TOKEN_BYTES, BlockIndex, Chain, PrefixMatch


class _Node:
    """A block, below the block of the tokens before it."""

    __slots__ = ("block_id", "children", "keys", "parent", "tokens")

    def __init__(self, parent: _Node | None, tokens: bytes, block_id: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.block_id = block_id
        self.children: dict[bytes, _Node] = {}
        self.keys: list[bytes] = []

    def add(self, tokens: bytes, block_id: int) -> _Node:
        child = self.children[tokens] = _Node(self, tokens, block_id)
        insort(self.keys, tokens)
        return child

    def remove(self, child: _Node) -> None:
        del self.children[child.tokens]
        del self.keys[bisect_left(self.keys, child.tokens)]
        child.parent = None

    def closest(self, tokens: bytes) -> tuple[_Node, int] | None:
        """The child that begins with most of `tokens`, and with how many of them."""
        at = bisect_left(self.keys, tokens)
        nearest = [
            (_num_common_tokens(key, tokens), key) for key in self.keys[max(0, at - 1) : at + 1]
        ]
        num_tokens, key = max(nearest, default=(0, b""))
        return (self.children[key], num_tokens) if num_tokens else None


class RadixIndex(BlockIndex):
    """Full blocks in a tree, each an edge below the blocks of the tokens before it.

    Where a prompt parts from every child inside a block, the child with the longest common
    beginning is offered as `PrefixMatch.partial`. A block that loses its name takes those
    below it along, since no prompt could reach them.
    """

    def __init__(self, block_size: int, extra_keys: Iterable[str] = ()) -> None:
        super().__init__(block_size, extra_keys)
        self._roots: dict[bytes, _Node] = {}
        self._nodes: dict[int, _Node] = {}

    def match(self, chain: Chain, max_tokens: int) -> PrefixMatch:
        match, size = PrefixMatch(), self.block_nbytes
        node = self._roots.get(chain.root)
        end = min(max_tokens * TOKEN_BYTES, len(chain.tokens))
        for start in range(0, end, size):
            if node is None:
                break
            tokens = bytes(chain.tokens[start : min(start + size, end)])
            child = node.children.get(tokens)
            if child is None:
                if closest := node.closest(tokens):
                    match.partial = (closest[0].block_id, closest[1])
                break
            match.block_ids.append(child.block_id)
            node = child
        return match

    def publish(self, chain: Chain, block_table: list[int], num_blocks: int) -> None:
        if chain.num_published >= num_blocks:
            return
        node, size = chain.node, self.block_nbytes
        if not isinstance(node, _Node) or node.parent is None:
            # New, or a block above lost its name: the sequence's own blocks rebuild the path.
            node, chain.num_published = self._root(chain.root), 0
        for i in range(chain.num_published, num_blocks):
            tokens, block_id = bytes(chain.tokens[i * size : (i + 1) * size]), block_table[i]
            child = node.children.get(tokens)
            if child is None:
                assert block_id not in self._nodes, "a named block lies at its own path"
                child = self._nodes[block_id] = node.add(tokens, block_id)
            node = child
        chain.node, chain.num_published = node, num_blocks

    def forget(self, block_id: int) -> None:
        node = self._nodes[block_id]
        assert node.parent is not None
        node.parent.remove(node)
        below = [node]
        while below:
            node = below.pop()
            node.parent = None
            del self._nodes[node.block_id]
            below += node.children.values()

    def _root(self, key: bytes) -> _Node:
        if key not in self._roots:
            self._roots[key] = _Node(None, b"", -1)
        return self._roots[key]

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def check_integrity(self) -> None:
        reached: dict[int, _Node] = {}
        below = list(self._roots.values())
        while below:
            node = below.pop()
            if node.keys != sorted(node.children):
                raise RuntimeError(f"block {node.block_id} lists other children than it has")
            for child in node.children.values():
                if child.parent is not node or child.block_id in reached:
                    raise RuntimeError(f"block {child.block_id} hangs in the tree twice")
                reached[child.block_id] = child
                below.append(child)
        if reached != self._nodes:
            raise RuntimeError(
                f"the tree reaches blocks {sorted(reached)}, the index names {sorted(self._nodes)}"
            )


def _num_common_tokens(a: bytes, b: bytes) -> int:
    num_tokens = min(len(a), len(b)) // TOKEN_BYTES
    for i in range(num_tokens):
        if a[i * TOKEN_BYTES : (i + 1) * TOKEN_BYTES] != b[i * TOKEN_BYTES : (i + 1) * TOKEN_BYTES]:
            return i
    return num_tokens

"""The arrays that hold keys and values, in blocks that every sequence shares."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import NamedTuple

import mlx.core as mx

from mlx_paged.blocks import BlockPool
from mlx_paged.cache.batch import SlotMapping

# Indices of larger arrays overflow 32 bits in parts of MLX.
MAX_ARRAY_ELEMENTS = 2**31 - 1


class Checkpoint(NamedTuple):
    """The arrays of a pool before some writes."""

    keys: list[mx.array]
    values: list[mx.array]


class KVPool:
    """One K and one V array per layer, each [num_blocks, num_kv_heads, block_size, head_dim].

    A block id means the same position in every layer's arrays, so one block table serves
    all layers. `blocks` says which of them are free.

    Writes are in place as long as nothing else holds an array: keep no reference to, slice
    or view of `keys[layer]` or `values[layer]` across a write, and let a forward pass end
    before the next one's writes are dispatched. MLX copies the whole array otherwise.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int = 16,
        dtype: mx.Dtype = mx.float16,
    ) -> None:
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        num_elements = num_blocks * num_kv_heads * block_size * head_dim
        if num_elements > MAX_ARRAY_ELEMENTS:
            most = MAX_ARRAY_ELEMENTS // (num_elements // num_blocks)
            raise ValueError(
                f"{num_blocks} blocks make {num_elements} elements per layer, more than MLX can "
                f"index safely; at most {most} blocks of this shape fit"
            )
        self.blocks = BlockPool(num_blocks, block_size)
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.keys = [mx.zeros(shape, dtype) for _ in range(num_layers)]
        self.values = [mx.zeros(shape, dtype) for _ in range(num_layers)]
        mx.eval(self.keys, self.values)

    @property
    def num_blocks(self) -> int:
        return self.blocks.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.blocks.block_size

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block: K and V of `block_size` tokens in every layer."""
        row_nbytes = self.num_kv_heads * self.head_dim * self.dtype.size
        return self.num_layers * 2 * self.block_size * row_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_blocks * self.block_nbytes

    def write(
        self, layer: int, keys: mx.array, values: mx.array, slot_mapping: SlotMapping
    ) -> None:
        """Store the K and V of N tokens in their slots.

        Args:
            layer: index of the layer.
            keys, values: [N, num_kv_heads, head_dim], in the pool's dtype.
            slot_mapping: N distinct slots.
        """
        if keys.dtype != self.dtype or values.dtype != self.dtype:
            raise ValueError(
                f"the pool holds {self.dtype}, but the model writes keys of {keys.dtype} and "
                f"values of {values.dtype}; make the pool with the model's dtype"
            )
        blocks, offsets = slot_mapping
        self.keys[layer][blocks, :, offsets] = keys
        self.values[layer][blocks, :, offsets] = values

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks in every layer, K and V: (source, destination) pairs.

        All sources are read before any destination is written, so a destination may be
        another pair's source.
        """
        pairs = list(pairs)
        if not pairs:
            return
        sources = mx.array([source for source, _ in pairs])
        destinations = mx.array([destination for _, destination in pairs])
        arrays = (*self.keys, *self.values)
        contents = [array[sources] for array in arrays]
        # Reading and writing one array in one graph would copy the whole array.
        mx.eval(contents)
        for array, content in zip(arrays, contents, strict=True):
            array[destinations] = content

    def checkpoint(self) -> Checkpoint:
        """What to `roll_back` to, should the writes that follow never be evaluated.

        Drop it before they are: while it is held, they copy the arrays instead of writing in
        place.
        """
        before = Checkpoint(self.keys, self.values)
        self.keys = [copy(array) for array in self.keys]
        self.values = [copy(array) for array in self.values]
        return before

    def roll_back(self, checkpoint: Checkpoint) -> None:
        """Forget all writes since the checkpoint, none of which has been evaluated."""
        self.keys, self.values = checkpoint

"""The arrays that hold keys and values, in blocks that every sequence shares."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_paged.blocks import BlockPool
from mlx_paged.cache.batch import SlotMapping
from mlx_paged.cache.kv_format import BlockShape, KVFormat, kv_shape
from mlx_paged.kernels.quantized import PoolArray, parts

# Indices of larger arrays overflow 32 bits in parts of MLX.
MAX_ARRAY_ELEMENTS = 2**31 - 1


def embedding_dtype(model: nn.Module) -> mx.Dtype:
    """The dtype that a model's embeddings give, quantised or not."""
    parameters: Any = tree_flatten(model.parameters())
    for name, array in parameters:
        if "embed" in name and mx.issubdtype(array.dtype, mx.floating):
            return array.dtype
    raise ValueError("the model has no embeddings to take the dtype from; state it")


class Checkpoint(NamedTuple):
    """The arrays of a pool before some writes."""

    keys: list[PoolArray]
    values: list[PoolArray]


class KVPool:
    """One K and one V array per layer, each [num_blocks, num_kv_heads, block_size, head_dim].

    Each is an MLX array or, with `kv_bits`, a `QuantizedArray`, which reads like one. A block
    id means the same position in every layer's arrays, so one block table serves all layers.
    `blocks` says which of them are free.

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
        kv_bits: int | None = None,
        kv_group_size: int = 32,
    ) -> None:
        self.format = KVFormat(dtype, kv_bits, kv_group_size)
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        self._block = BlockShape.of(num_layers, num_kv_heads, head_dim, block_size, self.format)
        num_elements = num_blocks * self._block.num_elements
        if num_elements > MAX_ARRAY_ELEMENTS:
            most = MAX_ARRAY_ELEMENTS // self._block.num_elements
            raise ValueError(
                f"{num_blocks} blocks make {num_elements} elements per layer, more than MLX can "
                f"index safely; at most {most} blocks of this shape fit"
            )
        self.blocks = BlockPool(num_blocks, block_size)
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.keys = [self.format.zeros(shape) for _ in range(num_layers)]
        self.values = [self.format.zeros(shape) for _ in range(num_layers)]
        mx.eval(self.arrays)

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        num_blocks: int,
        block_size: int = 16,
        dtype: mx.Dtype | None = None,
        **options: Any,
    ) -> KVPool:
        """A pool with the layers and heads of a model, ours or mlx-lm's.

        Args:
            dtype: of K and V; that of the model's embeddings if None.
            options: kv_bits and kv_group_size.
        """
        shape = (len(model.layers), *kv_shape(model.args))
        dtype = dtype or embedding_dtype(model)
        return cls(*shape, num_blocks, block_size, dtype, **options)

    @property
    def num_blocks(self) -> int:
        return self.blocks.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.blocks.block_size

    @property
    def dtype(self) -> mx.Dtype:
        """Of the K and V that are written and read."""
        return self.format.dtype

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays: what a forward pass must evaluate besides its results."""
        return [part for array in (*self.keys, *self.values) for part in parts(array)]

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block: K and V of `block_size` tokens in every layer."""
        return self._block.nbytes

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
        at = slot_mapping.rows(self.num_kv_heads)
        for arrays, rows in ((self.keys, keys), (self.values, values)):
            written = [
                _write(part, new, at)
                for part, new in zip(parts(arrays[layer]), self.format.split(rows), strict=True)
            ]
            arrays[layer] = self.format.join(written)

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
        arrays = self.arrays
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


def _write(array: mx.array, rows: mx.array, at: mx.array) -> mx.array:
    """`array` [blocks, heads, block_size, length] with `rows` [N, heads, length] in N slots.

    Over flat rows: a scatter by block and offset takes two to three times as long on a CPU, and
    an update of a single slice is two launches on Metal.
    """
    length = array.shape[-1]
    flat = mx.put_along_axis(array.reshape(-1, length), at, rows.reshape(-1, length), axis=0)
    return flat.reshape(array.shape)

"""How K and V are stored, and what that takes: the one home of the sizes of rows and blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_paged.kernels.quantized import WORD_BITS, PoolArray, QuantizedArray

KV_BITS = (8, 4)
KV_GROUP_SIZES = (32, 64)


@dataclass(frozen=True)
class KVFormat:
    """Rows of `dtype`, or of codes with a scale and a bias of `dtype` for each group.

    Codes are rounded, so a difference in a last bit, as between a batch's matrix products and a
    single row's, now and then grows to a whole step. Near ties in sampling may then fall either
    way, as they do among plain rows, but more often. In batches of as many rows no bit differs,
    whoever is in them.

    Attributes:
        dtype: of K and V in the model.
        bits: of a code, 8 or 4; None stores rows as they are.
        group_size: elements of a head that share a scale and a bias, 32 or 64.
    """

    dtype: mx.Dtype
    bits: int | None = None
    group_size: int = 32

    def __post_init__(self) -> None:
        if self.bits is not None and self.bits not in KV_BITS:
            raise ValueError(
                f"kv_bits is {' or '.join(map(str, KV_BITS))}, or None for the model's own "
                f"precision, not {self.bits}"
            )
        if self.group_size not in KV_GROUP_SIZES:
            sizes = " or ".join(map(str, KV_GROUP_SIZES))
            raise ValueError(f"kv_group_size is {sizes}, not {self.group_size}")

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("mlx.core.")
        if self.bits is None:
            return dtype
        return f"{self.bits} bits in groups of {self.group_size}, {dtype}"

    def part_shapes(self, head_dim: int) -> list[tuple[int, mx.Dtype]]:
        """Length and dtype of each array's part of a row: the row, or codes, scales and biases.

        Raises:
            ValueError: a row doesn't divide into groups.
        """
        if self.bits is None:
            return [(head_dim, self.dtype)]
        if head_dim % self.group_size:
            smaller = [size for size in KV_GROUP_SIZES if head_dim % size == 0]
            remedy = f"kv_group_size {smaller[0]}" if smaller else "no kv_bits"
            raise ValueError(
                f"heads of {head_dim} elements don't divide into groups of {self.group_size}; "
                f"use {remedy}"
            )
        num_groups = head_dim // self.group_size
        words = (head_dim * self.bits // WORD_BITS, mx.uint32)
        return [words, (num_groups, self.dtype), (num_groups, self.dtype)]

    def row_nbytes(self, head_dim: int) -> int:
        """Bytes of one token's K, or V, of one head."""
        return sum(length * dtype.size for length, dtype in self.part_shapes(head_dim))

    def zeros(self, shape: tuple[int, ...]) -> PoolArray:
        """An array [..., head_dim] of zeros, stored in this format."""
        *axes, head_dim = shape
        return self.join(
            [mx.zeros((*axes, length), dtype) for length, dtype in self.part_shapes(head_dim)]
        )

    def split(self, rows: mx.array) -> list[mx.array]:
        """Rows [..., head_dim] as the parts that are stored of them."""
        if self.bits is None:
            return [rows]
        return list(mx.quantize(rows, group_size=self.group_size, bits=self.bits))

    def join(self, parts: list[mx.array]) -> PoolArray:
        """What `zeros` gives, from its parts."""
        if self.bits is None:
            return parts[0]
        codes, scales, biases = parts
        return QuantizedArray(codes, scales, biases, self.bits)


@dataclass(frozen=True)
class BlockShape:
    """What one block of a model's pool takes.

    Attributes:
        num_elements: of the largest of one layer's arrays.
        nbytes: of K and V in all layers.
    """

    num_elements: int
    nbytes: int

    @classmethod
    def of(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        kv_format: KVFormat,
    ) -> BlockShape:
        """From a model's numbers, with `block_size` tokens a block."""
        num_rows = num_kv_heads * block_size
        longest = max(length for length, _ in kv_format.part_shapes(head_dim))
        nbytes = 2 * num_layers * num_rows * kv_format.row_nbytes(head_dim)
        return cls(num_rows * longest, nbytes)

    @classmethod
    def of_model(cls, args: Any, block_size: int, kv_format: KVFormat) -> BlockShape:
        """For a model with these arguments."""
        return cls.of(args.num_hidden_layers, *kv_shape(args), block_size, kv_format)


def kv_shape(args: Any) -> tuple[int, int]:
    """Number of KV heads and head dimension of a model with these arguments."""
    num_kv_heads = getattr(args, "num_key_value_heads", None) or args.num_attention_heads
    head_dim = getattr(args, "head_dim", None) or args.hidden_size // args.num_attention_heads
    return num_kv_heads, head_dim

"""What a decode launch is: the choices that the kernel's text leaves open, and what follows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from . import metal

HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)
DTYPES = (mx.float16, mx.bfloat16, mx.float32)
MAX_BLOCK_SIZE = 256

# A pipeline short of registers allows fewer threads than Metal does; this many it's sure to.
SAFE_THREADS = 256


@dataclass(frozen=True)
class DecodeShape:
    """What a decode launch has to fit."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: mx.Dtype
    kv_bits: int | None = None  # of a code of K and V; None if they are stored in `dtype`
    kv_group_size: int = 32  # elements of a quantised row that share a scale and a bias

    @property
    def num_quant_groups(self) -> int:
        """Scales of a row, and biases; 0 of a plain one."""
        return 0 if self.kv_bits is None else self.head_dim // self.kv_group_size

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row of K or V, with its scales and biases."""
        bits = self.kv_bits or 8 * self.dtype.size
        return self.head_dim * bits // 8 + 2 * self.num_quant_groups * self.dtype.size

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_query_heads // self.num_kv_heads

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("mlx.core.")
        shape = f"{self.num_query_heads}q {self.num_kv_heads}kv d{self.head_dim} {dtype}"
        return f"{shape} kv{self.kv_bits}g{self.kv_group_size}" if self.kv_bits else shape


@dataclass(frozen=True)
class Splits:
    """How many tokens of a sequence go to one threadgroup.

    Splits double from `smallest` to `largest` tokens as long as the sequence would have more than
    `enough` of them. Only its own length counts: were the splits to change with the batch mates,
    so would the last bits of the result.
    """

    smallest: int
    largest: int
    enough: int

    def tokens(self, length: int) -> int:
        """Tokens per split at `length`; `tokens_per_split` in softmax.metal says the same."""
        tokens = self.smallest
        while tokens < self.largest and length > tokens * self.enough:
            tokens *= 2
        return tokens

    def count(self, length: int) -> int:
        return -(-length // self.tokens(length))

    def most(self, max_length: int) -> int:
        """The most splits, at least 1, of any sequence of up to `max_length` tokens.

        Where splits double their number halves, so a shorter sequence may have more.
        """
        has_doubled = self.tokens(max_length) > self.smallest
        return max(1, self.count(max_length), self.enough if has_doubled else 0)


@dataclass(frozen=True)
class DecodeLaunch:
    """The launch choices of the decode kernel."""

    heads: int  # query heads of a SIMD group, which share each row that it loads
    lanes: int  # lanes that share a row of K or V
    keys: int  # rows that a lane holds at once: one maximum and one rescale for all
    slices: int  # SIMD groups that divide the tokens of a split
    splits: Splits

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> DecodeLaunch:
        return cls(**{**fields, "splits": Splits(**fields["splits"])})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def vector(self, head_dim: int) -> int:
        """Elements of one load."""
        return 2 if head_dim // 2 <= self.lanes else 4

    def head_groups(self, group_size: int) -> int:
        """SIMD groups side by side on the same tokens: the second finds them in the cache."""
        most = SAFE_THREADS // (metal.SIMD_WIDTH * self.slices)
        return max(1, min(-(-group_size // self.heads), most))

    def head_splits(self, group_size: int) -> int:
        """Threadgroups that divide the query heads of one KV head."""
        return -(-group_size // (self.heads * self.head_groups(group_size)))

    def row_loads(self, group_size: int) -> int:
        """SIMD groups that load a given row of K or V: 1 when one takes all heads."""
        return self.head_groups(group_size) * self.head_splits(group_size)

    def num_threads(self, group_size: int) -> int:
        """Threads of a threadgroup."""
        return self.slices * self.head_groups(group_size) * metal.SIMD_WIDTH

    def threadgroup_bytes(self, shape: DecodeShape) -> int:
        """For each SIMD group the state of one head: head_dim sums, a maximum, a total."""
        simdgroups = self.num_threads(shape.group_size) // metal.SIMD_WIDTH
        return simdgroups * (shape.head_dim + 2) * 4

    def live_floats(self, head_dim: int, itemsize: int, is_quantized: bool = False) -> int:
        """Registers that a lane needs through the loop, in floats of 4 bytes.

        Rows of K and V that were quantised are held in float, others as stored. The vector that
        is converted to float just before it is used counts for neither.
        """
        vector = self.vector(head_dim)
        elements = -(-head_dim // (vector * self.lanes)) * vector
        stored = elements * itemsize // 4
        output_query_max_sum = elements + stored + 2
        key_value_score = 2 * (elements if is_quantized else stored) + 1
        converted = vector if is_quantized else 0
        return self.heads * output_query_max_sum + self.keys * key_value_score - converted

    def check(self, head_dim: int, num_quant_groups: int = 0) -> None:
        """Raise ValueError for choices that the kernel's text can't be compiled with."""
        lanes = [n for n in (4, 8, 16, 32) if num_quant_groups <= n <= head_dim // 2]
        if self.lanes not in lanes:
            raise ValueError(
                f"a row of {head_dim} elements is shared by {lanes} lanes, not {self.lanes}"
            )
        splits = self.splits
        if min(self.heads, self.keys, self.slices, splits.smallest, splits.enough) < 1:
            raise ValueError(f"each launch choice counts something, so it's at least 1: {self}")

"""Arrays in 8 or 4 bits, as MLX's affine format stores them."""

from __future__ import annotations

from copy import copy
from typing import Any

import mlx.core as mx

WORD_BITS = 32


class QuantizedArray:
    """An array [..., D] in codes of a few bits, read like one of floats.

    Along the last axis each group of elements shares a scale and a bias: an element is
    scale * code + bias. `array[index]` dequantises what the index names, and no more.

    Args:
        codes: uint32 [..., D * bits / 32], the first element in the lowest bits of a word.
        scales, biases: [..., D / group_size], in the dtype of the elements.
        bits: of a code, 8 or 4.
    """

    def __init__(self, codes: mx.array, scales: mx.array, biases: mx.array, bits: int) -> None:
        self.codes = codes
        self.scales = scales
        self.biases = biases
        self.bits = bits

    @property
    def parts(self) -> list[mx.array]:
        """Codes, scales and biases."""
        return [self.codes, self.scales, self.biases]

    @property
    def group_size(self) -> int:
        """Elements that share a scale and a bias."""
        return self.shape[-1] // self.scales.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the elements, not of the codes."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * WORD_BITS // self.bits)

    @property
    def dtype(self) -> mx.Dtype:
        """Of the elements once they are dequantised."""
        return self.scales.dtype

    def __getitem__(self, index: Any) -> mx.array:
        """Elements at an index of any axes but the last."""
        return mx.dequantize(
            self.codes[index],
            self.scales[index],
            self.biases[index],
            group_size=self.group_size,
            bits=self.bits,
        )

    def __copy__(self) -> QuantizedArray:
        return QuantizedArray(copy(self.codes), copy(self.scales), copy(self.biases), self.bits)


# What holds one layer's K or V.
PoolArray = mx.array | QuantizedArray


def parts(array: PoolArray) -> list[mx.array]:
    """The arrays that hold it: one, or codes, scales and biases."""
    return array.parts if isinstance(array, QuantizedArray) else [array]

"""Blocks copied out of the pool to host memory, and back."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged.cache import KVPool

Contents = list[npt.NDArray[np.uint8]]


def copy_out(pool: KVPool, block_ids: list[int]) -> Contents:
    """The bytes of whole blocks, in each of the pool's arrays."""
    index = mx.array(block_ids)
    contents = [array[index].view(mx.uint8) for array in pool.arrays]
    mx.eval(contents)
    return [np.array(content) for content in contents]


def copy_in(pool: KVPool, block_ids: list[int], contents: Contents) -> None:
    """Write what `copy_out` returned into as many blocks."""
    index = mx.array(block_ids)
    for array, content in zip(pool.arrays, contents, strict=True):
        array[index] = mx.array(content).view(array.dtype)

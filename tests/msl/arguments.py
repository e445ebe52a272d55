"""Between MLX's arrays and the buffers of a launch."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np

from .launch import INITIALISED_OUTPUT, INPUT, OUTPUT, Buffer, Bytes
from .source import Source

_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}

# Outputs that their kernels wrote in part: which bytes, while the array lives.
_partly_written: dict[int, tuple[weakref.ref[mx.array], Bytes]] = {}


def is_row_contiguous(array: mx.array) -> bool:
    return array.size == 0 or memoryview(cast(Any, array)).c_contiguous


def strides(array: mx.array) -> tuple[int, ...]:
    """Of an evaluated array, in elements."""
    if array.size == 0:
        return tuple(math.prod(array.shape[axis + 1 :]) for axis in range(array.ndim))
    steps = memoryview(cast(Any, array)).strides or ()
    return tuple(step // array.itemsize for step in steps)


def input_buffers(
    source: Source, names: Sequence[str], arrays: Sequence[mx.array]
) -> Iterator[Buffer]:
    """The inputs as they lie in memory, each followed by its shape, strides and number of
    dimensions where the kernel names them."""
    wanted = {parameter.name for parameter in source.parameters}
    for name, array in zip(names, arrays, strict=True):
        if is_row_contiguous(array):
            yield Buffer(name, bytes_of(array), INPUT, _written_bytes(array))
        else:
            yield Buffer(name, *_strided_bytes(array))
        described: tuple[tuple[str, Any, type], ...] = (
            ("_shape", array.shape, np.int32),
            ("_strides", strides(array), np.int64),
            ("_ndim", [array.ndim], np.int32),
        )
        for suffix, values, dtype in described:
            if array.ndim and name + suffix in wanted:
                yield Buffer(name + suffix, np.array(values, dtype).view(np.uint8), INPUT)


def output_buffer(
    name: str, shape: Sequence[int], dtype: mx.Dtype, init_value: float | None
) -> Buffer:
    num_bytes = math.prod(shape) * dtype.size
    written = np.zeros(num_bytes, np.uint8)
    if init_value is None:
        poison = np.full(num_bytes, 0xFF, np.uint8)  # NaN in every floating type
        return Buffer(name, poison, OUTPUT, written)
    filled = mx.full(tuple(shape), init_value, dtype)
    return Buffer(name, bytes_of(filled).copy(), INITIALISED_OUTPUT, written)


def result(buffer: Buffer, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """The array that a kernel wrote into `buffer`; what it left out is remembered."""
    array = mx.array(buffer.data).view(dtype).reshape(tuple(shape))
    mx.eval(array)
    assert buffer.written is not None
    if buffer.kind == OUTPUT and not buffer.written.all():
        key = id(array)
        forget = weakref.ref(array, lambda _: _partly_written.pop(key, None))
        _partly_written[key] = forget, buffer.written
    return array


def bytes_of(array: mx.array) -> Bytes:
    """In row-contiguous order; the array's own where it is in that order."""
    return np.asarray(array.reshape(-1).view(mx.uint8))


def _written_bytes(array: mx.array) -> Bytes | None:
    known = _partly_written.get(id(array))
    return known[1] if known and known[0]() is array else None


def _strided_bytes(array: mx.array) -> tuple[Bytes, int, Bytes]:
    """A strided array's memory from its first element to its last, and where elements lie."""
    elements = np.asarray(array.view(_UNSIGNED[array.itemsize]))  # no copy: the same memory
    if min(elements.strides) < 0:
        raise NotImplementedError(f"an input with negative strides {elements.strides}")
    steps = zip(elements.shape, elements.strides, strict=True)
    extent = sum((length - 1) * step for length, step in steps) + array.itemsize
    address = elements.__array_interface__["data"][0]
    data = np.frombuffer(ctypes.string_at(address, extent), np.uint8).copy()
    written = np.zeros(extent, np.uint8)
    shape = (*elements.shape, array.itemsize)
    occupied = np.lib.stride_tricks.as_strided(written, shape, (*elements.strides, 1))
    occupied[...] = 1
    return data, INPUT, written

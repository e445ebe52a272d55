"""What is attended over: cached sequences, as blocks or contiguous, and the true result."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged.kernels.launch import MAX_BLOCK_SIZE, DecodeShape
from mlx_paged.kernels.quantized import PoolArray, QuantizedArray, parts

Order = Literal["in order", "scattered"]
ORDERS: tuple[Order, ...] = ("in order", "scattered")

# The outputs' own rounding, for inputs of order one.
MAX_ERROR = {mx.float32: 1e-5, mx.float16: 1e-3, mx.bfloat16: 8e-3}


@dataclass(frozen=True)
class KV:
    """Cached keys and values, flat: any block size and the contiguous layout are views of them.

    Flat is [elements], or where they are quantised [rows, head_dim].
    """

    keys: PoolArray
    values: PoolArray

    @property
    def arrays(self) -> list[mx.array]:
        return [*parts(self.keys), *parts(self.values)]


@dataclass(frozen=True)
class Workload:
    """One decode step of sequences that have `lens` tokens cached."""

    shape: DecodeShape
    lens: tuple[int, ...]
    seed: int = 0

    @property
    def max_len(self) -> int:
        return max(self.lens)

    @property
    def scale(self) -> float:
        return float(self.shape.head_dim**-0.5)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that a step has to read."""
        return 2 * sum(self.lens) * self.shape.num_kv_heads * self.shape.row_nbytes

    @property
    def plain(self) -> Workload:
        """The same with keys and values that aren't quantised."""
        return replace(self, shape=replace(self.shape, kv_bits=None))

    @property
    def padded_kv_bytes(self) -> int:
        """The same if every sequence were as long as the longest."""
        return self.kv_bytes // sum(self.lens) * len(self.lens) * self.max_len

    @property
    def context_lens(self) -> mx.array:
        return mx.array(np.array(self.lens, np.int32))

    def queries(self) -> mx.array:
        """[sequences, query heads, head_dim], of order one like all inputs."""
        shape = (len(self.lens), self.shape.num_query_heads, self.shape.head_dim)
        return self._normal(shape, 0)

    def kv(self, copy: int = 0) -> KV:
        """The `copy`-th of any number of distinct caches."""
        tokens = len(self.lens) * (self.max_len + MAX_BLOCK_SIZE)
        elements = (tokens * self.shape.num_kv_heads * self.shape.head_dim,)
        flats = (self._normal(elements, 2 * copy + name) for name in (1, 2))
        return KV(*map(self._quantized, flats))

    def _quantized(self, flat: mx.array) -> PoolArray:
        """As the pool stores it."""
        bits, group_size = self.shape.kv_bits, self.shape.kv_group_size
        if bits is None:
            return flat
        rows = flat.reshape(-1, self.shape.head_dim)
        codes, scales, biases = mx.quantize(rows, group_size=group_size, bits=bits)
        return QuantizedArray(codes, scales, biases, bits)

    def pool(self, flat: PoolArray, block_size: int) -> PoolArray:
        """[blocks, KV heads, block_size, head_dim], a view."""
        rows = (self.shape.num_kv_heads, block_size)
        blocks = len(self.lens) * -(-self.max_len // block_size)
        num_rows = blocks * int(np.prod(rows))
        if isinstance(flat, QuantizedArray):
            codes, scales, biases = (
                part[:num_rows].reshape(blocks, *rows, -1) for part in flat.parts
            )
            return QuantizedArray(codes, scales, biases, flat.bits)
        head_dim = self.shape.head_dim
        return flat[: num_rows * head_dim].reshape(blocks, *rows, head_dim)

    def contiguous(self, flat: PoolArray) -> mx.array:
        """[sequences, KV heads, max_len, head_dim], a view. Quantised ones have none."""
        assert isinstance(flat, mx.array)
        shape = (len(self.lens), self.shape.num_kv_heads, self.max_len, self.shape.head_dim)
        return flat[: int(np.prod(shape))].reshape(shape)

    def tables(self, block_size: int, order: Order) -> npt.NDArray[np.int32]:
        """Block tables [sequences, blocks], rising or a random permutation of the pool."""
        blocks = np.arange(len(self.lens) * -(-self.max_len // block_size), dtype=np.int32)
        if order == "scattered":
            np.random.default_rng(self.seed).shuffle(blocks)
        return blocks.reshape(len(self.lens), -1)

    def reference(self, kv: KV, block_size: int, order: Order) -> npt.NDArray[np.float64]:
        """Attention in float64 with numpy, [sequences, query heads, head_dim]."""
        queries = as_float64(self.queries())
        pools = [as_float64(self.pool(flat, block_size)) for flat in (kv.keys, kv.values)]
        out = np.empty(queries.shape)
        tables = self.tables(block_size, order)
        for seq, length in enumerate(self.lens):
            used = tables[seq, : -(-length // block_size)]
            keys, values = (
                pool[used].swapaxes(0, 1).reshape(self.shape.num_kv_heads, -1, self.shape.head_dim)
                for pool in pools
            )
            by_group = queries[seq].reshape(self.shape.num_kv_heads, -1, self.shape.head_dim)
            scores = by_group @ keys[:, :length].swapaxes(1, 2) * self.scale
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[seq] = (weights @ values[:, :length]).reshape(out[seq].shape)
        return out

    def reduced(self, max_tokens: int) -> Workload:
        """The same kind of work with about `max_tokens` tokens, for an executor."""
        lens = self.lens[:2]
        total = sum(lens)
        if total <= max_tokens:
            return replace(self, lens=lens)
        return replace(self, lens=tuple(max(1, n * max_tokens // total) for n in lens))

    def _normal(self, shape: tuple[int, ...], name: int) -> mx.array:
        key = mx.random.key(self.seed * 1000 + name)
        return mx.random.normal(shape, key=key).astype(self.shape.dtype)


def max_error(out: mx.array, reference: npt.NDArray[np.float64]) -> float:
    """The largest difference; NaN if there is one in `out`."""
    return float(np.abs(as_float64(out) - reference).max())


def equal_lens(num_sequences: int, tokens: int) -> tuple[int, ...]:
    return (tokens,) * num_sequences


def drawn_lens(file: Path, num_sequences: int, seed: int) -> tuple[int, ...]:
    """Lengths of requests caught at a random decode step.

    `file` holds a JSON list of [prompt tokens, answer tokens]. A request is drawn as often as it
    has steps, then one of its steps.
    """
    pairs = [(int(prompt), int(answer)) for prompt, answer in json.loads(file.read_text())]
    draw = random.Random(seed)
    requests = draw.choices(pairs, weights=[answer for _, answer in pairs], k=num_sequences)
    return tuple(prompt + draw.randint(1, answer) for prompt, answer in requests)


def as_float64(array: PoolArray) -> npt.NDArray[np.float64]:
    """What an array holds; the elements of a quantised one."""
    if isinstance(array, QuantizedArray):  # dequantised in float32, whatever the scales' dtype
        scales, biases = array.scales.astype(mx.float32), array.biases.astype(mx.float32)
        array = QuantizedArray(array.codes, scales, biases, array.bits)[:]
    return np.array(array.astype(mx.float32)).astype(np.float64)

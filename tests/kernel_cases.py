"""Inputs for the kernels that leave nothing to luck, and float64 results to hold them to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import msl
import numpy as np
import numpy.typing as npt
import pytest

from mlx_paged.kernels import contiguous_decode_attention, metal, paged_decode_attention
from mlx_paged.kernels.launch import DecodeLaunch, DecodeShape, Splits
from mlx_paged.kernels.quantized import PoolArray, QuantizedArray

Floats = npt.NDArray[np.float64]

# Bounds on the error with inputs of order one: the outputs' own rounding.
MAX_ERROR = {mx.float32: 1e-5, mx.float16: 1e-3, mx.bfloat16: 8e-3}

# Many splits from few tokens; a sequence of 10 has two of 8, one of 100 has four of 32.
SMALL_SPLITS = Splits(smallest=8, largest=32, enough=3)

# A sequence has fewer splits than the batch's longest, and the merge kernel reads only its own.
PARTIAL_OUTPUTS = ("partial_out", "partial_stats")
EXECUTOR = msl.Executor(may_leave_unwritten=PARTIAL_OUTPUTS)

# What a block table may hold past a sequence's blocks.
GARBAGE = (-1, 2**31 - 1, -(2**31), 10**6)


def require_compiler() -> None:
    """Skip the test or module that asks, unless the executor finds a compiler."""
    if msl.find_compiler() is None:
        pytest.skip(msl.NO_COMPILER, allow_module_level=True)


@dataclass(frozen=True)
class Case:
    """A batch whose blocks lie scattered in a pool that is NaN wherever no token is stored."""

    head_dim: int = 64
    group_size: int = 6
    num_kv_heads: int = 2
    block_size: int = 16
    dtype: mx.Dtype = mx.float16
    lens: tuple[int, ...] = (0, 1, 15, 17, 50)
    launch: DecodeLaunch | None = None
    unused_entries: int = 2
    query_factor: float = 1
    is_cold: bool = False  # queries and keys point away from each other: all scores below 0
    seed: int = 0
    kv_bits: int | None = None
    kv_group_size: int = 32
    window: int | None = None  # of tokens that a query sees; all without

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("mlx.core.")
        case = f"d{self.head_dim}-{dtype}-block{self.block_size}-group{self.group_size}"
        return f"{case}-{self.kv_bits}bits{self.kv_group_size}" if self.kv_bits else case

    @property
    def shape(self) -> DecodeShape:
        num_query_heads = self.group_size * self.num_kv_heads
        return DecodeShape(
            num_query_heads,
            self.num_kv_heads,
            self.head_dim,
            self.dtype,
            self.kv_bits,
            self.kv_group_size,
        )

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def max_len(self) -> int:
        return max(self.lens)

    @property
    def context_lens(self) -> mx.array:
        return mx.array(np.array(self.lens, np.int32))

    @cached_property
    def queries(self) -> mx.array:
        """[sequences, query heads, head_dim]."""
        rows = [self._normal(length, 0, self.shape.num_query_heads, 1) for length in self.lens]
        queries = mx.stack(rows)[:, :, 0] * self.query_factor
        return -mx.abs(queries) if self.is_cold else queries

    @cached_property
    def keys(self) -> list[mx.array]:
        """Each sequence's keys, [KV heads, tokens, head_dim]."""
        keys = self._tokens(1)
        return [mx.abs(rows) for rows in keys] if self.is_cold else keys

    @cached_property
    def values(self) -> list[mx.array]:
        return self._tokens(2)

    @cached_property
    def tables(self) -> mx.array:
        """Blocks in random order, then entries that must not be read."""
        counts = [-(-length // self.block_size) for length in self.lens]
        width = max(counts) + self.unused_entries
        tables = np.resize(np.array(GARBAGE, np.int64), (len(self.lens), width)).astype(np.int32)
        blocks = np.random.default_rng(self.seed).permutation(sum(counts) + 3)
        for table, count in zip(tables, counts, strict=True):
            table[:count], blocks = blocks[:count], blocks[count:]
        return mx.array(tables)

    def pool(self, tokens: list[mx.array]) -> PoolArray:
        """[blocks, KV heads, block_size, head_dim] with `tokens` in their slots, NaN elsewhere.

        Where it is quantised, slots without a token have codes of any value, and NaN for scales
        and biases.
        """
        if self.kv_bits is None:
            return self._in_slots(tokens)
        codes, scales, biases = zip(*map(self.quantized, tokens), strict=True)
        return QuantizedArray(
            *map(self._in_slots, (codes, scales, biases)),  # type: ignore[arg-type]
            bits=self.kv_bits,
        )

    def quantized(self, rows: mx.array) -> tuple[mx.array, ...]:
        """Codes, scales and biases."""
        if not rows.size:
            empty = mx.zeros((self.num_kv_heads, 1, self.head_dim), self.dtype)
            return tuple(part[:, :0] for part in self.quantized(empty))
        return tuple(mx.quantize(rows, group_size=self.kv_group_size, bits=self.kv_bits))

    def stored(self, rows: mx.array) -> Floats:
        """Rows as a pool of this case holds them, unrounded where they are quantised."""
        if self.kv_bits is None or not rows.size:
            return as_floats(rows)
        codes, scales, biases = self.quantized(rows)
        shifts = np.arange(0, 32, self.kv_bits, dtype=np.uint32)
        values = np.array(codes)[..., None] >> shifts & (2**self.kv_bits - 1)
        values = values.reshape(rows.shape).astype(np.float64)
        spread = np.repeat(as_floats(scales), self.kv_group_size, axis=-1)
        return spread * values + np.repeat(as_floats(biases), self.kv_group_size, axis=-1)

    def _in_slots(self, tokens: Sequence[mx.array]) -> mx.array:
        """[blocks, KV heads, block_size, n] of each sequence's [KV heads, tokens, n]."""
        tables = np.array(self.tables)
        num_blocks = sum(-(-length // self.block_size) for length in self.lens) + 3
        dtype, last = tokens[0].dtype, tokens[0].shape[-1]
        is_codes = dtype == mx.uint32
        shape = (num_blocks, self.num_kv_heads, self.block_size, last)
        empty = 2**32 - 1 if is_codes else np.nan
        pool = np.full(shape, empty, np.uint32 if is_codes else np.float32)
        for table, rows, length in zip(tables, tokens, self.lens, strict=True):
            positions = np.arange(length)
            blocks, slots = table[positions // self.block_size], positions % self.block_size
            rows_in = np.array(rows) if is_codes else as_floats(rows)
            pool[blocks, :, slots] = rows_in.transpose(1, 0, 2)
        return mx.array(pool).astype(dtype)

    def contiguous(self, tokens: list[mx.array]) -> mx.array:
        """[sequences, KV heads, longest, head_dim], NaN past each sequence's end."""
        shape = (len(self.lens), self.num_kv_heads, self.max_len, self.head_dim)
        rows = np.full(shape, np.nan, np.float32)
        for seq, length in enumerate(self.lens):
            rows[seq, :, :length] = as_floats(tokens[seq])
        return mx.array(rows).astype(self.dtype)

    def reference(self) -> Floats:
        """Attention in float64 on the same rounded inputs; 0 for a sequence without tokens."""
        queries = as_floats(self.queries)
        out = np.zeros(queries.shape)
        for seq, length in enumerate(self.lens):
            if length == 0:
                continue
            keys = np.repeat(self.stored(self.keys[seq]), self.group_size, axis=0)
            values = np.repeat(self.stored(self.values[seq]), self.group_size, axis=0)
            if self.window is not None:
                keys, values = keys[:, -self.window :], values[:, -self.window :]
            scores = np.einsum("hd,htd->ht", queries[seq], keys) * self.scale
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[seq] = np.einsum("ht,htd->hd", weights, values)
        return out

    def attend(self, **changes: Any) -> mx.array:
        """The paged kernel's result, [sequences, query heads, head_dim]."""
        arguments = {
            "queries": self.queries,
            "key_pool": self.pool(self.keys),
            "value_pool": self.pool(self.values),
            "block_tables": self.tables,
            "context_lens": self.context_lens,
            "scale": self.scale,
            "max_context_len": self.max_len,
            "window": self.window,
            "launch": self.launch,
        }
        return paged_decode_attention(**{**arguments, **changes})

    def attend_contiguous(self) -> mx.array:
        """The result of the variant without a block table."""
        return contiguous_decode_attention(
            self.queries,
            self.contiguous(self.keys),
            self.contiguous(self.values),
            self.context_lens,
            scale=self.scale,
            max_context_len=self.max_len,
            launch=self.launch,
        )

    def error(self) -> float:
        """The largest difference from float64, infinite where a result is NaN."""
        difference = np.abs(as_floats(self.attend()) - self.reference())
        return float(np.nan_to_num(difference, nan=np.inf).max())

    def _normal(self, length: int, what: int, heads: int, tokens: int) -> mx.array:
        """Seeded by a sequence's length, so that it's the same sequence alone and in any batch."""
        random = np.random.default_rng([self.seed, length, what])
        normal = random.standard_normal((heads, tokens, self.head_dim), np.float32)
        return mx.array(normal.clip(-3, 3)).astype(self.dtype)

    def _tokens(self, what: int) -> list[mx.array]:
        return [self._normal(length, what, self.num_kv_heads, length) for length in self.lens]


def as_floats(array: mx.array) -> Floats:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def bits(array: mx.array) -> npt.NDArray[np.unsignedinteger[Any]]:
    """The array's bits, for comparisons that let nothing pass."""
    unsigned = {2: mx.uint16, 4: mx.uint32}[array.itemsize]
    return np.array(array.view(unsigned))


Factory = Callable[..., Any]


def run_header(factory: Factory, file: str, expression: str, xs: list[int]) -> list[int]:
    """`expression` of each `x` of `xs`, by a kernel that has the project's own header text."""
    kernel = factory(
        name="header",
        input_names=["xs"],
        output_names=["results"],
        header=metal.read(file),
        source="const uint i = thread_position_in_grid.x;\n"
        f"const int x = xs[i];\nresults[i] = {expression};",
    )
    (results,) = kernel(
        inputs=[mx.array(np.array(xs, np.int32))],
        grid=(len(xs), 1, 1),
        threadgroup=(len(xs), 1, 1),
        output_shapes=[(len(xs),)],
        output_dtypes=[mx.int64],
    )
    return [int(value) for value in np.array(results)]


class Recording:
    """A factory that makes kernels with another one and keeps what their last runs reported."""

    def __init__(self, factory: Factory) -> None:
        self.factory = factory
        self.reports: dict[str, Any] = {}

    def __call__(self, name: str, **arguments: Any) -> Factory:
        kernel = self.factory(name=name, **arguments)

        def launch(**launch_arguments: Any) -> Any:
            outputs = kernel(**launch_arguments)
            self.reports[name.rpartition("_")[0]] = kernel.report
            return outputs

        return launch

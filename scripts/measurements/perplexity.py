"""What the format of K and V does to a model: the perplexity of a text, and attention's error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged.blocks import Sequence as Tokens
from mlx_paged.cache import Batch, KVPool, PagedCache
from mlx_paged.cache.kv_format import KVFormat

Floats = npt.NDArray[np.float64]


@dataclass
class Reading:
    """How a text is read: in windows of their own, a window in chunks, each chunk from the pool."""

    model: Any
    token_ids: Sequence[int]
    window: int
    chunk: int
    block_size: int = 16

    @property
    def num_chunks(self) -> int:
        return sum(math.ceil((len(tokens) - 1) / self.chunk) for tokens in self.windows())

    def windows(self) -> Iterator[Sequence[int]]:
        """Pieces of the text, all of two tokens or more."""
        for start in range(0, len(self.token_ids) - 1, self.window):
            yield self.token_ids[start : start + self.window]

    def pool(self, kv_format: KVFormat) -> KVPool:
        """Room for a window."""
        return KVPool.for_model(
            self.model,
            math.ceil(self.window / self.block_size),
            self.block_size,
            kv_format.dtype,
            kv_bits=kv_format.bits,
            kv_group_size=kv_format.group_size,
        )


def surprises(
    reading: Reading,
    kv_format: KVFormat,
    done: Callable[[], None],
    errors: Sequence[AttentionError] = (),
) -> Floats:
    """-log p of each token after the first of its window, given those before it.

    Args:
        reading: of what, by what.
        kv_format: of the pool from which each chunk reads the K and V of all before it.
        done: called after each chunk.
        errors: measured beside, on the queries, keys and values that come by.
    """
    pool = reading.pool(kv_format)
    losses = []
    for tokens in reading.windows():
        sequence = Tokens(pool.blocks, tokens)
        for error in errors:
            error.start(reading)
        num_read = len(tokens) - 1  # the last one predicts nothing
        while (first := sequence.num_cached_tokens) < num_read:
            num_new = min(reading.chunk, num_read - first)
            sequence.reserve(num_new)
            batch = Batch.of([(sequence.block_table, first, num_new)], pool.block_size)
            logits = reading.model(
                mx.array(tokens[first : first + num_new]), _Watched(pool, batch, errors)
            )
            following = mx.array(tokens[first + 1 : first + num_new + 1])
            scores = logits.astype(mx.float32)
            chosen = mx.take_along_axis(scores, following[:, None], axis=-1)[:, 0]
            loss = mx.logsumexp(scores, axis=-1) - chosen
            mx.eval(loss, pool.arrays, [error.arrays for error in errors])
            losses.append(np.array(loss).astype(np.float64))
            sequence.num_cached_tokens += num_new
            for error in errors:
                error.add()
            done()
        sequence.free()
    return np.concatenate(losses)


@dataclass
class AttentionError:
    """Attention over a pool in `kv_format` against the model's own, on the same q, k and v.

    Attributes:
        squares: per layer, the sum of squared differences and that of squared outputs.
    """

    kv_format: KVFormat
    squares: dict[int, list[float]] = field(default_factory=dict)
    pending: dict[int, tuple[mx.array, mx.array]] = field(default_factory=dict)
    pool: KVPool | None = None

    @property
    def arrays(self) -> list[Any]:
        """What must be evaluated with the pass that it watched."""
        assert self.pool is not None
        return [self.pool.arrays, list(self.pending.values())]

    @property
    def relative(self) -> float:
        """Root of the squared differences over that of the squared outputs, in all layers."""
        differences, outputs = np.sum(list(self.squares.values()), axis=0)
        return math.sqrt(differences / outputs)

    @property
    def worst_layer(self) -> float:
        """The same in the layer where it is largest."""
        return max(math.sqrt(difference / output) for difference, output in self.squares.values())

    def start(self, reading: Reading) -> None:
        """Begin a window, in a pool whose block table is the watched one's."""
        self.pool = self.pool or reading.pool(self.kv_format)

    def watch(self, batch: Batch, layer: int, arguments: tuple[Any, ...], output: mx.array) -> None:
        """Attend as well, and note the difference."""
        assert self.pool is not None
        mine = PagedCache(self.pool, batch).attend(layer, *arguments).astype(mx.float32)
        output = output.astype(mx.float32)
        self.pending[layer] = (mx.square(mine - output).sum(), mx.square(output).sum())

    def add(self) -> None:
        """Take what was noted into the sums."""
        for layer, terms in self.pending.items():
            sums = self.squares.setdefault(layer, [0.0, 0.0])
            for i, term in enumerate(terms):
                sums[i] += term.item()
        self.pending.clear()


class _Watched(PagedCache):
    """A cache whose attention others watch."""

    def __init__(self, pool: KVPool, batch: Batch, errors: Sequence[AttentionError]) -> None:
        super().__init__(pool, batch)
        self.errors = errors

    def attend(self, layer: int, *arguments: Any) -> mx.array:
        output = super().attend(layer, *arguments)
        for error in self.errors:
            error.watch(self.batch, layer, arguments, output)
        return output

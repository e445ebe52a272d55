"""Draws the next tokens of all rows in one pass, each row by its own parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged.engine.filters import Filters
from mlx_paged.engine.grammar import GrammarState
from mlx_paged.engine.params import SamplingParams
from mlx_paged.engine.penalties import TokenCounts, penalise

Positions = npt.NDArray[np.int64]

# Drawn in place of a token where the logits are not numbers.
NO_TOKEN = -1

_MASK = 2**64 - 1


@dataclass(slots=True)
class Draw:
    """How one answer's tokens are drawn.

    Attributes:
        params: the request's.
        key: the sample's randomness, from `draw_key`.
        num_prompt_tokens: position of the answer's first token.
        end_token_ids: what must not come before `min_tokens`.
        counts: the sequence's tokens so far, where there are penalties.
        grammar: how far the answer has come in its grammar, if it has one.
    """

    params: SamplingParams
    key: int
    num_prompt_tokens: int = 0
    end_token_ids: frozenset[int] = frozenset()
    counts: TokenCounts | None = None
    grammar: GrammarState | None = None


class Draws:
    """How D rows' tokens are drawn, made once for as many steps as the rows stay the same."""

    def __init__(self, draws: list[Draw]) -> None:
        self.draws = draws
        self.params = [draw.params for draw in draws]
        self.take_likeliest = all(p.takes_likeliest for p in self.params)
        self.rows_to_adjust = [row for row, p in enumerate(self.params) if not p.is_plain]
        self.random_rows = [row for row, p in enumerate(self.params) if p.temperature > 0]

    @cached_property
    def random(self) -> Draws:
        """The rows that aren't greedy."""
        return Draws([self.draws[row] for row in self.random_rows])

    @cached_property
    def keys(self) -> npt.NDArray[np.uint64]:
        return np.array([draw.key for draw in self.draws], np.uint64)

    @cached_property
    def temperatures(self) -> mx.array:
        """[D, 1] float32."""
        return mx.array([p.temperature for p in self.params], mx.float32)[:, None]

    @cached_property
    def num_top_logprobs(self) -> int | None:
        """Most likely tokens to report, at most; None if no row wants log-probabilities."""
        counts = [p.num_logprobs for p in self.params if p.num_logprobs is not None]
        return max(counts, default=None)

    def filters(self, vocab_size: int) -> Filters:
        if self._filters is None:
            self._filters = Filters(self.params, vocab_size)
        return self._filters

    _filters: Filters | None = None


@dataclass
class Drawn:
    """Tokens drawn for D rows, as arrays that may not have been evaluated.

    Attributes:
        token_ids: [D] int32; `NO_TOKEN` where the logits are not numbers.
        logprobs, ranks: of the tokens drawn, [D], if any row asked for log-probabilities; the
            likeliest token has rank 1.
        top_ids, top_logprobs: the most likely tokens, likeliest first, [D, most that a row
            asked for].
    """

    token_ids: mx.array
    logprobs: mx.array | None = None
    ranks: mx.array | None = None
    top_ids: mx.array | None = None
    top_logprobs: mx.array | None = None

    @property
    def arrays(self) -> list[mx.array]:
        there = (self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        return [array for array in there if array is not None]


def draw_key(seed: int, sample_index: int) -> int:
    """64 bits that differ between seeds and between the samples of one request."""
    return _mix(_mix(seed & _MASK) ^ sample_index)


def _mix(x: int) -> int:
    """A bijection of 64 bits that spreads every bit (splitmix64's finaliser)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def random_keys(keys: npt.NDArray[np.uint64], positions: Positions) -> mx.array:
    """MLX random keys of samples at positions, [D, 2] uint32."""
    x = keys ^ positions.astype(np.uint64) * np.uint64(0xD1342543DE82EF95)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return mx.array(x.view(np.uint32).reshape(-1, 2))


def sample(logits: mx.array, draws: Draws, positions: Positions) -> Drawn:
    """Draw one token per row.

    Args:
        logits: [D, vocab_size], in any float dtype.
        draws: how.
        positions: of the tokens in their sequences, [D]; with a row's key, they determine
            what is drawn.
    """
    if draws.take_likeliest:
        return Drawn(_checked(logits, mx.argmax(logits, axis=-1).astype(mx.int32)))
    raw = logits.astype(mx.float32)
    adjusted = adjust(raw, draws, positions) if draws.rows_to_adjust else raw
    num_random = len(draws.random_rows)
    if num_random == len(draws.draws):
        token_ids = _draw_random(adjusted, draws, positions)
    else:
        token_ids = mx.argmax(adjusted, axis=-1).astype(mx.int32)
        if num_random:
            rows = mx.array(draws.random_rows)
            token_ids[rows] = _draw_random(
                adjusted[rows], draws.random, positions[draws.random_rows]
            )
    drawn = _with_logprobs(raw, token_ids, draws.num_top_logprobs)
    drawn.token_ids = _checked(raw, token_ids)
    return drawn


def _checked(logits: mx.array, token_ids: mx.array) -> mx.array:
    """The tokens drawn, or `NO_TOKEN` where a token's logit is NaN.

    One NaN in a row's activations makes all its logits NaN, so the token drawn shows it.
    """
    drawn = mx.take_along_axis(logits, token_ids[:, None], axis=-1)[:, 0]
    return mx.where(mx.isnan(drawn), NO_TOKEN, token_ids)


def adjust(logits: mx.array, draws: Draws, positions: Positions) -> mx.array:
    """Logits with penalties and biases, and without tokens that may not come yet."""
    rows = draws.rows_to_adjust
    logits = penalise(logits, {row: draws.draws[row] for row in rows})
    changes = []
    for row in rows:
        draw = draws.draws[row]
        changes += [(row, token_id, bias) for token_id, bias in draw.params.logit_bias.items()]
        if positions[row] - draw.num_prompt_tokens < draw.params.min_tokens:
            changes += [(row, token_id, -np.inf) for token_id in draw.end_token_ids]
    if changes:
        at_rows, token_ids, values = (mx.array(column) for column in zip(*changes, strict=True))
        logits = logits.at[at_rows, token_ids].add(values.astype(mx.float32))
    grammars = ((row, draws.draws[row].grammar) for row in rows)
    allowed = {row: grammar.allowed() for row, grammar in grammars if grammar is not None}
    if allowed:
        at, is_allowed = mx.array(list(allowed)), mx.array(np.stack(list(allowed.values())))
        logits[at] = mx.where(is_allowed, logits[at], -mx.inf)
    return logits


def _draw_random(logits: mx.array, draws: Draws, positions: Positions) -> mx.array:
    """The largest of logits plus Gumbel noise: a draw from their softmax, [D] int32."""
    vocab_size = logits.shape[-1]
    logits = draws.filters(vocab_size)(logits / draws.temperatures)
    noise = gumbel_noise(random_keys(draws.keys, positions), vocab_size)
    return mx.argmax(logits + noise, axis=-1).astype(mx.int32)


def gumbel_noise(keys: mx.array, vocab_size: int) -> mx.array:
    """Noise from one random key per row, [D, vocab_size] float32. It is never infinite."""

    def uniform_row(key: mx.array) -> mx.array:
        return mx.random.uniform(shape=(vocab_size,), key=key)

    # 0 is drawn once in 2^32 times. Its noise of -inf would tie with tokens filtered out.
    uniform = mx.maximum(mx.vmap(uniform_row)(keys), 2.0**-33)
    return -mx.log(-mx.log(uniform))


def _with_logprobs(logits: mx.array, token_ids: mx.array, num_top: int | None) -> Drawn:
    if num_top is None:
        return Drawn(token_ids)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, token_ids[:, None], axis=-1)
    ranks = (logprobs > chosen).sum(axis=-1) + 1
    drawn = Drawn(token_ids, chosen[:, 0], ranks)
    if num_top:
        order, drawn.top_logprobs = top_sorted(logprobs, min(num_top, logits.shape[-1]))
        drawn.top_ids = order.astype(mx.int32)
    return drawn


def top_sorted(values: mx.array, num_top: int) -> tuple[mx.array, mx.array]:
    """Indices and values of the largest along the last axis, largest first."""
    size = values.shape[-1]
    if num_top < size:
        ids = mx.argpartition(values, size - num_top, axis=-1)[..., size - num_top :]
    else:
        ids = mx.broadcast_to(mx.arange(size), values.shape)
    top = mx.take_along_axis(values, ids, axis=-1)
    order = mx.argsort(-top, axis=-1)
    return mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(top, order, axis=-1)

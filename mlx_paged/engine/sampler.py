"""Draws the next tokens of all rows in one pass, each row by its own parameters."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_paged.engine.filters import filter_logits
from mlx_paged.engine.params import SamplingParams
from mlx_paged.engine.penalties import TokenCounts, penalise

_MASK = 2**64 - 1


@dataclass(slots=True)
class Draw:
    """How one answer's next token is drawn.

    Attributes:
        params: the request's.
        key: the sample's randomness, from `draw_key`.
        position: of the token in its sequence; with `key`, it determines the draw.
        num_prompt_tokens: position of the answer's first token.
        end_token_ids: what must not come before `min_tokens`.
        counts: the sequence's tokens so far, where there are penalties.
    """

    params: SamplingParams
    key: int
    position: int = 0
    num_prompt_tokens: int = 0
    end_token_ids: frozenset[int] = frozenset()
    counts: TokenCounts | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens that the answer has so far."""
        return self.position - self.num_prompt_tokens


@dataclass
class Drawn:
    """Tokens drawn for D rows, as arrays that may not have been evaluated.

    Attributes:
        token_ids: [D] int32.
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


def random_keys(keys: list[int], positions: list[int]) -> mx.array:
    """MLX random keys of samples at positions, [D, 2] uint32."""
    x = np.array(keys, np.uint64) ^ np.array(positions, np.uint64) * np.uint64(0xD1342543DE82EF95)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return mx.array(x.view(np.uint32).reshape(-1, 2))


def sample(logits: mx.array, draws: list[Draw]) -> Drawn:
    """Draw one token per row.

    Args:
        logits: [D, vocab_size], in any float dtype.
        draws: D rows' parameters.
    """
    if all(draw.params.takes_likeliest for draw in draws):
        return Drawn(mx.argmax(logits, axis=-1).astype(mx.int32))
    raw = logits.astype(mx.float32)
    adjusted = _adjust(raw, draws)
    token_ids = mx.argmax(adjusted, axis=-1).astype(mx.int32)
    random = [row for row, draw in enumerate(draws) if draw.params.temperature > 0]
    if len(random) == len(draws):
        token_ids = _draw_random(adjusted, draws)
    elif random:
        rows = mx.array(random)
        token_ids[rows] = _draw_random(adjusted[rows], [draws[row] for row in random])
    return _with_logprobs(raw, token_ids, draws)


def _adjust(logits: mx.array, draws: list[Draw]) -> mx.array:
    """Logits with penalties and biases, and without end tokens that may not come yet."""
    rows = [row for row, draw in enumerate(draws) if not draw.params.is_plain]
    if not rows:
        return logits
    logits = penalise(logits, rows, draws)
    biases = [(row, *item) for row in rows for item in draws[row].params.logit_bias.items()]
    banned = [
        (row, token_id, -np.inf)
        for row in rows
        if draws[row].num_output_tokens < draws[row].params.min_tokens
        for token_id in draws[row].end_token_ids
    ]
    if biases or banned:
        at_rows, token_ids, values = (
            mx.array(column) for column in zip(*biases, *banned, strict=True)
        )
        logits = logits.at[at_rows, token_ids].add(values.astype(mx.float32))
    return logits


def _draw_random(logits: mx.array, draws: list[Draw]) -> mx.array:
    """The largest of logits plus Gumbel noise: a draw from their softmax, [D] int32."""
    params = [draw.params for draw in draws]
    temperatures = mx.array([p.temperature for p in params], mx.float32)[:, None]
    logits = filter_logits(logits / temperatures, params)
    keys = random_keys([draw.key for draw in draws], [draw.position for draw in draws])
    return mx.argmax(logits + gumbel_noise(keys, logits.shape[-1]), axis=-1).astype(mx.int32)


def gumbel_noise(keys: mx.array, vocab_size: int) -> mx.array:
    """Noise from one random key per row, [D, vocab_size] float32. It is never infinite."""

    def uniform_row(key: mx.array) -> mx.array:
        return mx.random.uniform(shape=(vocab_size,), key=key)

    # 0 is drawn once in 2^32 times. Its noise of -inf would tie with tokens filtered out.
    uniform = mx.maximum(mx.vmap(uniform_row)(keys), 2.0**-33)
    return -mx.log(-mx.log(uniform))


def _with_logprobs(logits: mx.array, token_ids: mx.array, draws: list[Draw]) -> Drawn:
    wanted = [draw.params.num_logprobs for draw in draws]
    if all(count is None for count in wanted):
        return Drawn(token_ids)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, token_ids[:, None], axis=-1)
    ranks = (logprobs > chosen).sum(axis=-1) + 1
    drawn = Drawn(token_ids, chosen[:, 0], ranks)
    num_top = min(max(count or 0 for count in wanted), logits.shape[-1])
    if num_top:
        order, drawn.top_logprobs = top_sorted(logprobs, num_top)
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

"""How a request's tokens are chosen, and when its answer ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

MAX_LOGPROBS = 64


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request; each sample of it follows them with its own randomness.

    Filters are applied in this order: bias, penalties, temperature, top-k, top-p, min-p.

    Attributes:
        n: answers to return.
        best_of: answers to sample; the `n` with the highest mean log-probability are returned.
        temperature: 0 takes the most likely token.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the fewest most likely tokens that reach this probability.
        min_p: drop tokens less likely than this share of the most likely one's probability.
        repetition_penalty: divides positive logits, multiplies negative ones, of the tokens in
            the prompt and the answer so far; 1 leaves them.
        presence_penalty: taken off the logits of the answer's tokens.
        frequency_penalty: taken off once for each time that the answer has the token.
        logit_bias: added to logits, by token id.
        seed: the same seed gives the same answer, alone, in any batch, after preemption.
        max_tokens: length of the answer at most; None for as many as context and pool allow.
        min_tokens: until then no end token is drawn, and no stop string ends the answer.
        stop: strings that end the answer; they are not part of its text.
        stop_token_ids: tokens that end the answer, besides the model's end tokens.
        include_stop_str_in_output: leave the stop string in the text.
        ignore_eos: go on past the model's end tokens.
        logprobs: report the chosen tokens' log-probabilities, and those of this many of the
            most likely tokens; None for none. Taken from the model's logits as they come.
        grammar: what the answer must follow, in the language of llguidance, for instance from
            `json_schema_grammar`; it ends where the grammar does.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        self._check_numbers()
        self._check_counts()
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop strings must be non-empty text, not {list(stop)}")

    def _check_numbers(self) -> None:
        for name, low, high in (
            ("temperature", 0, math.inf),
            ("min_p", 0, 1),
            ("presence_penalty", -2, 2),
            ("frequency_penalty", -2, 2),
        ):
            value = _number(name, getattr(self, name))
            if not low <= value <= high:
                raise ValueError(f"{name} must be from {low} to {high}, not {value}")
        if not 0 < _number("top_p", self.top_p) <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if _number("repetition_penalty", self.repetition_penalty) <= 0:
            raise ValueError(f"repetition_penalty must be above 0, not {self.repetition_penalty}")
        for token_id, bias in self.logit_bias.items():
            _integer("a token id of logit_bias", token_id, 0)
            _number(f"logit_bias of token {token_id}", bias)

    def _check_counts(self) -> None:
        _integer("n", self.n, 1)
        _integer("top_k", self.top_k, 0)
        _integer("min_tokens", self.min_tokens, 0)
        for token_id in self.stop_token_ids:
            _integer("a stop token id", token_id, 0)
        if self.seed is not None:
            _integer("seed", self.seed, None)
        if self.best_of is not None and _integer("best_of", self.best_of, 1) < self.n:
            raise ValueError(f"best_of is {self.best_of}, fewer than the n = {self.n} to return")
        if self.max_tokens is not None and self.min_tokens > _integer(
            "max_tokens", self.max_tokens, 1
        ):
            raise ValueError(
                f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}"
            )
        if self.logprobs is not None and _integer("logprobs", self.logprobs, 0) > MAX_LOGPROBS:
            raise ValueError(f"logprobs must be at most {MAX_LOGPROBS}, not {self.logprobs}")
        if self.grammar is not None and (self.ignore_eos or self.min_tokens):
            raise ValueError(
                "a grammar decides where the answer may end, so it goes with neither ignore_eos "
                "nor min_tokens"
            )

    @property
    def num_samples(self) -> int:
        """Answers that are generated."""
        return self.best_of or self.n

    @cached_property
    def has_penalties(self) -> bool:
        """Whether the next token's logits depend on which tokens came before."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @cached_property
    def depends_on_answer(self) -> bool:
        """Whether the next token can't be drawn before the last one is known to the host."""
        return self.has_penalties or self.grammar is not None

    @cached_property
    def is_plain(self) -> bool:
        """Whether the model's logits are sampled as they come, but for temperature and filters."""
        return not (self.depends_on_answer or self.logit_bias or self.min_tokens)

    @cached_property
    def takes_likeliest(self) -> bool:
        """Whether the next token is the one with the largest logit, and nothing else is wanted."""
        return self.is_plain and self.temperature == 0 and self.num_logprobs is None

    @cached_property
    def num_logprobs(self) -> int | None:
        """`logprobs`, or 0 where choosing the best samples needs the chosen tokens' own."""
        return 0 if self.logprobs is None and self.num_samples > self.n else self.logprobs


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search.

    Attributes:
        beam_width: beams that are kept in each step, and answers returned.
        max_tokens: length of an answer at most.
        length_penalty: answers are ranked by their summed log-probability over
            length ** length_penalty.
        early_stopping: stop at `beam_width` finished answers, rather than once no running beam
            can still beat the worst of them.
        ignore_eos: the model's end tokens end no answer.
    """

    beam_width: int = 4
    max_tokens: int = 64
    length_penalty: float = 1.0
    early_stopping: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _integer("beam_width", self.beam_width, 1)
        _integer("max_tokens", self.max_tokens, 1)
        _number("length_penalty", self.length_penalty)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    return value


def _integer(name: str, value: Any, low: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    if low is not None and value < low:
        raise ValueError(f"{name} must be at least {low}, not {value}")
    return value

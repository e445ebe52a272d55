"""One answer: its text, log-probabilities and end, as tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mlx_paged.engine.text import TextStream
from mlx_paged.server.messages import Token


class TokenLogprobs(NamedTuple):
    """A token's log-probability, and those of the most likely ones, likeliest first.

    `text_offset` is the length of the answer's text before the token.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    text_offset: int


class Answer:
    """One sample of a prompt.

    Args:
        index: of the sample.
        text: detects stop strings too.
        min_tokens: until then no stop string counts.
        num_top_logprobs: how many of the most likely tokens to report.

    Attributes:
        num_tokens: up to the end, an end token or those of a stop string included.
        finish_reason: "stop", "length", "error" or "abort"; None while it goes on.
        logprobs: of its tokens, if they were asked for.
    """

    def __init__(
        self, index: int, text: TextStream, min_tokens: int = 0, num_top_logprobs: int = 0
    ) -> None:
        self.index = index
        self.text_stream = text
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.logprobs: list[TokenLogprobs] = []
        self._min_tokens = min_tokens
        self._num_top = num_top_logprobs
        self._sum_of_logprobs = 0.0
        self._num_logprobs_taken = 0

    def add(self, token: Token) -> bool:
        """Take over a token. Returns whether the answer ends here before the engine knows."""
        if self.finish_reason is not None:
            return False
        self.num_tokens += 1
        if token.logprobs:
            self._add_logprobs(token)
        is_end_token = token.finish_reason == "stop"
        if not is_end_token and token.finish_reason != "error":
            may_stop = self.num_tokens >= self._min_tokens
            self.text_stream.add(token.token_id, may_stop)
        self.finish_reason = token.finish_reason
        stops = self.text_stream.stop_string is not None
        if stops:
            self.finish_reason = "stop"
        if self.finish_reason is not None:
            self.text_stream.finish()
        return stops and token.finish_reason is None

    def finish(self, reason: str) -> None:
        """End the answer where it is."""
        self.finish_reason = reason
        self.text_stream.finish()

    @property
    def text(self) -> str:
        """All of it so far."""
        return self.text_stream.text

    def take(self) -> str:
        """Text that came since the last time."""
        return self.text_stream.take()

    def take_logprobs(self) -> Sequence[TokenLogprobs]:
        """Log-probabilities that came since the last time."""
        start, self._num_logprobs_taken = self._num_logprobs_taken, len(self.logprobs)
        return self.logprobs[start:]

    @property
    def mean_logprob(self) -> float:
        return self._sum_of_logprobs / max(1, self.num_tokens)

    def _add_logprobs(self, token: Token) -> None:
        pairs = token.logprobs or []
        token_id, logprob = pairs[0]
        self._sum_of_logprobs += logprob
        top = pairs[1 : 1 + self._num_top]
        self.logprobs.append(TokenLogprobs(token_id, logprob, top, len(self.text)))

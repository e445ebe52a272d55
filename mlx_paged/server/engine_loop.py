"""Keeps an engine stepping, and tells what happens: requests in, tokens out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from mlx_paged.engine.engine import Engine
from mlx_paged.engine.outputs import Logprob, TokenOutput
from mlx_paged.engine.params import SamplingParams
from mlx_paged.server.messages import (
    Abort,
    Add,
    Beat,
    Failed,
    FromEngine,
    Refused,
    ToEngine,
    Token,
    Tokens,
    Watch,
)
from mlx_paged.server.pool_view import pool_view

BEAT_SECONDS = 1.0
VIEW_SECONDS = 0.2
# The same on every step, so that no request finds its blocks.
WARM_UP_SALT = "warm-up"

log = logging.getLogger("mlx_paged.engine")


class EngineLoop:
    """An engine between two messages.

    Args:
        engine: whose answers have no texts. All its calls come from this object.
        send: takes a message to the HTTP process; must not block.
    """

    def __init__(self, engine: Engine, send: Callable[[FromEngine], None]) -> None:
        self.engine = engine
        self._send = send
        self._is_watched = False
        self._has_news = True
        self._next_beat = self._next_view = time.monotonic()

    def warm_up(self) -> None:
        """Run a prefill and a decode step once, which compiles what they need."""
        engine = self.engine
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        num_tokens = min(2 * engine.pool.block_size, engine.max_model_len - 3)
        num_tokens = min(num_tokens, engine.pool.num_blocks * engine.pool.block_size - 2)
        if num_tokens < 1:
            return
        engine.add_request("warm-up", [0] * num_tokens, params, salt=WARM_UP_SALT)
        while engine.has_work():
            engine.step()
        engine.forget_counts()

    def receive(self, message: ToEngine) -> None:
        """Take a message from the HTTP process."""
        self._has_news = True
        match message:
            case Add():
                self._add(message)
            case Abort():
                self.engine.abort(message.request_id, message.index)
            case Watch():
                self._is_watched = message.on

    def turn(self) -> None:
        """Run a step if there is work, and tell what is to be told by now.

        Raises:
            RuntimeError: a step failed, and the engine can't go on after it.
        """
        if self.engine.has_work():
            self._step()
            self._has_news = True
        now = time.monotonic()
        if self._is_watched and self._has_news and now >= self._next_view:
            self._send(pool_view(self.engine))
            self._has_news = False
            self._next_view = now + VIEW_SECONDS
        if now >= self._next_beat:
            self._send(Beat(self.engine.stats()))
            self._next_beat = now + BEAT_SECONDS

    def seconds_to_wait(self) -> float:
        """How long there is nothing to do unless a message comes."""
        if self.engine.has_work():
            return 0
        due = self._next_beat
        if self._is_watched and self._has_news:
            due = min(due, self._next_view)
        return max(0, due - time.monotonic())

    def _add(self, message: Add) -> None:
        try:
            self.engine.add_request(
                message.request_id,
                message.prompt_token_ids,
                message.params,
                priority=message.priority,
                salt=message.salt,
            )
        except ValueError as error:
            self._send(Refused(message.request_id, str(error)))
        except Exception as error:
            log.exception("a request was not taken")
            self._send(Failed(message.request_id, f"the engine met an error: {error}"))

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:
            log.exception("a step failed")
            for request_id in self.engine.recover():
                self._send(Failed(request_id, f"the engine met an error: {error}"))
            return
        if outputs:
            self._send(Tokens(self._tokens(outputs)))

    def _tokens(self, outputs: list[TokenOutput]) -> list[Token]:
        finished = {o.request_id: o.request_output for o in outputs if o.request_output}
        tokens = []
        for output in outputs:
            request_id, logprobs = output.request_id, output.logprobs
            request = finished.get(request_id) or self.engine.requests[request_id]
            tokens.append(
                Token(
                    request_id,
                    output.index,
                    output.token_id,
                    None if logprobs is None else _in_order(output.token_id, logprobs),
                    output.finish_reason,
                    request.metrics.num_cached_tokens,
                )
            )
        return tokens


def _in_order(token_id: int, logprobs: dict[int, Logprob]) -> list[tuple[int, float]]:
    """The drawn token's log-probability, then all that are known, likeliest first."""
    ranked = sorted(logprobs.items(), key=lambda item: item[1].rank)
    return [
        (token_id, logprobs[token_id].logprob),
        *((other, known.logprob) for other, known in ranked),
    ]

"""The tokens of one request, as the engine sends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mlx_paged.server.messages import Token


class RequestRefused(ValueError):
    """The request can never run; the text says why and what would."""


class RequestFailed(RuntimeError):
    """The engine met an error while the request ran."""


class EngineUnavailable(RuntimeError):
    """The engine takes no request now: it is loading, has died, or is shutting down."""


class EngineDied(EngineUnavailable):
    """The engine's process ended while the request was open."""


class QueueFull(EngineUnavailable):
    """Too many requests wait. Try again in `retry_after` seconds."""

    def __init__(self, reason: str, retry_after: int) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class TokenStream:
    """An open request. Leaving its `with` block drops what has not ended.

    Iterating gives lists of tokens, all that came since the last one, so a slow reader catches
    up. It ends after every sample's last token.

    Args:
        request_id: the request's.
        num_samples: answers that it samples.
        on_drop: called with (request id, sample's index or None) to end answers early.
        on_close: called with the request's id, once.
    """

    def __init__(
        self,
        request_id: str,
        num_samples: int,
        on_drop: Callable[[str, int | None], None],
        on_close: Callable[[str], None],
    ) -> None:
        self.request_id = request_id
        self.has_token = False
        self._running = set(range(num_samples))
        self._on_drop, self._on_close = on_drop, on_close
        self._tokens: list[Token] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._is_closed = False

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> list[Token]:
        """The tokens that came since the last time; at least one.

        Raises:
            RequestRefused, RequestFailed, EngineDied: after the tokens that came before it.
        """
        while not self._tokens:
            if self._error is not None:
                raise self._error
            if not self._running:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        tokens, self._tokens = self._tokens, []
        return tokens

    def stop_sample(self, index: int) -> None:
        """This sample's answer has ended, as with a stop string. Its other tokens are dropped."""
        if index not in self._running:
            return
        self._running.discard(index)
        self._tokens = [token for token in self._tokens if token.index != index]
        self._on_drop(self.request_id, index)
        self._close_if_over()

    def close(self) -> None:
        """Drop what has not ended."""
        if self._running and not self._is_closed:
            self._on_drop(self.request_id, None)
        self._running.clear()
        self._close_if_over()

    def put(self, token: Token) -> None:
        """A token has come."""
        if token.index not in self._running:
            return
        self.has_token = True
        self._tokens.append(token)
        if token.finish_reason is not None:
            self._running.discard(token.index)
            self._close_if_over()
        self._news.set()

    def fail(self, error: Exception) -> None:
        """No token will come any more."""
        self._error = error
        self._running.clear()
        self._close_if_over()

    def _close_if_over(self) -> None:
        if not self._running and not self._is_closed:
            self._is_closed = True
            self._on_close(self.request_id)
            self._news.set()

"""The engine as the HTTP process knows it: requests in, streams of tokens out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import msgspec

from mlx_paged.engine.params import SamplingParams
from mlx_paged.engine.stats import EngineStats
from mlx_paged.server.engine_child import EngineChild
from mlx_paged.server.messages import (
    Abort,
    Add,
    Beat,
    Died,
    Failed,
    FromEngine,
    PoolView,
    Ready,
    Refused,
    Start,
    Stop,
    ToEngine,
    Tokens,
    Watch,
)
from mlx_paged.server.token_stream import (
    EngineDied,
    EngineUnavailable,
    QueueFull,
    RequestFailed,
    RequestRefused,
    TokenStream,
)

SHUTTING_DOWN = "the server is shutting down"
# Longer than any step should take, a long prompt's chunk on a slow processor included.
STALL_SECONDS = 60.0
STOP_SECONDS = 5.0
MAX_RESTART_SECONDS = 30.0
RETRY_AFTER_SECONDS = 1

log = logging.getLogger("mlx_paged.server")


class EngineClient:
    """An engine in a process of its own, which is started again when it dies.

    Args:
        start: what the engine loads.
        max_waiting: requests that may be without a first token before `open` refuses more.

    Attributes:
        info: the engine's own description, once it has loaded.
        stats: what it did and held when it was last heard.
        num_restarts: times that its process was started again.
    """

    def __init__(self, start: Start, *, max_waiting: int = 1024) -> None:
        self.info: Ready | None = None
        self.stats: EngineStats | None = None
        self.num_restarts = 0
        self.max_waiting = max_waiting
        self._start = start
        self._child: EngineChild | None = None
        self._is_loaded = self._is_closing = False
        self._why_ended = ""
        self._last_heard = 0.0
        self._streams: dict[str, TokenStream] = {}
        self._watchers: set[LatestView] = set()
        self._supervisor: asyncio.Task[None] | None = None
        self._first_ready: asyncio.Future[Ready] | None = None

    @property
    def not_ready(self) -> str | None:
        """Why requests can't be answered now, as a sentence; None if they can."""
        if self._is_closing:
            return SHUTTING_DOWN
        if not self._is_loaded:
            return f"{self._why_ended}; it is starting again" if self.info else "the model loads"
        silence = time.monotonic() - self._last_heard
        if silence > STALL_SECONDS:
            return f"the engine has made no step for {silence:.0f} s"
        return None

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def num_waiting(self) -> int:
        """Open requests without a first token."""
        return sum(not stream.has_token for stream in self._streams.values())

    @property
    def engine_pid(self) -> int | None:
        return self._child.pid if self._child else None

    async def start(self) -> Ready:
        """Start the process and wait until it has loaded.

        Raises:
            EngineDied: it ended before that, with its reason.
        """
        self._first_ready = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise())
        return await asyncio.shield(self._first_ready)

    def refuse_new(self) -> None:
        """From now on `open` refuses, and nobody watches; requests that are open go on."""
        self._is_closing = True
        for watcher in self._watchers:
            watcher.end()

    def fail_open(self, reason: str) -> None:
        """End every open request with an error."""
        for stream in list(self._streams.values()):
            self._send(Abort(stream.request_id))
            stream.fail(EngineDied(reason))

    async def stop(self) -> None:
        """End the process, and all open requests with an error."""
        self.refuse_new()
        self.fail_open(SHUTTING_DOWN)
        self._send(Stop())
        if self._supervisor is not None:
            await asyncio.wait({self._supervisor}, timeout=STOP_SECONDS)
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        if self._first_ready is not None and not self._first_ready.done():
            self._first_ready.cancel()

    def open(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: str = "",
    ) -> TokenStream:
        """Send a request to the engine.

        Args:
            request_id: unique among the open ones.
            prompt_token_ids, params, priority, salt: as of `Engine.add_request`; without stop
                strings, since the engine's answers have no text.

        Raises:
            EngineUnavailable: the engine takes none now; `QueueFull` if too many wait.
            RequestRefused: the request can't be sent.
        """
        if self._child is None or not self._is_loaded or self._is_closing:
            raise EngineUnavailable(self.not_ready)
        if self.num_waiting >= self.max_waiting:
            raise QueueFull(
                f"{self.num_waiting} requests wait for their first token, and no more than "
                f"{self.max_waiting} may; try again later",
                RETRY_AFTER_SECONDS,
            )
        if request_id in self._streams:
            raise RequestRefused(f"a request {request_id!r} is open already")
        try:
            self._child.send(Add(request_id, prompt_token_ids, params, priority, salt))
        except OverflowError as error:
            raise RequestRefused("a number of the request has more than 64 bits") from error
        stream = TokenStream(request_id, params.num_samples, self._drop, self._forget)
        self._streams[request_id] = stream
        return stream

    @contextlib.asynccontextmanager
    async def views(self) -> AsyncIterator[LatestView]:
        """Watch the pool: views come several times a second while something changes."""
        watcher = LatestView()
        self._watchers.add(watcher)
        self._send(Watch(True))
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._send(Watch(False))

    def _drop(self, request_id: str, index: int | None) -> None:
        self._send(Abort(request_id, index))

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    def _send(self, message: ToEngine) -> None:
        if self._child is not None:
            self._child.send(message)

    async def _supervise(self) -> None:
        """Run one process after the other."""
        delay = 0.0
        while True:
            self._child = await EngineChild.spawn()
            try:
                self._child.send(self._start)
                async for message in self._child.messages():
                    self._receive(message)
            finally:
                child, self._child = self._child, None
                was_loaded, self._is_loaded = self._is_loaded, False
                await child.close()
            self._why_ended = self._why_ended or child.how_it_ended()
            if self._is_closing:
                return
            self._report_end(was_loaded)
            if self.info is None:
                return
            delay = 0.0 if was_loaded else min(MAX_RESTART_SECONDS, 2 * delay + 1)
            await asyncio.sleep(delay)
            self.num_restarts += 1

    def _report_end(self, was_loaded: bool) -> None:
        error = EngineDied(self._why_ended)
        for stream in list(self._streams.values()):
            stream.fail(error)
        if self.info is None and self._first_ready and not self._first_ready.done():
            self._first_ready.set_exception(error)
        else:
            doing = "and is started again" if was_loaded else "while it was starting again"
            log.error("%s, %s", self._why_ended, doing)

    def _receive(self, message: FromEngine) -> None:
        self._last_heard = time.monotonic()
        match message:
            case Tokens():
                for token in message.tokens:
                    if stream := self._streams.get(token.request_id):
                        stream.put(token)
            case Beat():
                self.stats = message.stats
            case PoolView():
                self.stats = message.stats
                for watcher in self._watchers:
                    watcher.put(message)
            case Refused() | Failed():
                if stream := self._streams.get(message.request_id):
                    kind = RequestRefused if isinstance(message, Refused) else RequestFailed
                    stream.fail(kind(message.reason))
            case Ready():
                self._be_ready(message)
            case Died():
                self._why_ended = message.reason

    def _be_ready(self, message: Ready) -> None:
        self.info, self._is_loaded, self._why_ended = message, True, ""
        if self._watchers:
            self._send(Watch(True))
        if self._first_ready and not self._first_ready.done():
            self._first_ready.set_result(message)
        elif self.num_restarts:
            log.warning("the engine runs again")


class LatestView:
    """Iterates over the newest views; one that was not read in time gives way to the next."""

    def __init__(self) -> None:
        self._view: PoolView | None = None
        self._has_ended = False
        self._news = asyncio.Event()

    def __aiter__(self) -> LatestView:
        return self

    async def __anext__(self) -> PoolView:
        while self._view is None:
            if self._has_ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        view, self._view = self._view, None
        return view

    def put(self, view: PoolView) -> None:
        if self._view is not None:  # its copies would be lost
            view = msgspec.structs.replace(view, copies=self._view.copies + view.copies)
        self._view = view
        self._news.set()

    def end(self) -> None:
        """No view will come any more."""
        self._has_ended = True
        self._news.set()

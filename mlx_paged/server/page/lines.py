"""The pool as lines of JSON, one stream for each watcher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Protocol

import msgspec

from mlx_paged.server.engine_client import SHUTTING_DOWN
from mlx_paged.server.messages import Message, PoolView, Ready

# A watcher gets ten views a second at most, and fewer when they are large: the tables of a pool
# of 50,000 blocks take about 300 kB.
MIN_INTERVAL = 0.1
MAX_NBYTES_PER_SECOND = 2_000_000
# Without news, a line says that the stream is alive.
ALIVE_INTERVAL = 1.0

_encoder = msgspec.json.Encoder()


class PoolClient(Protocol):
    """What the page needs of the engine's client."""

    @property
    def info(self) -> Ready | None: ...

    @property
    def not_ready(self) -> str | None: ...

    def views(self) -> AbstractAsyncContextManager[AsyncIterator[PoolView]]:
        """An iterator over the newest views, which may be left while it waits for one."""
        ...


class About(Message):
    """The engine whose pool follows; `model_name` is what the API calls its model."""

    model_name: str
    engine: Ready


class NotReady(Message):
    """Why there is nothing to see just now, as a sentence."""

    reason: str


class Alive(Message):
    """Nothing has changed."""


async def pool_lines(client: PoolClient, model_name: str) -> AsyncGenerator[bytes, None]:
    """`About`, then each `PoolView` that differs from the one before, as lines of JSON.

    `NotReady` tells why the engine makes no progress, and `About` comes again when it does. A
    watcher that reads slowly misses views. Ends when the server shuts down.
    """
    while (reason := _why_not(client)) is not None:
        yield _line(NotReady(reason))
        if client.not_ready == SHUTTING_DOWN:
            return
        await asyncio.sleep(ALIVE_INTERVAL)
    async with client.views() as views, aclosing(_lines(client, model_name, views)) as lines:
        async for line in lines:
            yield line


async def _lines(
    client: PoolClient, model_name: str, views: AsyncIterator[PoolView]
) -> AsyncGenerator[bytes, None]:
    known: Ready | None = None
    last = b""
    while True:
        if (reason := _why_not(client)) is not None:
            known = None
            yield _line(NotReady(reason))
        elif known is None and (known := client.info) is not None:
            yield _line(About(model_name, known))
        try:
            view = await asyncio.wait_for(anext(views), ALIVE_INTERVAL)
        except asyncio.TimeoutError:
            yield _line(Alive())
        except StopAsyncIteration:
            return
        else:
            line = _line(view)
            if view.copies or line != last:
                yield line
            last = line
            await asyncio.sleep(max(MIN_INTERVAL, len(line) / MAX_NBYTES_PER_SECOND))


def _why_not(client: PoolClient) -> str | None:
    """Why the engine makes no progress, as a sentence; None if it does."""
    reason = client.not_ready or (None if client.info else "the model loads")
    return None if reason is None else f"{reason[:1].upper()}{reason[1:]}."


def _line(message: Message) -> bytes:
    return _encoder.encode(message) + b"\n"

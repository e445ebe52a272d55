"""Several streams of tokens as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

from mlx_paged.server.messages import Token

if TYPE_CHECKING:
    from mlx_paged.server.token_stream import TokenStream


async def merged(streams: Sequence[TokenStream]) -> AsyncGenerator[tuple[int, list[Token]], None]:
    """Tokens of several streams as they come, each with its stream's index."""
    if len(streams) == 1:
        async for tokens in streams[0]:
            yield 0, tokens
        return
    queue: asyncio.Queue[tuple[int, list[Token]] | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()


async def _pump(
    index: int,
    stream: TokenStream,
    queue: asyncio.Queue[tuple[int, list[Token]] | Exception | None],
) -> None:
    try:
        async for tokens in stream:
            queue.put_nowait((index, tokens))
        queue.put_nowait(None)
    except Exception as error:
        queue.put_nowait(error)

"""Server-sent events."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator

from pydantic import BaseModel
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from mlx_paged.server.api.disconnect import unless_client_leaves
from mlx_paged.server.api.errors import ApiError

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends events as they come, and closes their source when the client leaves.

    An error before the first event is raised. After that it is sent as an event, and the stream
    ends without its [DONE].
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[BaseModel, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_client_leaves(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            first = await anext(events)
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            await _send_part(send, event(first))
            last = DONE
            try:
                async for chunk in events:
                    await _send_part(send, event(chunk))
            except ApiError as error:
                last = error_event(error)
            except Exception:
                logger.exception("a stream failed")
                last = error_event(ApiError(500, "The server made a mistake."))
            await _send_part(send, last, more=False)


def event(chunk: BaseModel) -> bytes:
    return b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n"


def error_event(error: ApiError) -> bytes:
    return b"data: " + bytes(JSONResponse(error.body()).body) + b"\n\n"


async def _send_part(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})

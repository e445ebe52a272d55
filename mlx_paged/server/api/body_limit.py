"""The bound on a request's body."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_paged.server.api.errors import ApiError

# Of what is too much, so much is read and thrown away: a client that still writes when the
# connection is closed doesn't get to see the answer.
DRAINED_NBYTES = 64 * 2**20


class BodyLimit:
    """Refuses bodies above a number of bytes, announced or in chunks."""

    def __init__(self, app: ASGIApp, max_nbytes: int) -> None:
        self.app, self.max_nbytes = app, max_nbytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > self.max_nbytes:
            await _drain(receive)
            await self._too_large().response()(scope, receive, send)
            return
        num_received = 0

        async def receive_some() -> Message:
            nonlocal num_received
            message = await receive()
            if message["type"] == "http.request":
                num_received += len(message.get("body", b""))
                if num_received > self.max_nbytes:
                    if message.get("more_body"):
                        await _drain(receive)
                    raise self._too_large()
            return message

        await self.app(scope, receive_some, send)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"The body has more than the {self.max_nbytes} bytes that this server takes.",
            code="request_too_large",
        )


async def _drain(receive: Receive) -> None:
    num_drained = 0
    while num_drained < DRAINED_NBYTES:
        message = await receive()
        num_drained += len(message.get("body", b""))
        if not message.get("more_body"):
            return

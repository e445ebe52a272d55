"""The names by which the server may be called."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_paged.server.api.errors import ApiError

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class Hosts:
    """Refuses requests whose Host header names somebody else.

    A web page can let its own name point to this machine, and then call the server as its own
    without asking the browser. Its requests still carry that name.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self.app, self._names = app, frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_meant(Headers(scope=scope).get("host", "")):
            message = (
                "The Host header names none of this server's names; "
                "start it with --allowed-host to add one."
            )
            error = ApiError(403, message, code="unknown_host")
            await error.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_meant(self, host: str) -> bool:
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        return not host or name.lower() in self._names

"""The last resort for exceptions, and the count of what was answered."""

from __future__ import annotations

import logging

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_paged.server.api.disconnect import ClientLeft
from mlx_paged.server.api.errors import ApiError
from mlx_paged.server.api.metrics import Metrics

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499


class Guard:
    """Answers a mistake of ours with status 500, logs it, and counts all requests."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status: int | None = None

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, note_status)
        except (ClientLeft, ClientDisconnect):  # the latter while its body came
            status = CLIENT_LEFT
        except Exception:
            request_id = scope["state"]["request_id"]
            logger.exception("%s %s failed [%s]", scope["method"], scope["path"], request_id)
            if status is not None:
                raise  # too late to answer; the server closes the connection
            message = f"The server made a mistake; its log has more about {request_id}."
            await ApiError(500, message).response()(scope, receive, note_status)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.http_requests.labels(_method(scope), route, str(status)).inc()


def _method(scope: Scope) -> str:
    """Of the well-known ones, so that clients can't make up labels."""
    known = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
    return scope["method"] if scope["method"] in known else "other"

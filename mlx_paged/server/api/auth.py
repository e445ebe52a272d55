"""The API key."""

from __future__ import annotations

import hmac
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_paged.server.api.errors import ApiError


class ApiKey:
    """Lets through those that send the key as `Authorization: Bearer ...`.

    Args:
        key: the key.
        open_paths: paths for which none is needed; one that ends in "/*" opens all below it.
    """

    def __init__(self, app: ASGIApp, key: str, open_paths: Collection[str]) -> None:
        self.app = app
        self._key = key.encode()
        self._open = {path for path in open_paths if not path.endswith("/*")}
        self._open_folders = tuple(path[:-1] for path in open_paths if path.endswith("/*"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_open(scope["path"]) and not self._has(scope):
            error = ApiError(
                401,
                "The API key is missing or wrong; send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in self._open or path.startswith(self._open_folders)

    def _has(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = key.strip().encode("utf-8", "replace")
        return hmac.compare_digest(given, self._key) and scheme.lower() == "bearer"

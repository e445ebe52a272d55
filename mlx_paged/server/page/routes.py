"""What the pool page asks of the server: itself, and the pool as it changes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from hmac import compare_digest
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, HTTPException, Response
from fastapi.responses import StreamingResponse
from starlette.types import Send

from mlx_paged.server.page.files import page_files
from mlx_paged.server.page.lines import PoolClient, pool_lines

# The page loads nothing from elsewhere and runs no text as code.
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'; require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def router(
    client: PoolClient, settings: Any, authorize: Callable[..., Any] | None = None
) -> APIRouter:
    """The page at `/`, its files under `/page/`, and `/pool`, a stream of JSON lines.

    None of them is part of the API's description.

    Args:
        client: gives the views of the pool.
        settings: `model_name`, by which the API calls the model, and `api_key`.
        authorize: a dependency that refuses a request for `/pool` without the right key; by
            default, one that wants `settings.api_key` as bearer token if there is one. The page
            and its files need no key, since a browser can't send it with them.
    """
    routes = APIRouter(include_in_schema=False)
    key_check = Depends(authorize or bearer_key(settings.api_key))

    async def index(if_none_match: Annotated[str | None, Header()] = None) -> Response:
        return _file("index.html", if_none_match)

    async def file(name: str, if_none_match: Annotated[str | None, Header()] = None) -> Response:
        return _file(name, if_none_match)

    async def pool() -> Response:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **SECURITY_HEADERS}
        lines = pool_lines(client, settings.model_name)
        return LinesResponse(lines, media_type="application/x-ndjson", headers=headers)

    routes.add_api_route("/", index, methods=["GET", "HEAD"])
    routes.add_api_route("/page/{name}", file, methods=["GET", "HEAD"])
    routes.add_api_route("/pool", pool, methods=["GET"], dependencies=[key_check])
    return routes


def bearer_key(api_key: str | None) -> Callable[..., None]:
    """A dependency that raises 401 unless the request carries the key. None lets all pass."""

    def check(authorization: Annotated[str | None, Header()] = None) -> None:
        if api_key is None:
            return
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not compare_digest(
            given.strip().encode(), api_key.encode()
        ):
            raise HTTPException(
                401,
                "The server needs its API key, as 'Authorization: Bearer KEY'.",
                {"WWW-Authenticate": "Bearer"},
            )

    return check


class LinesResponse(StreamingResponse):
    """A stream whose source is closed as soon as the reader leaves."""

    body_iterator: AsyncGenerator[bytes, None]

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.body_iterator):
            await super().stream_response(send)


def _file(name: str, known_etag: str | None) -> Response:
    if (file := page_files().get(name)) is None:
        raise HTTPException(404, f"The page has no file {name!r}.")
    headers = {"Cache-Control": "no-cache", "ETag": file.etag, **SECURITY_HEADERS}
    if known_etag == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)

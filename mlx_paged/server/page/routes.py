"""What the pool page asks of the server: itself, and the pool as it changes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Protocol

from fastapi import APIRouter, Header, HTTPException, Response
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


class Settings(Protocol):
    """What the page needs of the server's settings."""

    @property
    def model_name(self) -> str: ...


def router(client: PoolClient, settings: Settings) -> APIRouter:
    """The page at `/`, its files under `/page/`, and `/pool`, a stream of JSON lines.

    None of them is part of the API's description. Keys are the application's concern: `/` and
    `/page/*` must be open, since a browser can't send a key with them, and `/pool` may want one.

    Args:
        client: gives the views of the pool.
        settings: `model_name`, by which the API calls the model.
    """
    routes = APIRouter(include_in_schema=False)

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
    routes.add_api_route("/pool", pool, methods=["GET"])
    return routes


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

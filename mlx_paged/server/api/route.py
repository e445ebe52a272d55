"""How routes read JSON, and what they may answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from mlx_paged.server.api.context import Context
from mlx_paged.server.api.disconnect import unless_client_leaves
from mlx_paged.server.api.errors import ApiError, ErrorBody, invalid
from mlx_paged.server.api.event_stream import EventStream
from mlx_paged.server.api.fields import SamplingFields

Fields = TypeVar("Fields", bound=SamplingFields)

# Parsing takes about a millisecond for this many bytes.
LONG = 2**18

_ERRORS = {
    400: "The request can't be served as it is.",
    401: "The API key is missing or wrong.",
    403: "The Host header names another server.",
    404: "There is no such model or route.",
    405: "The route doesn't know this method.",
    413: "The body is too large.",
    415: "The body is not sent as application/json.",
    500: "The server or the model failed.",
    503: "The engine is busy or not running; Retry-After says when to come back.",
    504: "The answer took too long.",
}
ErrorResponses = dict[int | str, dict[str, Any]]


def error_responses(*statuses: int) -> ErrorResponses:
    """These statuses in the OpenAPI document."""
    return {status: {"model": ErrorBody, "description": _ERRORS[status]} for status in statuses}


def generates(chunk: type[BaseModel]) -> ErrorResponses:
    """What a route that generates text answers, besides its whole answer.

    Args:
        chunk: what the events of a stream hold. It must be among the document's schemas.
    """
    part = {
        "contentMediaType": "application/json",
        "contentSchema": {"$ref": f"#/components/schemas/{chunk.__name__}"},
    }
    event = {
        "type": "object",
        "properties": {
            "data": {
                "type": "string",
                "description": "A chunk as JSON, or `[DONE]` as the last.",
                "anyOf": [part, {"const": "[DONE]"}],
            }
        },
        "required": ["data"],
    }
    return {
        200: {
            "description": "The answer; with `stream`, its parts as server-sent events.",
            "content": {"text/event-stream": {"schema": event}},
        },
        **error_responses(400, 401, 403, 404, 413, 415, 500, 503, 504),
    }


class JsonRequest(Request):
    """Reads its body as strict JSON: valid UTF-8, finite numbers, nested 200 deep at most."""

    async def json(self) -> Any:
        if not hasattr(self, "_read"):
            self._read = await self._parse(await self.body())
        return self._read

    async def _parse(self, body: bytes) -> Any:
        try:
            if len(body) > LONG:
                return await run_in_threadpool(from_json, body, allow_inf_nan=False)
            return from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise invalid(f"The body is not valid JSON: {error}.") from error


class JsonRoute(APIRoute):
    """A route that takes JSON alone.

    Browsers send it across origins only if the server allows them to, unlike text or forms.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise ApiError(
                    415,
                    "Send the body as JSON, with the header Content-Type: application/json"
                    + (f", not {kind}." if kind else "."),
                )
            json_request = JsonRequest(request.scope, request.receive)
            if await json_request.body():
                await json_request.json()  # FastAPI would hide what is wrong with it
            return await handle(json_request)

        return handle_json


async def respond(
    request: Request,
    context: Context,
    body: Fields,
    stream: Callable[[Context, Fields], AsyncGenerator[BaseModel, None]],
    answer: Callable[[Context, Fields], Coroutine[Any, Any, Response]],
) -> Response:
    """What `stream` or `answer` makes of a body, for as long as its client waits."""
    context.check_model(body.model)
    if body.stream:
        return EventStream(stream(context, body))
    return await unless_client_leaves(request.receive, answer(context, body))

"""Turns every exception into an error of OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from mlx_paged.server.api.errors import ENGINE_ERRORS, ApiError, from_engine, invalid


def install(app: FastAPI) -> None:
    """Handle the exceptions that routes raise. Others are left to `Guard`."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    for kind in ENGINE_ERRORS:
        app.add_exception_handler(kind, _engine_error)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _engine_error(request: Request, error: Exception) -> Response:
    return from_engine(error).response()


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return from_validation(error.errors()).response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"There is no {request.url.path} on this server."
    elif error.status_code == 405:
        message = f"{request.url.path} doesn't know the method {request.method}."
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    return ApiError(error.status_code, message, code=code, headers=error.headers).response()


def from_validation(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's complaints."""
    first = errors[0]
    location = _location(first["loc"])
    if first["type"] == "refused":
        context = first["ctx"]
        param = context["param"] or location or None
        return invalid(_sentence(context["message"]), param)
    if first["type"] == "extra_forbidden":
        return invalid(f"Unrecognized request argument supplied: {location}", location)
    if first["type"] == "missing":
        if not location:
            return invalid("The request has no body; send a JSON object.")
        return invalid(f"Missing required parameter: '{location}'.", location)
    if not location:
        return invalid("The body must be a JSON object.")
    return invalid(f"Invalid value for '{location}': {_sentence(first['msg'])}", location)


def _location(path: Sequence[Any]) -> str:
    """Such as messages[0].content, without the tags by which pydantic tells models apart."""
    text, path = "", path[1:]
    for i, step in enumerate(path):
        if step == "[key]":
            break
        if isinstance(step, int):
            text += f"[{step}]"
        elif not _is_tag(path, i):
            text += f".{step}" if text else str(step)
    return text


def _is_tag(path: Sequence[Any], i: int) -> bool:
    if i == 2 and path[0] == "messages":
        return True
    return i == 1 and path[0] in ("response_format", "tool_choice")


def _sentence(text: str) -> str:
    text = text[:1].lower() + text[1:] if text.startswith("Input ") else text
    return text if text.endswith((".", "?")) else f"{text}."

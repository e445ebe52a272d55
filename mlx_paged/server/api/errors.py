"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from mlx_paged.server.token_stream import (
    EngineUnavailable,
    QueueFull,
    RequestFailed,
    RequestRefused,
)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
ENGINE_ERRORS = (EngineUnavailable, RequestRefused, RequestFailed)
# Seconds until an engine that died is likely to be up again.
RESTART_SECONDS = 5


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str = Field(description="A sentence for people.")
    type: str = Field(description="The error's class.", examples=[INVALID_REQUEST])
    param: str | None = Field(default=None, description="The field at fault.")
    code: str | None = Field(default=None, description="A word for programs.")


class ErrorBody(BaseModel):
    """The body of every answer with a status of 400 and above."""

    error: ErrorDetail


class ApiError(Exception):
    """An error for the client, with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type or (INVALID_REQUEST if status < 500 else SERVER_ERROR)
        self.message, self.param, self.code = message, param, code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        detail = ErrorDetail(
            message=printable(self.message),
            type=self.type,
            param=None if self.param is None else printable(self.param),
            code=self.code,
        )
        return ErrorBody(error=detail).model_dump()

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that the client must change."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, seconds: int = RESTART_SECONDS) -> ApiError:
    """A request that may succeed if it is sent again after some seconds."""
    headers = {"Retry-After": str(seconds)}
    return ApiError(503, message, code="unavailable", headers=headers)


def model_not_found(model: str, served: str) -> ApiError:
    message = f"The model {model!r} does not exist; this server has {served!r}."
    return ApiError(404, message, param="model", code="model_not_found")


def from_engine(error: Exception) -> ApiError:
    """One of `ENGINE_ERRORS` as the client's error."""
    if isinstance(error, RequestRefused):
        return invalid(str(error))
    if isinstance(error, QueueFull):
        return unavailable(str(error), error.retry_after)
    if isinstance(error, EngineUnavailable):
        return unavailable(str(error))
    return ApiError(500, str(error), code="engine_error")


def printable(text: str, limit: int = 1000) -> str:
    """Text that is valid in UTF-8, and not too long for a message."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= limit else f"{text[:limit]} ..."

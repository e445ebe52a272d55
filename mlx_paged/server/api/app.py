"""The HTTP application."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware

from mlx_paged.server import page
from mlx_paged.server.api import chat, completions, handlers, service
from mlx_paged.server.api.auth import ApiKey
from mlx_paged.server.api.body_limit import BodyLimit
from mlx_paged.server.api.context import Context
from mlx_paged.server.api.guard import Guard
from mlx_paged.server.api.hosts import Hosts
from mlx_paged.server.api.metrics import Metrics
from mlx_paged.server.api.request_id import HEADER, RequestIds
from mlx_paged.server.api.responses import ChatChunk
from mlx_paged.server.api.settings import ServerSettings
from mlx_paged.server.api.vocabulary import Vocabulary

if TYPE_CHECKING:
    from mlx_paged.server.engine_client import EngineClient

# What needs no API key: whether the server lives, and the page, which asks for the key.
OPEN_PATHS = ("/", "/health", "/ready", "/page/*")
DESCRIPTION = "OpenAI's API on a paged KV cache. Unknown fields are refused."


def create_app(client: EngineClient, tokenizer: Any, settings: ServerSettings) -> FastAPI:
    """The server's routes around an engine's client, which the caller starts and stops.

    Args:
        tokenizer: mlx-lm's, of the model that the engine runs.
    """
    context = Context(client, tokenizer, settings, Metrics(client), Vocabulary(tokenizer))
    app = FastAPI(
        title="mlx-paged",
        version=version("mlx-paged"),
        description=DESCRIPTION,
        docs_url=None,  # they load scripts from other hosts
        redoc_url=None,
    )
    for routes in (chat, completions, service):
        app.include_router(routes.router(context))
    app.include_router(page.router(client, settings))
    handlers.install(app)
    _add_middleware(app, context)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _add_middleware(app: FastAPI, context: Context) -> None:
    """Innermost first."""
    settings = context.settings
    app.add_middleware(BodyLimit, max_nbytes=settings.max_body_nbytes)
    if settings.api_key is not None:
        app.add_middleware(ApiKey, key=settings.api_key, open_paths=OPEN_PATHS)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", HEADER],
            expose_headers=[HEADER],
        )
    if settings.allowed_hosts:
        app.add_middleware(Hosts, names=settings.allowed_hosts)
    app.add_middleware(Guard, metrics=context.metrics)
    app.add_middleware(RequestIds)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, with the API key, and without the status 422 that is never sent."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        components = document["components"]
        components["securitySchemes"] = {"ApiKey": {"type": "http", "scheme": "bearer"}}
        components["schemas"] |= _schemas(ChatChunk)
        for name in ("HTTPValidationError", "ValidationError"):
            components["schemas"].pop(name, None)
        for path, operations in document["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                if path not in OPEN_PATHS:
                    operation["security"] = [{"ApiKey": []}, {}]
        app.openapi_schema = document
    return app.openapi_schema


def _schemas(model: type[BaseModel]) -> dict[str, Any]:
    """A model that no route names, and what it consists of, for the document's components."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    return {**schema.pop("$defs", {}), model.__name__: schema}

"""The routes that tell about the server: its models, its health, its counts."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from mlx_paged.server.api.context import Context
from mlx_paged.server.api.errors import model_not_found, unavailable
from mlx_paged.server.api.responses import Health, ModelCard, ModelList
from mlx_paged.server.api.route import error_responses


def router(context: Context) -> APIRouter:
    """/v1/models, /health, /ready and /metrics."""
    routes = APIRouter()

    @routes.get(
        "/v1/models", tags=["OpenAI"], responses=error_responses(401, 403), summary="List models"
    )
    async def list_models() -> ModelList:
        return ModelList(data=[_card(context)])

    @routes.get(
        "/v1/models/{model:path}",
        tags=["OpenAI"],
        responses=error_responses(401, 403, 404),
        summary="Describe a model",
    )
    async def describe_model(model: str) -> ModelCard:
        if not context.settings.serves(model):
            raise model_not_found(model, context.settings.model_name)
        return _card(context)

    @routes.get("/health", tags=["Service"], summary="Whether the server is alive")
    async def health() -> Health:
        return Health()

    @routes.get(
        "/ready",
        tags=["Service"],
        responses=error_responses(403, 503),
        summary="Whether the engine makes progress",
    )
    async def ready() -> Health:
        if context.client.not_ready is not None:
            raise unavailable(context.client.not_ready)
        return Health()

    @routes.get(
        "/metrics",
        tags=["Service"],
        response_class=Response,
        responses={
            200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
            **error_responses(401, 403),
        },
        summary="Counts for Prometheus",
    )
    async def metrics() -> Response:
        return Response(context.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return routes


def _card(context: Context) -> ModelCard:
    info, settings = context.client.info, context.settings
    return ModelCard(
        id=settings.model_name,
        created=settings.created,
        max_model_len=None if info is None else info.max_model_len,
    )

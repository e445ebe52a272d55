"""What all answers of one request have in common."""

from __future__ import annotations

import time
from typing import Any, cast

from pydantic import BaseModel
from starlette.responses import Response

from mlx_paged.server.api.context import Context
from mlx_paged.server.api.generation import Generation
from mlx_paged.server.api.responses import FinishReason, PromptTokensDetails, Usage


class Reply:
    """The id, time, model and usage of a request's answers."""

    def __init__(self, context: Context, generation: Generation) -> None:
        self.id = generation.order.request_id
        self.created = int(time.time())
        self.model = context.settings.model_name
        self._generation = generation

    def head(self) -> dict[str, Any]:
        """The fields with which every answer and chunk begins."""
        return {"id": self.id, "created": self.created, "model": self.model}

    def chunk_head(self, includes_usage: bool) -> dict[str, Any]:
        """The same for a chunk; if the last one has the usage, the others have a null there."""
        return {**self.head(), "usage": None} if includes_usage else self.head()

    def usage(self) -> Usage:
        """Tokens so far; of all samples, those that best_of drops included."""
        num_prompt = self._generation.num_prompt_tokens
        num_completion = self._generation.num_completion_tokens
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_completion,
            total_tokens=num_prompt + num_completion,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=self._generation.num_cached_tokens
            ),
        )

    @staticmethod
    def response(body: BaseModel) -> Response:
        """As JSON, with the fields that were given, nulls included."""
        return Response(body.model_dump_json(exclude_unset=True), media_type="application/json")


def finish_reason(reason: str | None) -> FinishReason:
    """A reason that clients may see; the others have become errors by then."""
    assert reason in ("stop", "length", "tool_calls"), reason
    return cast(FinishReason, reason)

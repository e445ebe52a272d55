"""What every route works with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_paged.server.api.errors import model_not_found
from mlx_paged.server.api.metrics import Metrics
from mlx_paged.server.api.settings import ServerSettings
from mlx_paged.server.api.vocabulary import Vocabulary

if TYPE_CHECKING:
    from mlx_paged.server.engine_client import EngineClient


@dataclass(frozen=True)
class Context:
    """The engine's client, the model's tokenizer (mlx-lm's), and what belongs to them."""

    client: EngineClient
    tokenizer: Any
    settings: ServerSettings
    metrics: Metrics
    vocabulary: Vocabulary

    def check_model(self, model: str | None) -> None:
        """Raises ApiError for a model that isn't served."""
        if model is not None and not self.settings.serves(model):
            raise model_not_found(model, self.settings.model_name)

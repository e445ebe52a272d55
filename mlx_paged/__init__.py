"""A paged KV cache and paged attention for MLX."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_paged.llm import (
        LLM,
        BeamSearchParams,
        CompletionOutput,
        RequestOutput,
        SamplingParams,
    )

__all__ = ["LLM", "BeamSearchParams", "CompletionOutput", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> object:
    """Load public names on first use: `mlx_paged.blocks` must not need mlx."""
    if name in __all__:
        from mlx_paged import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'mlx_paged' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

"""A paged KV cache and paged attention for MLX."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_paged.blocks import BlockPool, OutOfBlocks, Sequence
    from mlx_paged.cache import KVPool, make_paged_prompt_cache, step
    from mlx_paged.llm import (
        LLM,
        BeamSearchParams,
        CompletionOutput,
        RequestOutput,
        SamplingParams,
    )
    from mlx_paged.loader import load

__all__ = [
    "LLM",
    "BeamSearchParams",
    "BlockPool",
    "CompletionOutput",
    "KVPool",
    "OutOfBlocks",
    "RequestOutput",
    "SamplingParams",
    "Sequence",
    "load",
    "make_paged_prompt_cache",
    "step",
]

_MODULES = {
    **dict.fromkeys(("BlockPool", "OutOfBlocks", "Sequence"), "mlx_paged.blocks"),
    **dict.fromkeys(("KVPool", "make_paged_prompt_cache", "step"), "mlx_paged.cache"),
    "load": "mlx_paged.loader",
}


def __getattr__(name: str) -> object:
    """Load public names on first use: `mlx_paged.blocks` must not need mlx."""
    if name in __all__:
        return getattr(import_module(_MODULES.get(name, "mlx_paged.llm")), name)
    raise AttributeError(f"module 'mlx_paged' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

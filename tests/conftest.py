"""Fixtures of general use. Nothing here or in the tests reaches a model hub."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
# On some GPUs MLX would otherwise multiply float32 matrices in a shorter format.
os.environ["MLX_ENABLE_TF32"] = "0"

from pathlib import Path

import pytest


def _demo_path(name: str) -> Path:
    from mlx_paged.weights.demo import demo_path
    from mlx_paged.weights.errors import ModelError

    try:
        return demo_path(name)
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The converted demo checkpoint, from the user's cache; model_type llama."""
    return _demo_path("smollm2")


@pytest.fixture(scope="session")
def smollm2_qwen2_path() -> Path:
    """The same network as a Qwen2 checkpoint."""
    return _demo_path("smollm2-qwen2")


@pytest.fixture(scope="session")
def smollm2(smollm2_path):
    """The demo model as `load` gives it by default (float32 on a CPU). Don't change it."""
    from mlx_paged.loader import load

    return load(smollm2_path)

"""A model's folder with its weights as this library would compute with them on this device."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlx.core as mx

from mlx_paged.loader import load, resolve
from mlx_paged.weights.precision import parameters_of

QUANTIZATION_KEYS = ("quantization", "quantization_config")


def servable(model: str, folder: Path) -> Path:
    """A folder that any MLX server loads in the same precision.

    On a GPU the model's own. On a CPU float32 weights are written to `folder`, dequantised: MLX's
    half-precision and quantised matmuls are many times slower there.
    """
    if mx.default_device().type == mx.DeviceType.gpu:
        return resolve(model)
    from mlx_lm.utils import save_config

    loaded = load(model)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array
        for name, array in parameters_of(loaded.model).items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = {key: value for key, value in loaded.config.items() if key not in QUANTIZATION_KEYS}
    save_config({**config, "torch_dtype": "float32"}, folder / "config.json")
    for file in loaded.path.iterdir():
        is_other = file.suffix in (".json", ".jinja", ".model", ".txt")
        if is_other and "safetensors" not in file.name and file.name != "config.json":
            shutil.copy(file, folder)
    return folder

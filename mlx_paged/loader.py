"""Loads a model: mlx-lm's loader and tokenizers, with the models of this library."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_paged.weights import DTYPES, demo
from mlx_paged.weights.config import model_classes, read_config
from mlx_paged.weights.errors import ModelError, NotHereYet
from mlx_paged.weights.files import check_weight_files
from mlx_paged.weights.precision import (
    FLOAT_DTYPES,
    Precision,
    cast,
    dequantize,
    nbytes_in,
    parameters_of,
)

__all__ = ["DTYPES", "Loaded", "ModelError", "Plan", "load", "load_tokenizer", "plan", "resolve"]

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")


@dataclass(frozen=True)
class Loaded:
    """A model in memory with what belongs to it.

    `tokenizer` is an mlx_lm TokenizerWrapper. `stored` is the precision in the files, and
    `precision` the one in memory; the KV cache takes `dtype`.
    """

    name: str
    path: Path
    model: nn.Module
    tokenizer: Any
    config: dict[str, Any]
    precision: Precision
    stored: Precision

    @property
    def dtype(self) -> mx.Dtype:
        return self.precision.dtype

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in parameters_of(self.model).values())

    @property
    def description(self) -> str:
        """One line on what was loaded and in what precision."""
        line = f"{self.name}: {self.config['model_type']}, {self.precision}"
        return line if self.precision == self.stored else f"{line} (stored: {self.stored})"


@dataclass(frozen=True)
class Plan:
    """What loading a model would do and take; no weight has been read."""

    path: Path
    model: nn.Module
    config: dict[str, Any]
    precision: Precision
    stored: Precision

    @property
    def nbytes(self) -> int:
        """Memory for the weights."""
        return nbytes_in(self.model, self.precision)


def load(model: str | Path = "smollm2", dtype: str | None = None) -> Loaded:
    """Loads a model with its tokenizer.

    Args:
        model: a demo name ("smollm2", "smollm2-qwen2"), a folder that mlx_lm.convert wrote, or
            a hub id ("mlx-community/Qwen2.5-0.5B-Instruct-4bit").
        dtype: "auto" or None: on a GPU as stored, on a CPU dequantised to float32, since MLX's
            half-precision and quantised matmuls are many times slower there. "stored": as
            stored everywhere. "float32", "float16", "bfloat16": cast to it; quantised weights
            stay quantised on a GPU and are dequantised on a CPU.

    Raises:
        ModelError: (a ValueError) a sentence on what is wrong and what to do.
    """
    planned = plan(model, dtype)
    _check_tokenizer_files(planned.path)
    try:
        _set_precision(planned.model, planned.stored, planned.precision)
    except RuntimeError as error:
        raise ModelError(
            f"the weights in {planned.path} can't be loaded: {_one_line(error)}"
        ) from error
    return Loaded(
        name=str(model),
        path=planned.path,
        model=planned.model,
        tokenizer=_load_tokenizer(planned.path, planned.config),
        config=planned.config,
        precision=Precision.of(planned.model),
        stored=planned.stored,
    )


def load_tokenizer(model: str | Path = "smollm2") -> Any:
    """A model's tokenizer alone, an mlx_lm TokenizerWrapper.

    Raises:
        ModelError: (a ValueError) a sentence on what is wrong and what to do.
    """
    path = resolve(model)
    config = read_config(path)
    _check_tokenizer_files(path)
    return _load_tokenizer(path, config)


def plan(model: str | Path = "smollm2", dtype: str | None = None, download: bool = True) -> Plan:
    """Checks a model's files and decides on its precision, as `load` does, but reads no weights.

    Without `download`, what would first have to be downloaded or converted raises NotHereYet.
    """
    from mlx_lm.utils import load_model

    if dtype is not None and dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
    path = resolve(model, download)
    read_config(path)
    check_weight_files(path)
    try:
        module, config = load_model(path, lazy=True, get_model_classes=model_classes)
    except (ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"the weights in {path} can't be loaded: {_one_line(error)}") from error
    stored = Precision.of(module)
    return Plan(path, module, config, _precision(stored, dtype or "auto"), stored)


def resolve(model: str | Path, download: bool = True) -> Path:
    """The checkpoint folder of a demo name, a folder or a hub id.

    With `download`, a hub model is fetched and a demo model converted where they are not yet.
    """
    name = str(model)
    if name in demo.MODEL_TYPES:
        return demo.demo_path(name, convert=download)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"{name} is a file; give the folder that holds config.json")
    if not HUB_ID.fullmatch(name):
        raise ModelError(
            f"there is no folder {name}; give a folder written by mlx_lm.convert, a hub id "
            f"(owner/name), or one of {', '.join(demo.MODEL_TYPES)}"
        )
    return _hub_snapshot(name, download)


def _hub_snapshot(hub_id: str, download: bool) -> Path:
    """The folder of a hub model; its configuration first, so that no unsupported one is fetched."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    try:
        config_file = hf_hub_download(hub_id, "config.json", local_files_only=not download)
        read_config(Path(config_file).parent)
        folder = snapshot_download(
            hub_id, allow_patterns=DEFAULT_ALLOW_PATTERNS, local_files_only=not download
        )
        return Path(folder)
    except ModelError:
        raise
    except FileNotFoundError as error:
        if not download:
            raise NotHereYet(f"{hub_id} is not downloaded yet") from error
        raise _not_on_hub(hub_id, error) from error
    except Exception as error:  # the hub client has dozens of types, some of its HTTP library's
        raise _not_on_hub(hub_id, error) from error


def _not_on_hub(hub_id: str, error: Exception) -> ModelError:
    return ModelError(
        f"there is no folder {hub_id}, and the hub did not give a model of that name: "
        f"{_one_line(error)} (for text without a hub: smollm2)"
    )


def uses_gpu() -> bool:
    """Whether MLX computes on a GPU (Metal or CUDA) by default."""
    return mx.default_device().type == mx.DeviceType.gpu


def _precision(stored: Precision, dtype: str) -> Precision:
    """What `dtype` means for a checkpoint stored like that, on this device."""
    if dtype == "stored" or (dtype == "auto" and uses_gpu()):
        return stored
    target = FLOAT_DTYPES["float32" if dtype == "auto" else dtype]
    return Precision(target, stored.quantization if uses_gpu() else ())


def _set_precision(model: nn.Module, stored: Precision, precision: Precision) -> None:
    """Brings lazily loaded weights into memory in `precision`, one after the other."""
    if stored.quantization and not precision.quantization:
        dequantize(model, precision.dtype)
    if precision == stored:
        mx.eval(model.parameters())
    else:
        cast(model, precision.dtype)


def _check_tokenizer_files(path: Path) -> None:
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"there is no tokenizer in {path} ({', '.join(TOKENIZER_FILES)}); "
            "copy tokenizer.json and tokenizer_config.json from the original model"
        )


def _load_tokenizer(path: Path, config: dict[str, Any]) -> Any:
    from mlx_lm.utils import load_tokenizer

    try:
        return load_tokenizer(path, eos_token_ids=config.get("eos_token_id"))
    except Exception as error:  # transformers raises whatever its parsers meet
        raise ModelError(f"the tokenizer in {path} can't be read: {_one_line(error)}") from error


def _one_line(error: Exception, limit: int = 400) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else f"{text[:limit]} ..."

"""config.json: read, and checked before any weight is touched."""

from __future__ import annotations

import dataclasses
import importlib
import types
import typing
from pathlib import Path
from typing import Any

from mlx_paged.weights.errors import ModelError

SUPPORTED_MODEL_TYPES = ("qwen2", "llama")

POSITIVE_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "head_dim",
)


def model_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """(Model, ModelArgs) of ours for a configuration whose model_type is supported."""
    module = importlib.import_module(f"mlx_paged.models.{config['model_type']}")
    return module.Model, module.ModelArgs


def read_config(path: Path) -> dict[str, Any]:
    """The checked configuration of the checkpoint folder `path`, as mlx-lm reads it.

    Raises ModelError that names the field, the value and what is expected.
    """
    from mlx_lm.utils import load_config

    file = path / "config.json"
    if not file.is_file():
        raise ModelError(
            f"there is no config.json in {path}; give a folder written by mlx_lm.convert"
        )
    try:
        config = load_config(path)
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    except OSError as error:
        raise ModelError(f"{file} can't be read: {error.strerror}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds a {type(config).__name__}, not an object of fields")
    _check_model_type(config, file)
    _check_fields(config, model_classes(config)[1], file)
    _check_heads(config, file)
    _check_quantization(config, file)
    _check_builds(config, file)
    return config


def _check_model_type(config: dict[str, Any], file: Path) -> None:
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ModelError(
            f"{file}: model_type {model_type!r} is not supported; "
            f"supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
        )


def _check_fields(config: dict[str, Any], model_args: type, file: Path) -> None:
    hints = typing.get_type_hints(model_args)
    for field in dataclasses.fields(model_args):
        if field.name not in config:
            if field.default is dataclasses.MISSING:
                raise ModelError(f"{file}: the field {field.name} is missing")
            continue
        value, hint = config[field.name], hints[field.name]
        if not _fits(value, hint):
            expected = hint.__name__ if isinstance(hint, type) else str(hint)
            raise ModelError(f"{file}: {field.name} is {value!r}; expected is {expected}")
    for name in POSITIVE_FIELDS:
        if isinstance(config.get(name), int) and config[name] < 1:
            raise ModelError(f"{file}: {name} is {config[name]}; it must be at least 1")


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def _check_heads(config: dict[str, Any], file: Path) -> None:
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{file}: num_attention_heads ({num_heads}) is not a multiple of "
            f"num_key_value_heads ({num_kv_heads})"
        )
    if not config.get("head_dim") and hidden_size % num_heads:
        raise ModelError(
            f"{file}: hidden_size ({hidden_size}) is not a multiple of "
            f"num_attention_heads ({num_heads})"
        )


def _check_quantization(config: dict[str, Any], file: Path) -> None:
    quantization = config.get("quantization")
    if quantization is None:
        return
    if not isinstance(quantization, dict):
        raise ModelError(f"{file}: quantization is {quantization!r}; expected is an object")
    for name in ("group_size", "bits"):
        if not _fits(quantization.get(name), int):
            raise ModelError(
                f"{file}: quantization has {name} {quantization.get(name)!r}; expected is int"
            )


def _check_builds(config: dict[str, Any], file: Path) -> None:
    """Builds the model once without evaluating it, for what only its own code can judge."""
    model, model_args = model_classes(config)
    try:
        model(model_args.from_dict(config))
    except KeyError as error:
        raise ModelError(f"{file}: the field {error} is missing") from error
    except (ValueError, TypeError, AttributeError, ArithmeticError, AssertionError) as error:
        raise ModelError(f"{file} describes no usable model: {error}") from error

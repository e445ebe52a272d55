"""The precision of a model's weights: what it is, and how to change it without a second copy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

FLOAT_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(frozen=True)
class Quantization:
    bits: int
    group_size: int
    mode: str

    def __str__(self) -> str:
        mode = "" if self.mode == "affine" else f" {self.mode}"
        return f"{self.bits}-bit{mode} in groups of {self.group_size}"


@dataclass(frozen=True)
class Precision:
    """`dtype` is that of the activations and so of the KV cache; commonest quantisation first."""

    dtype: mx.Dtype
    quantization: tuple[Quantization, ...] = ()

    @classmethod
    def of(cls, model: nn.Module) -> Precision:
        """What `model` holds now; nothing is evaluated."""
        elements: Counter[mx.Dtype] = Counter()
        for array in parameters_of(model).values():
            if mx.issubdtype(array.dtype, mx.floating):
                elements[array.dtype] += array.size
        quantizations = Counter(
            Quantization(module.bits, module.group_size, module.mode)
            for _, module in _quantized_modules(model)
        )
        return cls(
            max(elements, key=lambda dtype: elements[dtype]),
            tuple(quantization for quantization, _ in quantizations.most_common()),
        )

    def __str__(self) -> str:
        parts = [dtype_name(self.dtype), *map(str, self.quantization)]
        return ", ".join(parts)


def parameters_of(model: nn.Module) -> dict[str, mx.array]:
    """The model's arrays by dotted name."""
    parameters: Any = tree_flatten(model.parameters(), destination={})
    return dict(parameters)


def dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def nbytes_in(model: nn.Module, precision: Precision) -> int:
    """Bytes that the parameters of `model` would take in `precision`; nothing is evaluated."""
    num_elements = {} if precision.quantization else dict(map(_unpacked, _quantized_modules(model)))
    nbytes = sum(num_elements.values()) * precision.dtype.size
    for name, array in parameters_of(model).items():
        module, _, kind = name.rpartition(".")
        if module in num_elements and kind in ("weight", "scales", "biases"):
            continue
        is_float = mx.issubdtype(array.dtype, mx.floating)
        nbytes += array.size * (precision.dtype.size if is_float else array.dtype.size)
    return nbytes


def _unpacked(named_module: tuple[str, Any]) -> tuple[str, int]:
    """A quantised module's name and the number of elements of its weight."""
    name, module = named_module
    return name, module.weight.size * 32 // module.bits


def dequantize(model: nn.Module, dtype: mx.Dtype) -> None:
    """Replaces quantised modules, one after the other, by plain ones with weights in `dtype`.

    Each is evaluated before the next is read, so that at most one module's quantised weights
    are in memory beside the new ones.
    """
    modules = _quantized_modules(model)
    while modules:
        name, module = modules.pop()
        plain = _plain(module, dtype)
        mx.eval(plain.parameters())
        model.update_modules(tree_unflatten([(name, plain)]))


def cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Casts floating parameters to `dtype` and evaluates all, one after the other."""
    parameters = parameters_of(model)
    while parameters:
        name, array = parameters.popitem()
        if mx.issubdtype(array.dtype, mx.floating):
            array = array.astype(dtype)
            model.update(tree_unflatten([(name, array)]))
        mx.eval(array)


def _quantized_modules(model: nn.Module) -> list[tuple[str, Any]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding))
    ]


def _plain(module: Any, dtype: mx.Dtype) -> nn.Module:
    weight = _dequantized_weight(module, dtype)
    if isinstance(module, nn.QuantizedEmbedding):
        embedding = nn.Embedding(*weight.shape)
        embedding.weight = weight
        return embedding
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in module)
    linear.weight = weight
    if "bias" in module:
        linear.bias = module.bias.astype(dtype)
    return linear


def _dequantized_weight(module: Any, dtype: mx.Dtype) -> mx.array:
    scales, biases = module.scales, module.get("biases")
    if module.mode == "affine":
        # MLX computes in the scales' dtype; in half precision it would round every weight again.
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    weight = mx.dequantize(
        module.weight,
        scales,
        biases,
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
        dtype=mx.float32,
    )
    return weight.astype(dtype)

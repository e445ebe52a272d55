"""Runs short pieces of Metal in the executor's own tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from msl import NO_COMPILER, Executor, Kernel, KernelFault, find_compiler

if find_compiler() is None:
    pytest.skip(NO_COMPILER, allow_module_level=True)

Outputs = Mapping[str, tuple[Sequence[int], mx.Dtype]]
Array = np.ndarray[Any, Any]
OUT: Outputs = {"out": ((32,), mx.float32)}


def make(body: str, inputs: Mapping[str, Any], outputs: Outputs, **made: Any) -> Kernel:
    executor = made.pop("executor", Executor())
    kernel: Kernel = executor.metal_kernel("snippet", list(inputs), list(outputs), body, **made)
    return kernel


def run(
    body: str,
    inputs: Mapping[str, Any] | None = None,
    outputs: Outputs = OUT,
    threads: int = 32,
    grid: int | None = None,
    template: Sequence[tuple[str, Any]] | None = None,
    init_value: float | None = None,
    **made: Any,
) -> tuple[dict[str, mx.array], Kernel]:
    """The outputs of `body`, over `grid` threads in groups of `threads`, and the kernel."""
    kernel = make(body, inputs or {}, outputs, **made)
    results = kernel(
        inputs=list((inputs or {}).values()),
        output_shapes=[shape for shape, _ in outputs.values()],
        output_dtypes=[dtype for _, dtype in outputs.values()],
        grid=(grid or threads, 1, 1),
        threadgroup=(threads, 1, 1),
        template=template,
        init_value=init_value,
    )
    return dict(zip(outputs, results, strict=True)), kernel


def out_of(body: str, inputs: Mapping[str, Any] | None = None, **launch: Any) -> Array:
    """The output `out` of `body`, in a type that numpy has."""
    result = run(body, inputs, **launch)[0]["out"]
    return np.array(result.astype(mx.float32) if result.dtype == mx.bfloat16 else result)


def fault_of(body: str, inputs: Mapping[str, Any] | None = None, **launch: Any) -> KernelFault:
    with pytest.raises(KernelFault) as caught:
        run(body, inputs, **launch)
    return caught.value

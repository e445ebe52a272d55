"""The device, the attention path on it, and what computes its matmuls."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from mlx_paged.cache import choose_path
from mlx_paged.doctor import blas
from mlx_paged.doctor.finding import Finding, Question
from mlx_paged.kernels import tuned


def device(question: Question) -> Iterator[Finding]:
    device = mx.default_device()
    name = mx.device_info().get("device_name", "unknown")
    yield Finding("device", "device", f"{device} ({name})", {"device": str(device), "name": name})
    for kind, present in (("Metal", mx.metal.is_available()), ("CUDA", mx.cuda.is_available())):
        yield Finding("device", kind.lower(), "available" if present else "not here", present)


def attention(question: Question) -> Iterator[Finding]:
    try:
        path = choose_path(question.attention)  # type: ignore[arg-type]
    except ValueError as error:
        yield Finding("device", "attention", str(error), None, "missing", "--attention auto")
        return
    if question.attention != "auto":
        reason = "as asked"
    elif path == "metal":
        reason = "auto: MLX runs on Metal"
    elif mx.metal.is_available():
        reason = f"auto: Metal is here, but MLX's default device is {mx.default_device()}"
    else:
        reason = "auto: no Metal here; gathers blocks with MLX operations"
    yield Finding("device", "attention", f"{path} in decode and prefill ({reason})", path)


def launch_choices(question: Question) -> Iterator[Finding]:
    if not mx.metal.is_available():
        return
    try:
        lines = tuned.describe()
    except ValueError as error:
        yield Finding("device", "launch choices", str(error), None, "note")
        return
    yield Finding("device", "launch choices", "\n".join(lines), lines)


def matmuls(question: Question) -> Iterator[Finding]:
    found = blas.loaded()
    if found is None:
        return
    yield Finding(
        "device",
        "BLAS",
        f"{found.name}, {'fast' if found.is_fast else 'slow'} ({found.path})",
        {"path": found.path, "fast": found.is_fast},
        "ok" if found.is_fast else "note",
        None if found.is_fast else blas.how_to_preload(),
    )

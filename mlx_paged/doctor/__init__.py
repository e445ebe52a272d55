"""What this machine offers, what would be chosen on it, and what is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from mlx_paged.doctor.finding import Finding, Level, Question
from mlx_paged.doctor.software import software

__all__ = ["Finding", "Level", "Question", "as_dict", "examine", "is_healthy"]


def examine(question: Question) -> list[Finding]:
    """All findings. Nothing is downloaded, converted or read into memory."""
    findings = list(software())
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        return [*findings, _no_mlx(error)]
    for section in _sections():
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


def _sections() -> tuple[Callable[[Question], Iterator[Finding]], ...]:
    """Parts of the report that need MLX; a new part is one more of these."""
    from mlx_paged.doctor import device, models

    return (
        device.device,
        device.attention,
        device.launch_choices,
        device.matmuls,
        models.memory,
        models.demo_weights,
    )


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

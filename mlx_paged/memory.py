"""How much memory this machine gives to weights and KV cache together."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes, and in words where the number comes from."""

    nbytes: int
    source: str


def memory_limit() -> MemoryLimit:
    """A GPU's recommended working set or its memory; on a CPU the machine's RAM.

    In a container the limit of its control group counts if it is the smaller one.
    """
    info = mx.device_info()
    recommended = info.get("max_recommended_working_set_size")
    if recommended:
        return MemoryLimit(int(recommended), "the GPU's recommended working set")
    if info.get("total_memory"):  # CUDA
        return MemoryLimit(int(info["total_memory"]), "the GPU's memory")
    limits = [MemoryLimit(_physical_memory(), "the machine's memory")]
    for file in CGROUP_LIMITS:
        if (nbytes := _read_number(file)) is not None:
            limits.append(MemoryLimit(nbytes, f"the container's limit, {file}"))
    return min(limits, key=lambda limit: limit.nbytes)


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read_number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # absent, or "max" for no limit
        return None

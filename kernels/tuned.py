"""Launch choices measured on this machine's chip, in a small file of the user's cache folder.

The file maps a chip to shapes to choices. An entry counts only for the kernel text that it was
measured with; `scripts/kernel.py --sweep` writes it.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import metal
from .defaults import default_launch, num_cores
from .launch import DecodeLaunch, DecodeShape


def path() -> Path:
    """`launch.json` in the cache folder of the demo weights: see `mlx_paged.weights.demo`."""
    if root := os.environ.get("MLX_PAGED_CACHE"):
        return Path(root).expanduser() / "launch.json"
    default = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    root = os.environ.get("XDG_CACHE_HOME") or default
    return Path(root).expanduser() / "mlx-paged/launch.json"


@dataclass(frozen=True)
class Entry:
    """One line of the file."""

    chip: str
    shape: str
    launch: DecodeLaunch
    kernel: str  # digest of the text that was measured
    gb_per_s: float

    @property
    def is_current(self) -> bool:
        return self.kernel == kernel_digest()


def choose(shape: DecodeShape) -> DecodeLaunch:
    """The launch for `shape` on this chip: the measured one, else the reasoned one."""
    return chosen(metal.chip(), shape)


@lru_cache(maxsize=256)
def chosen(chip: str, shape: DecodeShape) -> DecodeLaunch:
    """The same for any chip."""
    for entry in entries():
        if entry.chip == chip and entry.shape == str(shape) and entry.is_current:
            return entry.launch
    return default_launch(shape, num_cores(chip))


def entries() -> list[Entry]:
    """All measured choices, of every chip and kernel text; none where there is no file.

    Raises ValueError if the file can't be understood.
    """
    if not path().exists():
        return []
    try:
        return [_entry(fields) for fields in json.loads(path().read_text())["launches"]]
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path()} isn't a file of launch choices ({error!r}): delete it, or measure it again "
            "with scripts/kernel.py --sweep"
        ) from error


def save(shape: DecodeShape, launch: DecodeLaunch, gb_per_s: float) -> Path:
    """Keep `launch` as the choice for `shape` on this chip, in place of an older one."""
    entry = Entry(metal.chip(), str(shape), launch, kernel_digest(), gb_per_s)
    kept = [e for e in entries() if (e.chip, e.shape) != (entry.chip, entry.shape)]
    launches = [{**vars(e), "launch": e.launch.to_dict()} for e in [*kept, entry]]
    path().parent.mkdir(parents=True, exist_ok=True)
    unfinished = path().with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps({"launches": launches}, indent=1) + "\n")
    unfinished.replace(path())
    chosen.cache_clear()
    return path()


def kernel_digest() -> str:
    """Names the text that a measurement is about."""
    return metal.digest(
        "paging.metal",
        "softmax.metal",
        "tile.metal",
        "quantized_tile.metal",
        "decode.metal",
        "merge.metal",
    )


def describe() -> list[str]:
    """Lines for a person: where measured launch choices are kept, and which there are."""
    lines = [f"{path()}: " + ("" if entries() else "nothing measured, reasoned defaults in use")]
    for entry in entries():
        state = "" if entry.is_current else " (kernel changed since: not used)"
        choices = entry.launch.to_dict()
        lines.append(f"{entry.chip}, {entry.shape}: {choices}, {entry.gb_per_s:.0f} GB/s{state}")
    return lines


def _entry(fields: dict[str, Any]) -> Entry:
    return Entry(**{**fields, "launch": DecodeLaunch.from_dict(fields["launch"])})

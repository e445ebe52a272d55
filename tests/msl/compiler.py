"""The C++ compiler: which one, how it is called, and where its results are kept."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

FOLDER = Path(__file__).parent
INCLUDE = FOLDER / "include"
NEWEST, OLDEST = 30, 17
NO_COMPILER = (
    "no clang: install clang 17 or newer or `pip install ziglang`, or name one in MSL_CLANG"
)

_COMMON = [
    "-x", "c++", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti",
    "-nostdinc++",
]  # fmt: skip
_KERNEL = [
    "-O1", "-gdwarf-4", "-gline-tables-only", "-Wno-everything", "-Werror=return-type",
    # A thread's stack has 128 KiB (runtime/fiber.h).
    "-Wframe-larger-than=100000", "-Werror=frame-larger-than",
    # Metal's numbers: a literal is a float, every half operation rounds, nothing is contracted.
    "-Xclang", "-cl-single-precision-constant", "-Xclang", "-ffloat16-excess-precision=none",
    "-ffp-contract=off", "-fno-math-errno",
    # Loads and stores stay as wide as they are written, lanes stay together, calls return.
    "-fno-vectorize", "-fno-slp-vectorize", "-fno-strict-aliasing", "-fno-optimize-sibling-calls",
    "-Xclang", "-fconvergent-functions",
    # A private variable that nothing was assigned to holds a NaN or a large number.
    "-ftrivial-auto-var-init=pattern",
]  # fmt: skip
# Calls of ours before each access and where arithmetic is undefined (runtime.cpp).
_CHECKED = [
    "-Xclang", "-fsanitize=kernel-address,array-bounds,signed-integer-overflow,shift-exponent,"
    "integer-divide-by-zero",
    "-Xclang", "-fsanitize-minimal-runtime",
    "-mllvm", "-asan-instrumentation-with-call-threshold=0",
    "-mllvm", "-asan-kernel-mem-intrinsic-prefix=1",
    "-mllvm", "-asan-opt-same-temp=0",
    "-mllvm", "-asan-stack=0",
    "-mllvm", "-asan-globals=0",
]  # fmt: skip


class CompileError(Exception):
    """The compiler's messages."""


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]

    @cached_property
    def version(self) -> str:
        return _output([*self.command, "--version"]).split("\n")[0]

    def __str__(self) -> str:
        return f"{' '.join(self.command)} ({self.version})"

    @property
    def _machine(self) -> list[str]:
        """What the processor must have for half precision, and how to leave symbols open."""
        is_x86 = platform.machine().lower() in ("x86_64", "amd64")
        options = ["-mf16c", "-mfma"] if is_x86 else []
        if sys.platform == "darwin":
            options += ["-undefined", "dynamic_lookup"]
        return options

    def shared_object(self, text: str) -> Path:
        """The compiled kernel `text`; raises CompileError."""
        options = [*_COMMON, *_KERNEL, *_CHECKED, *self._machine, "-I", str(INCLUDE)]
        link = ["-shared", "-nostdlib"]
        return self._cached(text, _contents(INCLUDE), [*options, *link], "kernel")

    def runtime(self) -> Path:
        """The compiled runtime."""
        text = (FOLDER / "runtime" / "runtime.cpp").read_text()
        options = [*_COMMON, "-O2", "-I", str(FOLDER / "runtime"), *self._machine]
        known = _contents(FOLDER / "runtime") + _contents(INCLUDE)
        link = ["-shared", "-nostdlib++", "-lm", "-ldl"]
        return self._cached(text, known, [*options, *link], "runtime")

    def check_syntax(self, text: str, options: Sequence[str]) -> None:
        """Reads `text`, of which nothing is to be run; raises CompileError."""
        # An object file rather than -fsyntax-only, which makes none: zig's clang then complains.
        self._cached(text, _contents(INCLUDE), ["-c", *options, "-I", str(INCLUDE)], "syntax")

    def _cached(self, text: str, included: str, options: Sequence[str], kind: str) -> Path:
        """The result of one call of the compiler, kept under what it depends on."""
        parts = (text, included, " ".join(options), *self.command, self.version)
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
        result = cache_folder() / f"{kind}-{key}"
        if not result.exists():
            with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
                made = self._compile(text, options, Path(folder))
                os.replace(made, result)  # whole or not at all, whoever else is at it
        return result

    def _compile(self, text: str, options: Sequence[str], folder: Path) -> Path:
        written, made = folder / "kernel.cpp", folder / "made"
        written.write_text(text)
        command = [*self.command, *options, str(written), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CompileError(done.stderr)
        return made


@cache
def cache_folder() -> Path:
    """MSL_CACHE, or a folder in the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    folder = Path(os.environ.get("MSL_CACHE", os.path.join(home, "mlx-paged-msl")))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@cache
def find_compiler() -> Compiler | None:
    """MSL_CLANG, else the newest numbered clang, else clang, else PyPI's ziglang, else None."""
    named = os.environ.get("MSL_CLANG")
    if named:
        return Compiler(tuple(named.split()))
    for version in range(NEWEST, OLDEST - 1, -1):
        if shutil.which(f"clang-{version}"):
            return Compiler((f"clang-{version}",))
    if shutil.which("clang") and _is_new_enough("clang"):
        return Compiler(("clang",))
    if importlib.util.find_spec("ziglang"):
        return Compiler((sys.executable, "-m", "ziglang", "c++"))
    return None


def _is_new_enough(command: str) -> bool:
    macros = _output([command, "-dM", "-E", "-x", "c", os.devnull])
    return any(f"__clang_major__ {n}\n" in macros for n in range(OLDEST, NEWEST + 1))


@cache
def _contents(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return "\0".join(file.read_text() for file in files)


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout

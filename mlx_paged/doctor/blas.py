"""Which BLAS computes MLX's float32 matmuls on a Linux CPU.

The mlx-cpu wheel brings the reference BLAS, which is slow; a fast one can be put before it by
LD_PRELOAD.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

MAPS = Path("/proc/self/maps")
MATMUL = "cblas_sgemm"

FAST = {
    "openblas": "OpenBLAS",
    "mkl": "MKL",
    "blis": "BLIS",
    "nvpl": "NVPL",
    "armpl": "Arm Performance Libraries",
    "atlas": "ATLAS",
}
PRELOADABLE = "/usr/lib/*-linux-gnu*/openblas-pthread/libopenblas.so.0"
PACKAGE = "libopenblas0-pthread"
MEASURED = "float32 matmuls about 20 times faster, measured on two EPYC cores"


@dataclass(frozen=True)
class Blas:
    """A library that holds `cblas_sgemm`, by the file that it was loaded from."""

    path: str

    @property
    def name(self) -> str:
        """The implementation; Debian tells them apart by folder, not by file name."""
        for part, name in FAST.items():
            if part in self.path.lower():
                return name
        return "reference BLAS"

    @property
    def is_fast(self) -> bool:
        return self.name in FAST.values()


def loaded() -> Blas | None:
    """The BLAS that the dynamic linker gives to MLX; None where it isn't Linux or there is none.

    Other libraries may bring a BLAS of their own (numpy does), so that being loaded says
    nothing. The linker looks at the program and what is preloaded first, then at what MLX was
    linked with.
    """
    if not MAPS.exists():
        return None
    import mlx.core  # noqa: F401  (so that it is loaded)

    libraries = {line.split(maxsplit=5)[-1] for line in MAPS.read_text().splitlines()}
    libmlx = next((path for path in libraries if Path(path).name.startswith("libmlx")), None)
    for scope in (None, libmlx):
        path = _file_of(ctypes.CDLL(scope), MATMUL)
        if path is not None:
            return Blas(os.path.realpath(path))
    return None


def how_to_preload() -> str:
    """What to type for a fast BLAS on this machine."""
    installed = sorted(Path("/").glob(PRELOADABLE.lstrip("/")))
    if installed:
        return f"LD_PRELOAD={installed[0]} mlx-paged ... ({MEASURED})"
    return f"apt install {PACKAGE}, then LD_PRELOAD={PRELOADABLE} mlx-paged ... ({MEASURED})"


class _SymbolInfo(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = (
        ("file_name", ctypes.c_char_p),
        ("file_base", ctypes.c_void_p),
        ("symbol_name", ctypes.c_char_p),
        ("symbol_address", ctypes.c_void_p),
    )


def _file_of(library: ctypes.CDLL, symbol: str) -> str | None:
    """The file that holds what `symbol` means in the scope of `library`."""
    try:
        address = ctypes.cast(getattr(library, symbol), ctypes.c_void_p)
    except AttributeError:
        return None
    info = _SymbolInfo()
    if not ctypes.CDLL(None).dladdr(address, ctypes.byref(info)) or info.file_name is None:
        return None
    return os.fsdecode(info.file_name)

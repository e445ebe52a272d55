"""The runtime's interface (runtime/launch.h), and a launch through it."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from .report import Traffic

INPUT, OUTPUT, INITIALISED_OUTPUT = 0, 1, 2
MAX_ACCESS_BYTES, MAX_COLLECTIVES, MAX_VARIABLES = 64, 32, 64
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

_launching = threading.Lock()


@dataclass
class Buffer:
    """An argument: its bytes (changed in place for an output), and which of them are written.

    `written`: for an input None, or 0 where its kernel left it unwritten; for an output it is
    set to 1 where this kernel stores.
    """

    name: str
    data: Bytes
    kind: int
    written: Bytes | None = None


@dataclass(frozen=True)
class Fault:
    kind: str
    message: str  # "#12" stands for line 12 of MLX's text
    line: int  # of MLX's text, or 0: then that of `address` in the kernel's image
    address: int


@dataclass(frozen=True)
class Outcome:
    fault: Fault | None
    buffers: dict[str, Traffic]
    variables: dict[str, Traffic]
    threadgroup_barriers: int
    simdgroup_barriers: int
    collectives: Counter[str]


class _Traffic(ctypes.Structure):
    _fields_ = [
        ("loads", ctypes.c_uint64 * (MAX_ACCESS_BYTES + 1)),
        ("stores", ctypes.c_uint64 * (MAX_ACCESS_BYTES + 1)),
        ("atomics", ctypes.c_uint64),
        ("distinct_bytes_loaded", ctypes.c_uint64),
        ("distinct_bytes_stored", ctypes.c_uint64),
    ]

    def traffic(self, num_bytes: int) -> Traffic:
        return Traffic(
            num_bytes,
            Counter({width: count for width, count in enumerate(self.loads) if count}),
            Counter({width: count for width, count in enumerate(self.stores) if count}),
            self.distinct_bytes_loaded,
            self.distinct_bytes_stored,
            self.atomics,
        )


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("written", ctypes.c_void_p),
        ("kind", ctypes.c_uint32),
        ("traffic", _Traffic),
    ]


class _Variable(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("bytes", ctypes.c_uint64), ("traffic", _Traffic)]


class _Collective(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("count", ctypes.c_uint64)]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("num_buffers", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("schedule", ctypes.c_uint64),
        ("max_seconds", ctypes.c_double),
        ("threadgroup_barriers", ctypes.c_uint64),
        ("simdgroup_barriers", ctypes.c_uint64),
        ("collectives", _Collective * MAX_COLLECTIVES),
        ("num_collectives", ctypes.c_uint32),
        ("variables", _Variable * MAX_VARIABLES),
        ("num_variables", ctypes.c_uint32),
        ("fault_kind", ctypes.c_char_p),
        ("fault_line", ctypes.c_uint64),
        ("fault_pc", ctypes.c_uint64),
        ("fault", ctypes.c_char * 1024),
    ]


@cache
def _load(path: Path) -> ctypes.CDLL:
    """A shared object for good; the runtime's names are then there for kernels to find."""
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL if "runtime" in path.name else 0)


def run(
    runtime: Path,
    kernel: Path,
    buffers: Sequence[Buffer],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    schedule: int,
    max_seconds: float,
) -> Outcome:
    """Runs a compiled kernel over `grid` threads in groups of `threadgroup`."""
    start = _load(runtime).msl_launch
    start.restype = None
    launch = _Launch(
        entry=ctypes.cast(_load(kernel).msl_entry, ctypes.c_void_p),
        num_buffers=len(buffers),
        schedule=schedule,
        max_seconds=max_seconds,
    )
    launch.grid[:] = grid
    launch.threadgroup[:] = threadgroup
    arguments = (_Buffer * len(buffers))(*(_argument(buffer) for buffer in buffers))
    launch.buffers = arguments
    with _launching:
        start(ctypes.byref(launch))
    fault = None
    if launch.fault_kind == b"memory":
        raise MemoryError(launch.fault.decode())
    if launch.fault_kind:
        fault = Fault(
            launch.fault_kind.decode(), launch.fault.decode(), launch.fault_line, launch.fault_pc
        )
    variables = launch.variables[: launch.num_variables]
    return Outcome(
        fault,
        {b.name: a.traffic.traffic(a.bytes) for b, a in zip(buffers, arguments, strict=True)},
        {v.name.decode(): v.traffic.traffic(v.bytes) for v in variables},
        launch.threadgroup_barriers,
        launch.simdgroup_barriers,
        Counter({c.name.decode(): c.count for c in launch.collectives[: launch.num_collectives]}),
    )


def _argument(buffer: Buffer) -> _Buffer:
    return _Buffer(
        name=buffer.name.encode(),
        data=buffer.data.ctypes.data,
        bytes=buffer.data.nbytes,
        written=None if buffer.written is None else buffer.written.ctypes.data,
        kind=buffer.kind,
    )

"""What a launch did: bytes, accesses by width, barriers, collectives."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Traffic:
    """The accesses to one buffer or threadgroup variable of `num_bytes` bytes, over all threads.

    The compiler may join repeated loads of one thread and narrow vectors that are used in part,
    as Metal's may: what is counted is what is left to do after that.
    """

    num_bytes: int
    load_widths: Counter[int] = field(default_factory=Counter)  # number of loads by bytes each
    store_widths: Counter[int] = field(default_factory=Counter)
    distinct_bytes_loaded: int = 0
    distinct_bytes_stored: int = 0
    atomics: int = 0

    @property
    def loads(self) -> int:
        return self.load_widths.total()

    @property
    def stores(self) -> int:
        return self.store_widths.total()

    @property
    def bytes_loaded(self) -> int:
        return sum(width * count for width, count in self.load_widths.items())

    @property
    def bytes_stored(self) -> int:
        return sum(width * count for width, count in self.store_widths.items())


@dataclass(frozen=True)
class Report:
    """The last launch of a kernel."""

    kernel: str
    buffers: dict[str, Traffic]  # inputs and outputs, and MLX's <input>_shape and the like
    threadgroup: dict[str, Traffic]  # threadgroup variables
    threadgroup_barriers: int  # once for each threadgroup that passes
    simdgroup_barriers: int  # once for each SIMD group
    collectives: Counter[str]  # once for each SIMD group, by the function's name
    num_threadgroups: int
    seconds: float  # of this executor: says nothing about Metal
    compiler: str
    text: str  # the Metal source that ran, as MLX generated it

    def __getitem__(self, name: str) -> Traffic:
        return self.buffers[name]

    @property
    def threadgroup_bytes(self) -> int:
        """Threadgroup memory of one threadgroup, each variable aligned to 16 bytes."""
        return sum((traffic.num_bytes + 15) // 16 * 16 for traffic in self.threadgroup.values())

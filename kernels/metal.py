"""The one door to Metal: every kernel of the project is made and launched here.

A kernel is a `.metal` file with the body that `mx.fast.metal_kernel` wants, and headers. What
makes the kernel can be replaced in a `with using(factory):` block, so that an executor without a
GPU runs the launchers unchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

SIMD_WIDTH = 32
MAX_THREADS = 1024  # of a threadgroup; a pipeline short of registers may allow fewer
MAX_THREADGROUP_BYTES = 32 * 1024
MAX_BUFFERS = 31

Factory = Callable[..., Callable[..., list[mx.array]]]
Dims = tuple[int, int, int]

_MLX: Factory = cast(Factory, mx.fast.metal_kernel)
_factory = _MLX


def is_available() -> bool:
    """Whether kernels can run: on a Metal device, or on whatever `using` put in its place."""
    on_metal = mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)
    return on_metal or _factory is not _MLX


@contextmanager
def using(factory: Factory) -> Iterator[None]:
    """Make kernels with `factory`, which has `mx.fast.metal_kernel`'s signature, in this block.

    It holds for every thread, since an engine launches from a thread of its own.
    """
    global _factory
    before, _factory = _factory, factory
    try:
        yield
    finally:
        _factory = before


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel's text and the names of its arrays. Texts are files of this folder."""

    name: str
    body: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    headers: tuple[str, ...] = ()
    defines: tuple[str, ...] = ()  # macros that are 1; every other macro of the text is 0

    @cached_property
    def source(self) -> str:
        return read(self.body)

    @cached_property
    def header(self) -> str:
        macros = "".join(f"#define {name} 1\n" for name in self.defines)
        return macros + "".join(read(file) for file in self.headers)

    @cached_property
    def num_buffers(self) -> int:
        """Arguments that MLX will bind: arrays, and the shapes and strides that the body names."""
        extras = (f"{name}_{what}" for name in self.inputs for what in ("shape", "strides", "ndim"))
        named = sum(extra in self.source for extra in extras)
        return len(self.inputs) + len(self.outputs) + named

    @cached_property
    def unique_name(self) -> str:
        """The name and a digest of the text: two texts never share a compiled kernel."""
        return f"{self.name}_{_digest(self.header, self.source)}"

    def launch(
        self,
        *,
        template: Sequence[tuple[str, Any]],
        threadgroups: Dims,
        threads: Dims,
        threadgroup_bytes: int,
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> Launch:
        """A launch of `threadgroups` of `threads`. Raises ValueError beyond Metal's limits."""
        check_limits(self.name, threads, threadgroup_bytes, self.num_buffers)
        x, y, z = (count * size for count, size in zip(threadgroups, threads, strict=True))
        arguments = {
            "template": list(template),
            "grid": (x, y, z),
            "threadgroup": threads,
            "output_shapes": list(output_shapes),
            "output_dtypes": list(output_dtypes),
        }
        return Launch(self, arguments)


@dataclass(frozen=True, eq=False)
class Launch:
    """All of a launch but its inputs; it can be repeated."""

    kernel: Kernel
    arguments: dict[str, Any]

    def __call__(self, *inputs: mx.array) -> list[mx.array]:
        return _compiled(_factory, self.kernel)(inputs=list(inputs), **self.arguments)


def check_limits(name: str, threads: Dims, threadgroup_bytes: int, num_buffers: int) -> None:
    """Raise ValueError, before anything is compiled, for a launch that no Metal device can run."""
    num_threads = threads[0] * threads[1] * threads[2]
    for count, limit, unit, remedy in (
        (num_threads, MAX_THREADS, "threads a threadgroup", "fewer SIMD groups"),
        (threadgroup_bytes, MAX_THREADGROUP_BYTES, "bytes of threadgroup memory", "fewer slices"),
        (num_buffers, MAX_BUFFERS, "buffers", "fewer arguments"),
    ):
        if count > limit:
            raise ValueError(
                f"kernel {name} would need {count} {unit}, and Metal allows {limit}: use {remedy}"
            )


def require_row_contiguous(name: str, array: mx.array) -> None:
    """Raise ValueError unless `array` lies in memory in the order of its axes, without gaps.

    The kernels read pools in that order, and copying a pool at every launch would cost more than
    attention itself. The check evaluates `array`: it's for a pool's birth, not for each step.
    """
    if array.size and not memoryview(cast(bytes, array)).c_contiguous:
        raise ValueError(
            f"{name} of shape {array.shape} is a transposed or strided view, which the kernel "
            "would have to copy at every launch: keep it as mx.contiguous(array)"
        )


def chip() -> str:
    """MLX's name of the GPU's architecture, such as applegpu_g13g; "" off Metal."""
    return _architecture() if _factory is _MLX and mx.metal.is_available() else ""


@cache
def _architecture() -> str:
    return str(mx.device_info()["architecture"])


def digest(*files: str) -> str:
    """Names the text of `.metal` files of this folder."""
    return _digest(*(read(file) for file in files))


@cache
def read(file: str) -> str:
    """The text of a `.metal` file of this folder."""
    return (Path(__file__).parent / file).read_text()


@cache
def _compiled(factory: Factory, kernel: Kernel) -> Callable[..., list[mx.array]]:
    return factory(
        name=kernel.unique_name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.source,
        header=kernel.header,
        ensure_row_contiguous=False,
    )


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]

"""mx.fast.metal_kernel, run and checked on this machine's processor."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from . import launch
from .arguments import (
    input_buffers,
    is_row_contiguous,
    output_buffer,
    result,
    strides,
)
from .build import compile_source, compiler, launch_fault, runtime
from .fault import KernelFault
from .launch import Buffer
from .report import Report
from .source import Source, generate

MAX_THREADS = 1024
MAX_BUFFERS = 31
Template = Sequence[tuple[str, Any]]


@dataclass(frozen=True)
class Executor:
    """How kernels are run.

    may_leave_unwritten: names of outputs that a kernel may write in part. The bytes left out hold
        NaN, and a later kernel that loads them from the same array is at fault. Any other output
        with an unwritten byte is a fault.
    schedule: 0 runs lanes, SIMD groups and threadgroups in order; another number is the seed of a
        random order.
    max_seconds: when a launch is taken to hang.
    """

    may_leave_unwritten: tuple[str, ...] = ()
    schedule: int = 0
    max_seconds: float = 120.0

    def metal_kernel(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: dict[str, Any] | None = None,
    ) -> Kernel:
        """As mx.fast.metal_kernel."""
        options = {} if compile_options is None else {"compile_options": compile_options}
        traced = mx.fast.metal_kernel(
            name, input_names, output_names, source, header, ensure_row_contiguous,
            atomic_outputs, **options,
        )  # fmt: skip
        return Kernel(
            self, name, tuple(input_names), tuple(output_names), source, header,
            ensure_row_contiguous, traced,
        )  # fmt: skip


@dataclass
class Kernel:
    """What mx.fast.metal_kernel returns: call it with arrays, a grid and a threadgroup size."""

    executor: Executor
    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str
    ensure_row_contiguous: bool
    traced: Any = field(repr=False)
    report: Report | None = field(default=None, repr=False)  # of the last launch
    _sources: dict[Any, Source] = field(default_factory=dict, repr=False)

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Template | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        """Evaluates `inputs`, runs the kernel at once, and returns its outputs.

        Raises KernelFault, with the kernel's line, for whatever Metal forbids or leaves undefined.
        """
        self.report = None
        arrays = [value if isinstance(value, mx.array) else mx.array(value) for value in inputs]
        mx.eval(arrays)
        self._require_limits(grid, threadgroup)
        source = self._generate(arrays, output_shapes, output_dtypes, template, stream)
        self._require_no_copies(arrays)
        if verbose:
            print(source.text)
        described = list(zip(self.output_names, output_shapes, output_dtypes, strict=True))
        outputs = [output_buffer(*output, init_value) for output in described]
        buffers = [*input_buffers(source, self.input_names, arrays), *outputs]
        self.report = self._run(source, buffers, grid, threadgroup)
        if init_value is None:
            self._require_written(outputs)
        return [
            result(buffer, shape, dtype)
            for buffer, (_, shape, dtype) in zip(outputs, described, strict=True)
        ]

    def check_small(self, names: Collection[str], **call: Any) -> None:
        """Checks, without running, the text of a call whose inputs `names` have few elements.

        MLX puts an input of fewer than 8 elements in the constant address space, so a kernel that
        takes a device pointer to it compiles only for larger inputs. `call` is as for running.
        """
        arrays = []
        for name, value in zip(self.input_names, call["inputs"], strict=True):
            array = mx.array(value)
            is_shrunk = name in names and array.ndim > 0
            arrays.append(mx.zeros((1,) * array.ndim, array.dtype) if is_shrunk else array)
        shapes, dtypes = call["output_shapes"], call["output_dtypes"]
        compile_source(self._generate(arrays, shapes, dtypes, call.get("template")))

    def _run(
        self,
        source: Source,
        buffers: Sequence[Buffer],
        grid: Sequence[int],
        threadgroup: Sequence[int],
    ) -> Report:
        if len(buffers) > MAX_BUFFERS:
            raise self._fault("limit", f"takes {len(buffers)} buffers, Metal has {MAX_BUFFERS}")
        compiled = compile_source(source)
        threads = [min(t, g) for t, g in zip(threadgroup, grid, strict=True)]  # as MLX does
        started = time.perf_counter()
        outcome = launch.run(
            runtime(), compiled, buffers, grid, threads, self.executor.schedule,
            self.executor.max_seconds,
        )  # fmt: skip
        if outcome.fault:
            raise launch_fault(source, compiled, outcome.fault)
        return Report(
            self.name,
            outcome.buffers,
            outcome.variables,
            outcome.threadgroup_barriers,
            outcome.simdgroup_barriers,
            outcome.collectives,
            math.prod(-(-g // t) for g, t in zip(grid, threads, strict=True)),
            time.perf_counter() - started,
            str(compiler()),
            source.text,
        )

    def _fault(self, kind: str, message: str) -> KernelFault:
        return KernelFault(kind, self.name, message)

    def _require_limits(self, grid: Sequence[int], threadgroup: Sequence[int]) -> None:
        if min(*grid, *threadgroup) < 1:
            raise self._fault("limit", f"is launched over grid {grid} in groups of {threadgroup}")
        threads = math.prod(threadgroup)
        if threads > MAX_THREADS:
            raise self._fault("limit", f"has {threads} threads a threadgroup, over {MAX_THREADS}")

    def _generate(
        self,
        arrays: Sequence[mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        template: Template | None,
        stream: Any = None,
    ) -> Source:
        """MLX's text, which depends on the inputs' types and on which of them are small."""
        passing = tuple((str(a.dtype), min(a.ndim, 1), a.size < 8) for a in arrays)
        shapes = len(output_shapes), tuple(map(str, output_dtypes))
        call = {} if template is None else {"template": template}
        if stream is not None:
            call["stream"] = stream
        key = passing, shapes, str(call)
        if key not in self._sources:
            printed = generate(
                self.traced, arrays, output_shapes=output_shapes, output_dtypes=output_dtypes,
                grid=(1, 1, 1), threadgroup=(1, 1, 1), **call,
            )  # fmt: skip
            self._sources[key] = Source(self.name, printed, self.header, self.source)
        return self._sources[key]

    def _require_no_copies(self, arrays: Sequence[mx.array]) -> None:
        for name, array in zip(self.input_names, arrays, strict=True):
            if self.ensure_row_contiguous and not is_row_contiguous(array):
                raise self._fault(
                    "copy",
                    f"would have MLX copy {array.nbytes} bytes at every launch: `{name}` of shape "
                    f"{array.shape} has strides {strides(array)}, which is not row contiguous",
                )

    def _require_written(self, outputs: Sequence[Buffer]) -> None:
        for buffer in outputs:
            assert buffer.written is not None
            missing = buffer.written.size - int(buffer.written.sum())
            if not missing or buffer.name in self.executor.may_leave_unwritten:
                continue
            raise self._fault(
                "never written",
                f"leaves {missing} of {buffer.written.size} bytes of output `{buffer.name}` "
                f"unwritten, the first of them byte {int(np.argmin(buffer.written))}",
            )


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: dict[str, Any] | None = None,
) -> Kernel:
    """As mx.fast.metal_kernel, run by the default Executor."""
    return Executor().metal_kernel(
        name, input_names, output_names, source, header, ensure_row_contiguous, atomic_outputs,
        compile_options,
    )  # fmt: skip

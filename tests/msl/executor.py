"""mx.fast.metal_kernel, run and checked on this machine's processor."""

from __future__ import annotations

import math
import re
import time
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from . import address_space, launch, lint
from .compiler import NO_COMPILER, CompileError, Compiler, find_compiler
from .fault import KernelFault, Place
from .launch import Buffer, Bytes
from .line_table import LineTable
from .report import Report, Traffic
from .source import Source, generate
from .translation import FILE_NAME, to_cpp

MAX_THREADS = 1024
MAX_BUFFERS = 31
Template = Sequence[tuple[str, Any]]

# Outputs of kernels that wrote them in part: which bytes, while the array lives.
_partly_written: dict[int, tuple[weakref.ref[mx.array], Bytes]] = {}


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

    may_leave_unwritten: Collection[str] = ()
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
        arrays = [value if isinstance(value, mx.array) else mx.array(value) for value in inputs]
        mx.eval(arrays)
        self._require_limits(grid, threadgroup)
        text = self._generate(arrays, output_shapes, output_dtypes, template)
        if verbose:
            print(text.text)
        compiled = compile_source(text)
        outputs = [
            _output(name, shape, dtype, init_value)
            for name, shape, dtype in zip(
                self.output_names, output_shapes, output_dtypes, strict=True
            )
        ]
        buffers = [*self._input_buffers(text, arrays), *outputs]
        if len(buffers) > MAX_BUFFERS:
            raise self._fault("limit", f"takes {len(buffers)} buffers, Metal has {MAX_BUFFERS}")
        threads = [min(t, g) for t, g in zip(threadgroup, grid, strict=True)]  # as MLX does
        started = time.perf_counter()
        outcome = launch.run(
            _runtime(), compiled, buffers, grid, threads, self.executor.schedule,
            self.executor.max_seconds,
        )  # fmt: skip
        if outcome.fault:
            raise _located(text, LineTable(compiled, FILE_NAME), outcome.fault)
        self.report = Report(
            self.name,
            outcome.buffers,
            outcome.variables,
            outcome.threadgroup_barriers,
            outcome.simdgroup_barriers,
            outcome.collectives,
            math.prod(-(-g // t) for g, t in zip(grid, threads, strict=True)),
            time.perf_counter() - started,
            text.text,
        )
        if init_value is None:
            self._require_written(outputs, outcome.buffers)
        results = [
            mx.array(buffer.data).view(dtype).reshape(shape)
            for buffer, shape, dtype in zip(outputs, output_shapes, output_dtypes, strict=True)
        ]
        mx.eval(results)
        for array, buffer in zip(results, outputs, strict=True):
            _remember_unwritten(array, buffer)
        return results

    def check_small(self, names: Collection[str], **call: Any) -> None:
        """Checks, without running, the text of a call whose inputs `names` have few elements.

        MLX puts an input of fewer than 8 elements in the constant address space, so a kernel that
        takes a device pointer to it compiles only for larger inputs. `call` is as for running.
        """
        small = [
            array if name not in names or array.ndim == 0 else _first_element(array)
            for name, array in zip(self.input_names, map(mx.array, call["inputs"]), strict=True)
        ]
        compile_source(
            self._generate(
                small, call["output_shapes"], call["output_dtypes"], call.get("template")
            )
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
    ) -> Source:
        """MLX's text, which depends on the inputs' types and on which of them are small."""
        passing = tuple((str(a.dtype), min(a.ndim, 1), a.size < 8) for a in arrays)
        shapes = len(output_shapes), tuple(map(str, output_dtypes))
        key = passing, shapes, str(template)
        if key not in self._sources:
            call: dict[str, Any] = {} if template is None else {"template": template}
            printed = generate(
                self.traced, arrays, output_shapes=output_shapes, output_dtypes=output_dtypes,
                grid=(1, 1, 1), threadgroup=(1, 1, 1), **call,
            )  # fmt: skip
            self._sources[key] = Source(self.name, printed, self.header, self.source)
        return self._sources[key]

    def _input_buffers(self, text: Source, arrays: Sequence[mx.array]) -> list[Buffer]:
        """The inputs, each followed by its shape, strides and ndim where the kernel names them."""
        wanted = {parameter.name for parameter in text.parameters}
        buffers = []
        for name, array in zip(self.input_names, arrays, strict=True):
            view = memoryview(array) if array.size else None
            if view is not None and not view.c_contiguous:
                raise self._fault("copy", self._copy_message(name, array, view))
            buffers.append(Buffer(name, _bytes_of(array), launch.INPUT, _written_bytes(array)))
            strides = np.cumprod([1, *array.shape[:0:-1]], dtype=np.int64)[::-1]
            for suffix, values in (
                ("_shape", np.array(array.shape, np.int32)),
                ("_strides", strides),
                ("_ndim", np.array([array.ndim], np.int32)),
            ):
                if array.ndim and name + suffix in wanted:
                    data = np.ascontiguousarray(values).view(np.uint8)
                    buffers.append(Buffer(name + suffix, data, launch.INPUT))
        return buffers

    def _copy_message(self, name: str, array: mx.array, view: memoryview) -> str:
        layout = f"`{name}` of shape {array.shape} has strides {view.strides} bytes"
        if self.ensure_row_contiguous:
            return f"would have MLX copy {array.nbytes} bytes at every launch: {layout}"
        return f"takes an input that is not row contiguous, which is not supported here: {layout}"

    def _require_written(self, outputs: Sequence[Buffer], traffic: dict[str, Traffic]) -> None:
        for buffer in outputs:
            stored = traffic[buffer.name].distinct_bytes_stored
            if stored == buffer.data.nbytes or buffer.name in self.executor.may_leave_unwritten:
                continue
            assert buffer.written is not None
            first = int(np.argmin(buffer.written))
            raise self._fault(
                "never written",
                f"leaves {buffer.data.nbytes - stored} of {buffer.data.nbytes} bytes of output "
                f"`{buffer.name}` unwritten, the first of them byte {first}",
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


@cache
def compile_source(source: Source) -> Path:
    """The shared object of a kernel that passed the lint and both readings; raises KernelFault."""
    lint.check(source)
    compiler = _compiler()
    try:
        made = compiler.shared_object(to_cpp(source))
    except CompileError as error:
        raise compile_fault("compile", source, str(error)) from None
    try:
        address_space.check(source, compiler)
    except CompileError as error:
        raise compile_fault("address space", source, str(error)) from None
    return made


def compile_fault(kind: str, source: Source, messages: str) -> KernelFault:
    """The compiler's first error, at the kernel's line."""
    found = re.search(rf"{re.escape(FILE_NAME)}:(\d+):\d+: (?:fatal )?error: (.*)", messages)
    if found is None:
        return KernelFault(kind, source.kernel, f"does not compile:\n{messages}")
    inner = re.search(r"(?<=: error: ).*", messages)
    message = inner[0] if inner else found[2]
    return KernelFault(kind, source.kernel, f"does not compile: {message}", _place(source, found))


def _place(source: Source, found: re.Match[str]) -> Place | None:
    return source.place(int(found[1]))


def _located(source: Source, lines: LineTable, fault: launch.Fault) -> KernelFault:
    def name_place(found: re.Match[str]) -> str:
        return f"at {source.place(lines.line(int(found[1], 16)))}"

    message = re.sub(r"@([0-9a-f]+)", name_place, fault.message)
    return KernelFault(fault.kind, source.kernel, message, source.place(lines.line(fault.address)))


@cache
def _compiler() -> Compiler:
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError(NO_COMPILER)
    return compiler


@cache
def _runtime() -> Path:
    return _compiler().runtime()


def _bytes_of(array: mx.array) -> Bytes:
    return np.array(array.reshape(-1).view(mx.uint8), dtype=np.uint8, copy=True)


def _first_element(array: mx.array) -> mx.array:
    return array.reshape(-1)[:1].reshape((1,) * array.ndim)


def _output(name: str, shape: Sequence[int], dtype: mx.Dtype, init_value: float | None) -> Buffer:
    num_bytes = math.prod(shape) * dtype.size
    written = np.zeros(num_bytes, np.uint8)
    if init_value is None:
        poison = np.full(num_bytes, 0xFF, np.uint8)  # NaN in every floating type
        return Buffer(name, poison, launch.OUTPUT, written)
    filled = mx.full(tuple(shape), init_value, dtype)
    return Buffer(name, _bytes_of(filled), launch.INITIALISED_OUTPUT, written)


def _remember_unwritten(array: mx.array, buffer: Buffer) -> None:
    assert buffer.written is not None
    if buffer.kind == launch.INITIALISED_OUTPUT or buffer.written.all():
        return
    key = id(array)
    forget = weakref.ref(array, lambda _: _partly_written.pop(key, None))
    _partly_written[key] = forget, buffer.written


def _written_bytes(array: mx.array) -> Bytes | None:
    known = _partly_written.get(id(array))
    return known[1] if known and known[0]() is array else None

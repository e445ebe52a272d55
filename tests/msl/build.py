"""A kernel's way from MLX's text to a shared object, and faults traced back to that text."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from . import address_space, lint
from .compiler import NO_COMPILER, CompileError, Compiler, find_compiler
from .fault import KernelFault
from .launch import Fault
from .line_table import LineTable
from .source import Source
from .translation import FILE_NAME, to_cpp


@cache
def compile_source(source: Source) -> Path:
    """The shared object of a kernel that passed the lint and both readings; raises KernelFault."""
    lint.check(source)
    try:
        made = compiler().shared_object(to_cpp(source))
    except CompileError as error:
        raise _compile_fault("compile", source, str(error)) from None
    try:
        address_space.check(source, compiler())
    except CompileError as error:
        raise _compile_fault("address space", source, str(error)) from None
    return made


@cache
def runtime() -> Path:
    return compiler().runtime()


def launch_fault(source: Source, compiled: Path, fault: Fault) -> KernelFault:
    """A fault of the runtime's, with the launcher's lines."""
    line = fault.line or LineTable(compiled, FILE_NAME).line(fault.address)
    message = re.sub(r"#(\d+)", lambda found: f"at {source.place(int(found[1]))}", fault.message)
    return KernelFault(fault.kind, source.kernel, message, source.place(line))


@cache
def compiler() -> Compiler:
    found = find_compiler()
    if found is None:
        raise RuntimeError(NO_COMPILER)
    return found


def _compile_fault(kind: str, source: Source, messages: str) -> KernelFault:
    """The compiler's first error, at the kernel's line: the error's own, or the one that led to
    an error in a header."""
    error = re.search(r"^(.*):\d+:\d+: (?:fatal )?error: (.*)", messages, re.MULTILINE)
    if error is None:
        return KernelFault(kind, source.kernel, f"does not compile:\n{messages}")
    line = re.compile(rf"{re.escape(FILE_NAME)}:(\d+):").search(messages, error.start())
    place = source.place(int(line[1])) if line else None
    return KernelFault(kind, source.kernel, f"does not compile: {error[2]}", place)

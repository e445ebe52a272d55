"""The text that MLX itself would hand to the Metal compiler."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from .fault import Place

_capturing = threading.Lock()


@dataclass(frozen=True)
class Parameter:
    """One argument of the generated function: a buffer, or one of Metal's built-in values."""

    type: str
    name: str
    attribute: str

    @property
    def is_buffer(self) -> bool:
        return self.attribute.startswith("buffer(")


@dataclass(frozen=True)
class Source:
    """MLX's generated `text` for one kernel, with the `header` and `body` it was made from."""

    kernel: str
    text: str
    header: str
    body: str

    @cached_property
    def _signature(self) -> re.Match[str]:
        pattern = r"\[\[kernel\]\] void (\w+)\(\n(.*?)\) \{\n"
        found = re.compile(pattern, re.DOTALL).search(self.text, len(self.header))
        if found is None:
            raise ValueError(f"no kernel signature in the text that MLX generated:\n{self.text}")
        return found

    @property
    def function(self) -> str:
        return self._signature[1]

    @cached_property
    def parameters(self) -> list[Parameter]:
        pattern = r"^\s*(.+?)\s*\b(\w+) \[\[(.+?)\]\],?$"
        lines = re.findall(pattern, self._signature[2], re.MULTILINE)
        return [Parameter(*fields) for fields in lines]

    @cached_property
    def instance(self) -> str:
        """The function with its template arguments, as MLX instantiates it."""
        found = re.search(rf"decltype\(({self.function}<.*>)\)", self.text)
        return found[1] if found else self.function

    @cached_property
    def code(self) -> str:
        """The text with blanks for comments, every line where it was."""
        return without_comments(self.text)

    @cached_property
    def _body_line(self) -> int:
        """The line of the text on which the body begins, counted from 1."""
        return self.text.count("\n", 0, self._signature.end()) + 1

    def place(self, line: int) -> Place | None:
        """The place in header or body of a line of the text; None beyond its end."""
        lines = self.text.split("\n")
        if not 1 <= line <= len(lines):
            return None
        text = lines[line - 1]
        if line >= self._body_line:
            return Place("source", line - self._body_line + 1, text)
        part = "header" if line <= self.header.count("\n") + bool(self.header) else "signature"
        return Place(part, line, text)


def without_comments(text: str) -> str:
    def blank(found: re.Match[str]) -> str:
        return found[0] if found[0].startswith('"') else re.sub(r"[^\n]", " ", found[0])

    return re.sub(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", blank, text, flags=re.DOTALL)


def generate(kernel: Callable[..., Any], inputs: Sequence[mx.array], **call: Any) -> str:
    """What `kernel`, a result of mx.fast.metal_kernel, prints with verbose=True.

    Calling such a kernel needs Metal, tracing it for export does not, and prints the same.
    """

    def traced(*arrays: mx.array) -> list[mx.array]:
        return kernel(inputs=list(arrays), verbose=True, **call)  # type: ignore[no-any-return]

    with tempfile.TemporaryDirectory() as folder:
        exported = os.path.join(folder, "kernel.mlxfn")
        printed = _capture_output(lambda: mx.export_function(exported, traced, *inputs))
    found = re.search(r"```\n(.*)\n```\n", printed, re.DOTALL)
    if found is None:
        raise ValueError(f"MLX printed no kernel source, but: {printed!r}")
    return found[1]


def _capture_output(action: Callable[[], None]) -> str:
    """What `action` writes to file descriptor 1; MLX prints from C++."""
    with _capturing, tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        saved = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            action()
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        file.seek(0)
        return file.read().decode()

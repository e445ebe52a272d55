"""What the executor raises."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A line of the kernel.

    part: "source" or "header", whose line it is as the launcher wrote them, or "signature", which
        MLX wrote: then it is the line of MLX's whole text.
    """

    part: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.part} line {self.line}: {self.text.strip()}"


class KernelFault(Exception):
    """A kernel did, or is written as, something that Metal forbids or leaves undefined.

    kind: "out of bounds", "misaligned", "uninitialised", "race", "divergence", "write to input",
    "overflow", "division", "never written", "limit", "copy", "time", "compile", "address space"
    or "not in Metal".
    place: where in the launcher's text, if it is in one place.
    """

    def __init__(self, kind: str, kernel: str, message: str, place: Place | None = None) -> None:
        self.kind = kind
        self.kernel = kernel
        self.place = place
        where = f"\n  at {place}" if place else ""
        super().__init__(f"{kind}: kernel `{kernel}` {message}{where}")

    @property
    def line(self) -> int | None:
        """The line in the launcher's source or header, counted from 1."""
        return self.place.line if self.place else None

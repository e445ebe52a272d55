"""Plants one fault at a time in the project's kernels and sees whether the checks notice.

    python tests/msl/mutants.py [file.metal ...]

prints each mutant of the lists beside it with what caught it, and exits with 1 unless all were.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # this file's folder would hide modules that have its files' names
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from kernel_cases import EXECUTOR, Factory
from kernel_checks import CHECKS, what_is_wrong
from prefill_checks import PREFILL_CHECKS
from quantized_checks import QUANTIZED_CHECKS

from mlx_paged.kernels import metal
from msl import NO_COMPILER, find_compiler

KINDS = ("kernel", "prefill", "quantized")
LISTS = [Path(__file__).with_name(f"{kernel}_mutants.diff") for kernel in KINDS]


@dataclass(frozen=True)
class Mutant:
    """Lines of a kernel's code, and what stands in their place."""

    file: str
    name: str
    old: tuple[str, ...]
    new: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"

    def plant(self, text: str) -> str:
        """`text` with the fault. Raises ValueError unless there is exactly one place for it."""
        lines = text.split("\n")
        codes = tuple(map(code, lines))
        size = len(self.old)
        places = [i for i in range(len(codes)) if codes[i : i + size] == self.old]
        if len(places) != 1:
            raise ValueError(f"{self} has {len(places)} places, not one: {self.old}")
        lines[places[0] : places[0] + size] = self.new
        return "\n".join(lines)


@dataclass(frozen=True)
class Mutating:
    """A factory that makes kernels from texts with one fault planted."""

    mutant: Mutant
    factory: Factory = EXECUTOR.metal_kernel

    def __call__(self, *, source: str, header: str = "", **arguments: Any) -> Any:
        text = metal.read(self.mutant.file)
        faulty = self.mutant.plant(text)
        return self.factory(
            source=source.replace(text, faulty), header=header.replace(text, faulty), **arguments
        )


def code(line: str) -> str:
    """A line without its indentation and comment."""
    return re.sub(r"\s*//.*", "", line).strip()


def listed(text: str) -> Iterator[Mutant]:
    """The mutants of a list: see kernel_mutants.diff."""
    for part in text.split("@@ ")[1:]:
        file, _, faults = part.partition(" @@")
        for fault in re.split(r"^# ", faults, flags=re.MULTILINE)[1:]:
            name, *lines = fault.splitlines()
            old, new = (tuple(line[2:] for line in lines if line.startswith(sign)) for sign in "-+")
            yield Mutant(file, name, old, new)


CHECKS_OF = {
    "prefill.metal": PREFILL_CHECKS,
    "matrix.metal": PREFILL_CHECKS,
    "staging.metal": PREFILL_CHECKS,
    "quantized_tile.metal": QUANTIZED_CHECKS,
    "decode.metal": CHECKS + QUANTIZED_CHECKS,
}
MUTANTS = tuple(mutant for file in LISTS for mutant in listed(file.read_text()))


def caught_by(mutant: Mutant) -> str | None:
    """What notices the mutant, None if nothing does."""
    return what_is_wrong(Mutating(mutant), CHECKS_OF.get(mutant.file, CHECKS))


def main(files: list[str]) -> int:
    if find_compiler() is None:
        print(NO_COMPILER)
        return 1
    wrong = what_is_wrong(checks=CHECKS + PREFILL_CHECKS + QUANTIZED_CHECKS)
    if wrong:
        print(f"the kernels as they are don't pass: {wrong}")
        return 1
    planted = [mutant for mutant in MUTANTS if not files or mutant.file in files]
    caught = 0
    for mutant in planted:
        by = caught_by(mutant)
        caught += by is not None
        first_line = (by or "NOT CAUGHT").splitlines()[0]
        print(f"{mutant!s:58} {first_line[:100]}", flush=True)
    print(f"caught {caught} / planted {len(planted)}")
    return 0 if caught == len(planted) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Plants one fault at a time in the project's kernels and sees whether the checks notice.

    python tests/msl/mutants.py [name ...]

prints each mutant with what caught it, and exits with 1 unless all were caught.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the folder of this file would hide modules of the same names
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from kernel_cases import EXECUTOR, Factory
from kernel_checks import what_is_wrong
from mlx_paged.kernels import metal
from msl.mutant_list import MUTANTS, Mutant


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


def caught_by(mutant: Mutant) -> str | None:
    """What notices the mutant, None if nothing does."""
    return what_is_wrong(Mutating(mutant))


def main(names: list[str]) -> int:
    wrong = what_is_wrong()
    if wrong:
        print(f"the kernels as they are don't pass: {wrong}")
        return 1
    planted = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    caught = 0
    for mutant in planted:
        by = caught_by(mutant)
        caught += by is not None
        first_line = (by or "NOT CAUGHT").splitlines()[0]
        print(f"{mutant.file:14} {mutant.name:44} {first_line[:110]}", flush=True)
    print(f"caught {caught} / planted {len(planted)}")
    return 0 if caught == len(planted) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

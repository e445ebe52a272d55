"""Every fault planted in the kernels is noticed; `python tests/msl/mutants.py` says by what."""

from __future__ import annotations

import pytest
from kernel_cases import require_compiler
from msl.mutants import MUTANTS, Mutant, caught_by, main

from mlx_paged.kernels import metal

require_compiler()


def test_there_are_many_and_each_is_another() -> None:
    texts = {(mutant.file, mutant.plant(metal.read(mutant.file))) for mutant in MUTANTS}
    assert len(texts) == len(MUTANTS) >= 30


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_planted_fault_is_noticed(mutant: Mutant) -> None:
    assert caught_by(mutant) is not None


def test_what_does_no_harm_is_not_called_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    harmless = Mutant("merge.metal", "harmless", ("float sum = 0;",), ("float sum = 0 + 0;",))
    monkeypatch.setattr("msl.mutants.MUTANTS", (harmless,))
    assert main([]) == 1
    assert capsys.readouterr().out.endswith("NOT CAUGHT\ncaught 0 / planted 1\n")

"""Blocks that parallel samples and beams hold together, and would hold each on its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mlx_paged.blocks import BlockPool, Sequence

# For each step which beam each beam continues: one run of a search.
Parents = list[list[int]]


@dataclass
class Count:
    """Blocks, added up over steps."""

    shared: int = 0
    alone: int = 0

    @property
    def saved(self) -> float:
        """Share of the blocks that sharing saves."""
        return 1 - self.shared / self.alone if self.alone else 0.0

    def add(self, tables: Iterable[list[int]]) -> None:
        """Take in the block tables of one step."""
        in_use: set[int] = set()
        for table in tables:
            in_use.update(table)
            self.alone += len(table)
        self.shared += len(in_use)


def sample(count: Count, prompt: int, answer: int, num_samples: int, block_size: int) -> None:
    """Let samples of one prompt grow by a token a step, all to one length."""
    sequences = _prefilled(prompt, answer, num_samples, block_size)
    sequences += [sequences[0].fork() for _ in range(num_samples - 1)]
    for _ in range(answer - 1):
        _grow(sequences)
        count.add(sequence.block_table for sequence in sequences)


def search(
    count: Count, prompt: int, answer: int, parents: Iterator[list[int]], block_size: int
) -> None:
    """Let beams grow by a token a step, each from the beam that `parents` names."""
    beams: list[Sequence] = []
    for _ in range(answer - 1):
        step = next(parents)
        beams = beams or _prefilled(prompt, answer, len(step), block_size)
        beams = _continue(beams, step)
        _grow(beams)
        count.add(beam.block_table for beam in beams)


def genealogy(runs: list[Parents], first: int) -> Iterator[list[int]]:
    """The steps of a recorded search; of the next ones after its end, but for their beginnings.

    A search begins with one beam, so its first step has all beams continue that.
    """
    yield runs[first % len(runs)][0]
    while True:
        yield from runs[first % len(runs)][1:]
        first += 1


def _prefilled(prompt: int, answer: int, width: int, block_size: int) -> list[Sequence]:
    """One sequence with a stored prompt, in a pool that has room for `width` whole answers."""
    pool = BlockPool((width + 1) * -(-(prompt + answer) // block_size), block_size)
    sequence = Sequence(pool)
    sequence.reserve(prompt)
    sequence.num_cached_tokens = prompt
    return [sequence]


def _continue(beams: list[Sequence], parents: list[int]) -> list[Sequence]:
    """Each parent's own sequence for its first child, forks for others; who has none is freed."""
    children: list[Sequence] = []
    used: set[int] = set()
    for parent in parents:
        children.append(beams[parent].fork() if parent in used else beams[parent])
        used.add(parent)
    for i, beam in enumerate(beams):
        if i not in used:
            beam.free()
    return children


def _grow(sequences: list[Sequence]) -> None:
    for sequence in sequences:
        sequence.reserve(1)
        sequence.num_cached_tokens += 1

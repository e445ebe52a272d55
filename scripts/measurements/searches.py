"""Samples and beam searches on the engine, with every step's blocks counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from measurements.lengths import DATA
from measurements.sharing import Count, Parents
from mlx_paged.blocks import Sequence
from mlx_paged.engine.beam_search import Beam, BeamSearch
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.params import BeamSearchParams, SamplingParams

RECORDED = DATA / "beam_parents.json"
PROMPTS = (
    "Why is the sky blue?",
    "Write a short letter to a friend who is moving to another city.",
    "Explain how a bicycle stays upright, for a child of ten.",
    "List three ways to save water at home, and say why each of them works.",
    "What is the difference between a virus and a bacterium?",
    "Tell a story about a lighthouse keeper who finds a message in a bottle.",
)


class CountedSearch(BeamSearch):
    """A beam search that notes who continued whom, and counts blocks after each step."""

    def __init__(self, engine: Engine, params: BeamSearchParams) -> None:
        super().__init__(engine, params)
        self.parents: Parents = []
        self.count = Count()

    def _fork(self, beams: list[Beam], live: list[tuple[int, int, float]]) -> list[Beam]:
        self.parents.append([parent for parent, _, _ in live])
        return super()._fork(beams, live)

    def _forward(self, sequences: list[Sequence], max_tokens: int) -> Any:
        logits = super()._forward(sequences, max_tokens)
        if self.parents:
            self.count.add(sequence.block_table for sequence in sequences)
        return logits


def search(engine: Engine, prompt: list[int], width: int, num_tokens: int) -> CountedSearch:
    params = BeamSearchParams(beam_width=width, max_tokens=num_tokens, ignore_eos=True)
    counted = CountedSearch(engine, params)
    counted.run("counted", prompt)
    return counted


def sample(engine: Engine, prompt: list[int], num_samples: int, num_tokens: int) -> Count:
    """Samples at temperature 1; counted once all have stored a token of their own."""
    params = SamplingParams(
        n=num_samples, temperature=1, seed=0, max_tokens=num_tokens, ignore_eos=True
    )
    request = engine.add_request("counted", prompt, params)
    count = Count()
    while engine.has_work():
        engine.step()
        sequences = [sample.sequence for sample in request.samples]
        if min(s.num_cached_tokens for s in sequences) > len(prompt):
            count.add(s.block_table for s in sequences)
    return count


def read_recorded(file: Path = RECORDED) -> dict[int, list[Parents]]:
    """Recorded searches by width."""
    recorded = json.loads(file.read_text())["parents"]
    return {
        int(width): [[[int(c) for c in step] for step in run.split()] for run in runs]
        for width, runs in recorded.items()
    }

"""Blocks of samples and beams: the library's against sets of what each block holds."""

import itertools
import random

import _scripts  # noqa: F401
import beam
import pytest
from measurements import searches, sharing
from measurements.sharing import Count
from tiny_engine import make_engine


def contents(token_ids, block_size):
    """What each block holds together with all before it."""
    return [tuple(token_ids[: i + block_size]) for i in range(0, len(token_ids), block_size)]


def counted(steps, block_size):
    """(distinct blocks, all blocks) of sequences whose every own token is unique, by step."""
    shared = alone = 0
    for sequences in steps:
        blocks = [contents(token_ids, block_size) for token_ids in sequences]
        shared += len(set(itertools.chain.from_iterable(blocks)))
        alone += sum(map(len, blocks))
    return shared, alone


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("prompt", "answer"), [(3, 9), (16, 20), (37, 2), (5, 1)])
def test_samples_share_the_prompt_s_full_blocks(prompt, answer, block_size):
    for width in (1, 2, 5):
        count = Count()
        sharing.sample(count, prompt, answer, width, block_size)
        steps = [
            [
                [("prompt", i) for i in range(prompt)] + [(w, i) for i in range(t)]
                for w in range(width)
            ]
            for t in range(1, answer)
        ]
        assert (count.shared, count.alone) == counted(steps, block_size)


def random_parents(rng, width, num_steps):
    return [[0] * width] + [[rng.randrange(width) for _ in range(width)] for _ in range(num_steps)]


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_beams_share_what_they_have_in_common(width, block_size):
    rng = random.Random(width)
    for prompt, answer in ((3, 30), (16, 9), (21, 2)):
        parents = random_parents(rng, width, answer)
        beams, steps = [[("prompt", i) for i in range(prompt)]], []
        for number, step in enumerate(parents[: answer - 1]):
            beams = [[*beams[parent], (number, i)] for i, parent in enumerate(step)]
            steps.append(beams)
        count = Count()
        sharing.search(count, prompt, answer, iter(parents), block_size)
        assert (count.shared, count.alone) == counted(steps, block_size)


def test_a_search_played_back_holds_the_blocks_of_the_real_one():
    engine = make_engine(prefix_caching="off")
    prompt = [7, 3, 9, 1, 4, 4]
    real = searches.search(engine, prompt, 3, 20)
    played = Count()
    sharing.search(played, len(prompt), 20, iter(real.parents), 4)
    assert played == real.count
    assert 0 < real.count.saved < 2 / 3


def test_samples_on_the_engine_share_as_simulated():
    engine = make_engine(prefix_caching="off")
    real, played = searches.sample(engine, [5] * 23, 4, 30), Count()
    sharing.sample(played, 23, 30, 4, 4)
    assert real.saved == pytest.approx(played.saved, abs=0.02)


def test_a_genealogy_goes_on_in_the_next_run_without_its_beginning():
    runs = [[[0, 0], [0, 1]], [[0, 0], [1, 1], [1, 0]]]
    steps = list(itertools.islice(sharing.genealogy(runs, 1), 6))
    assert steps == [[0, 0], [1, 1], [1, 0], [0, 1], [1, 1], [1, 0]]


def test_recorded_searches_begin_with_one_beam():
    recorded = searches.read_recorded()
    assert set(recorded) == set(beam.WIDTHS)
    for width, runs in recorded.items():
        assert len(runs) == len(searches.PROMPTS)
        for run in runs:
            assert run[0] == [0] * width
            assert all(len(step) == width and max(step) < width for step in run)


def test_more_samples_and_beams_save_more_and_beams_most(capsys):
    beam.main(["--requests", "8"])
    assert "Alpaca, beams" in capsys.readouterr().out
    args = beam.parse_arguments(["--requests", "8"])
    for figures in beam.measure(args).values():
        for saved in figures["saved"].values():
            assert 0 < saved[2] < saved[4] < saved[6]
        assert all(
            figures["saved"]["samples"][w] < figures["saved"]["beams"][w] < 1 - 1 / w
            for w in beam.WIDTHS
        )

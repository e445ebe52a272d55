"""The text's examples on the engine: samples share a prompt, requests share a beginning."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_engine import finish, make_engine, make_prompts, mlx_lm_answer, run

from mlx_paged.engine.params import SamplingParams

SCRIPTS = Path(__file__).parents[1] / "scripts"


def run_script(name, *args):
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / name), *args, "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_four_samples_of_a_44_token_prompt():
    engine = make_engine(block_size=16)
    prompt = list(range(100, 144))
    params = SamplingParams(temperature=1.0, seed=0, n=4, max_tokens=64)
    request = engine.add_request("0", prompt, params)
    tables = []
    while engine.has_work():
        if all(sample.is_running for sample in request.samples):
            tables = [list(sample.sequence.block_table) for sample in request.samples]
        engine.step()
        engine.check_integrity()
    assert tables == [
        [0, 1, 3, 6, 10, 14, 18],
        [0, 1, 4, 7, 11, 15, 19],
        [0, 1, 5, 8, 12, 16, 20],
        [0, 1, 2, 9, 13, 17, 21],
    ]
    counts = engine.stats().counts
    assert (counts.max_blocks_used, counts.num_copies) == (22, 3)
    # Each again without the others, in one sequence's own blocks.
    for sample in request.samples:
        alone = make_engine(block_size=16, prefix_caching="off")
        alone.add_request("0", prompt, SamplingParams(temperature=1.0, seed=0, max_tokens=64))
        [first] = alone.scheduler.waiting
        first.index = sample.index
        alone.answers.begin(first)
        assert finish(alone)["0"].outputs[0].token_ids == sample.output_token_ids


@pytest.mark.parametrize(
    ("prefix_caching", "reused"), [("hash", [0, 80, 0]), ("radix", [0, 85, 3]), ("off", [0, 0, 0])]
)
def test_b_shares_85_tokens_with_a_and_c_shares_3(prefix_caching, reused):
    a = list(range(96))
    b = a[:85] + list(range(120, 131))
    c = a[:3] + list(range(140, 247))
    engine = make_engine(block_size=16, prefix_caching=prefix_caching)
    params = SamplingParams(temperature=0, max_tokens=6)
    found = []
    for prompt in (a, b, c):
        request = engine.add_request("0", prompt, params)
        assert finish(engine)["0"].outputs[0].token_ids == mlx_lm_answer(prompt, 6)
        found.append(request.metrics.num_cached_tokens)
    assert found == reused


@pytest.mark.parametrize("prefix_caching", ["hash", "radix"])
def test_a_conversation_finds_its_own_earlier_turns(prefix_caching):
    """Each turn's prompt is the one before, its answer, and a new question."""
    engine = make_engine(prefix_caching=prefix_caching, num_blocks=64)
    prompt = make_prompts(1, max_length=30)[0]
    params = SamplingParams(temperature=0, max_tokens=7)
    num_stored = 0
    for turn in range(4):
        before = engine.stats().prefix.num_saved_tokens
        [[answer]] = run(engine, [prompt], params)
        assert answer == mlx_lm_answer(prompt, 7)
        assert engine.stats().prefix.num_saved_tokens - before == num_stored
        # Full blocks of all but the last token, whose K/V nobody needed.
        num_stored = (len(prompt) + 6) // 4 * 4
        prompt = [*prompt, *answer, 10 + turn, 20 + turn]


def test_a_crowd_in_a_quarter_of_its_blocks_answers_as_alone():
    result = run_script("crowded.py", "--scale", "0.2", "--block-size", "4")
    assert result["num_finished"] == result["num_same"] == 64
    assert result["num_preemptions"] > 0 and result["num_lost_blocks"] == 0
    assert result["num_blocks"] < 0.3 * result["num_blocks_wanted"]


def test_overhead_prints_what_it_promises():
    result = run_script("overhead.py", "--seqs", "8", "--tokens", "64", "--steps", "5")
    for name in ("step_ms", "allocator_us_per_sequence", "admit_mtokens_per_s"):
        assert result[name] > 0

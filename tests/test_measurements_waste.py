"""Reserved and held slots: sums in closed form against the steps counted one by one."""

import json
import math
import random

import _scripts  # noqa: F401
import blocksize
import pytest
import waste
from measurements import hub, lengths, reservations

from mlx_paged.blocks import BlockPool, Sequence

PAIRS = [(1, 1), (4, 7), (15, 1), (16, 16), (17, 33), (100, 5), (3, 130)]


def stepwise(pairs, reserved):
    """Held and reserved slots, added up step by step; `reserved` of (p, a, held)."""
    steps = [(p, a, p + t) for p, a in pairs for t in range(1, a + 1)]
    return sum(held for *_, held in steps), sum(reserved(*step) for step in steps), len(steps)


@pytest.mark.parametrize("block_size", [1, 2, 7, 16, 64])
def test_uses_equal_the_sums_over_steps(block_size):
    expected = {
        "max": lambda p, a, held: 200,
        "pow2": lambda p, a, held: p + 2 ** math.ceil(math.log2(a)),
        "oracle": lambda p, a, held: p + a,
        "paged": lambda p, a, held: block_size * math.ceil(held / block_size),
    }
    uses = reservations.uses(PAIRS, window=200, block_size=block_size)
    assert set(uses) == set(expected)
    for name, reserved in expected.items():
        held, slots, steps = stepwise(PAIRS, reserved)
        assert uses[name].share == pytest.approx(held / slots, rel=1e-12)
        assert uses[name].slots == pytest.approx(slots / steps, rel=1e-12)
        assert uses[name].at_once(10_000) == int(10_000 // (slots / steps))


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_paged_slots_are_those_that_a_sequence_takes(block_size):
    for p, a in PAIRS:
        pool = BlockPool(200, block_size)
        sequence = Sequence(pool)
        sequence.reserve(p)
        sequence.num_cached_tokens = p
        num_slots = 0
        for _ in range(a):
            sequence.reserve(1)
            sequence.num_cached_tokens += 1
            num_slots += block_size * len(sequence.block_table)
        assert reservations.num_slots_paged(p, a, block_size) == num_slots


def test_standard_error_is_the_spread_of_many_samples():
    rng = random.Random(0)
    everything = [(rng.randrange(1, 500), rng.randrange(1, 300)) for _ in range(20_000)]
    samples = [reservations.uses(rng.choices(everything, k=400))["pow2"] for _ in range(150)]
    mean = sum(use.share for use in samples) / len(samples)
    spread = math.sqrt(sum((use.share - mean) ** 2 for use in samples) / len(samples))
    assert samples[0].share_error == pytest.approx(spread, rel=0.25)


def test_figures_are_near_the_published_ones(capsys):
    waste.main(["--json"])
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"ShareGPT", "Alpaca"}
    for figures in result.values():
        assert figures["num_requests"] == 5000
        for policy in figures["policies"].values():
            assert abs(policy["difference_in_errors"]) < 2
            assert policy["at_once"] == pytest.approx(policy["published"]["at_once"], rel=0.08)


def test_other_windows_are_not_compared_with_the_published(capsys):
    waste.main(["--json", "--window", "4096", "--requests", "10"])
    figures = json.loads(capsys.readouterr().out)["ShareGPT"]["policies"]["max"]
    assert "published" not in figures
    assert figures["slots"] == 4096


def test_block_sizes_equal_the_sums_over_steps_and_reuse_whole_blocks(capsys, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(PAIRS))
    blocksize.main(["--json", "--lengths", str(file)])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["block_size"] for row in rows] == list(blocksize.SIZES)
    for row in rows:
        size = row["block_size"]
        held, slots, _ = stepwise(PAIRS, lambda p, a, held, b=size: b * math.ceil(held / b))
        figures = row["lists"]["mine"]
        assert figures["share"] == pytest.approx(held / slots, rel=1e-12)
        blocks = [math.ceil((p + a) / size) for p, a in PAIRS]
        assert figures["blocks"] == pytest.approx(sum(blocks) / len(PAIRS))
        assert row["reused_by_hash"] == 85 // size * size
        # The tree holds full blocks of the first prompt, and is exact within those.
        assert row["reused_by_radix"] == min(85, 96 // size * size)


def test_block_sizes_are_near_the_published_ones(capsys):
    blocksize.main(["--json"])
    for row in json.loads(capsys.readouterr().out)["rows"]:
        assert row["reused_by_hash"] == row["published_reused"]
        for figures in row["lists"].values():
            for name, rounding in (("share", 5e-4), ("blocks", 0.05)):
                apart = abs(figures[name] - figures["published"][name])
                assert apart < rounding + 2 * math.sqrt(2) * figures[f"{name}_error"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[[3, 4], [5]]", "entry 1 of .* is \\[5\\]"),
        ("[[3, 0]]", "at least 1"),
        ("[]", "no list of lengths"),
        ("[[3, 4]", "not valid JSON"),
    ],
)
def test_bad_lengths_are_refused_with_the_entry(tmp_path, content, complaint):
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=complaint):
        lengths.read_pairs(file)


def test_the_hub_s_records_become_pairs_as_the_committed_lists_were_made():
    def tokenize(texts, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [text.split() for text in texts]}

    turns = [{"from": "gpt", "value": "a b"}, {"from": "human", "value": "c"}, {"value": "d e f"}]
    records = [{"conversations": turns}, {"conversations": turns[:1]}, {"conversations": []}]
    assert hub.count_tokens(tokenize, list(hub.sharegpt_texts(records))) == [(2, 1)]
    records = [
        {"instruction": "a b", "input": "c", "output": "d"},
        {"instruction": "a", "input": "", "output": "b c"},
    ]
    assert hub.count_tokens(tokenize, list(hub.alpaca_texts(records)), 1) == [(3, 1), (1, 2)]


def test_drawing_keeps_what_the_benchmark_keeps():
    kept = [(4, 4), (1024, 1024), (1000, 4), (5, 600)]
    dropped = [(3, 9), (9, 3), (1025, 4), (1024, 1025)]
    assert sorted(lengths.draw(kept + dropped)) == sorted(kept)
    assert lengths.draw(kept * 10, 5) == lengths.draw(kept * 10)[:5]

"""Beams that fork and free blocks find what beams over copied contiguous caches find."""

import copy
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny_engine import GREEDY, make_engine, make_prompts, mlx_lm_model, run

from mlx_paged.cache import step
from mlx_paged.engine import beam_search
from mlx_paged.engine.beam_search import BeamSearch
from mlx_paged.engine.params import BeamSearchParams


def reference(prompt, params, end_token_ids=()):
    """Plain beam search: a contiguous cache per beam, copied whole, and sorting in float64."""
    model, width, penalty = mlx_lm_model(), params.beam_width, params.length_penalty

    def logprobs(token_ids, cache):
        logits = np.array(model(mx.array([token_ids]), cache=cache)[0, -1], np.float64)
        shifted = logits - logits.max()
        return shifted - np.log(np.exp(shifted).sum())

    cache = make_prompt_cache(model)
    beams = [([], 0.0, cache, logprobs(prompt, cache))]
    done = []
    for length in range(1, params.max_tokens + 1):
        candidates = [
            (total + lp[token], tokens, int(token), cache)
            for tokens, total, cache, lp in beams
            for token in np.argsort(-lp)[: 2 * width]
        ]
        candidates.sort(key=lambda c: -c[0])
        live = []
        for total, tokens, token, cache in candidates[: 2 * width]:
            if token in end_token_ids:
                done.append((total / length**penalty, [*tokens, token], "stop"))
            elif len(live) < width:
                live.append((total, [*tokens, token], cache))
        done.sort(key=lambda d: -d[0])
        if length == params.max_tokens:
            done += [(total / length**penalty, tokens, "length") for total, tokens, _ in live]
            break
        if len(done) >= width:
            attainable = live[0][0] / (params.max_tokens if penalty > 0 else length) ** penalty
            if params.early_stopping or attainable <= done[width - 1][0]:
                break
        beams = []
        for total, tokens, cache in live:
            own = copy.deepcopy(cache)
            beams.append((tokens, total, own, logprobs(tokens[-1:], own)))
    done.sort(key=lambda d: -d[0])
    return done[:width]


def search(prompt, params, end_token_ids=(), engine=None, **options):
    engine = engine or make_engine(**options)
    if end_token_ids:
        engine.tokenizer = SimpleNamespace(
            eos_token_ids=set(end_token_ids), decode=lambda token_ids: ""
        )
    output = BeamSearch(engine, params).run("beams", prompt)
    engine.check_integrity()
    assert engine.pool.blocks.num_free_blocks == engine.pool.num_blocks
    return output.outputs


def assert_same(found, expected, length_penalty):
    assert [o.token_ids for o in found] == [tokens for _, tokens, _ in expected]
    assert [o.finish_reason for o in found] == [reason for _, _, reason in expected]
    for output, (score, _, _) in zip(found, expected, strict=True):
        own = output.cumulative_logprob / len(output.token_ids) ** length_penalty
        assert own == pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -0.5])
def test_beams_equal_those_over_contiguous_caches(width, length_penalty):
    params = BeamSearchParams(beam_width=width, max_tokens=8, length_penalty=length_penalty)
    for prompt in make_prompts(2, max_length=12, seed=width):
        assert_same(search(prompt, params), reference(prompt, params), length_penalty)


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [0.6, 2.0])
def test_beams_that_end_early_equal_those_over_contiguous_caches(early_stopping, length_penalty):
    ends = tuple(range(0, 260, 4))
    params = BeamSearchParams(4, 10, length_penalty, early_stopping)
    reasons = set()
    for prompt in make_prompts(3, max_length=12, seed=3):
        expected = reference(prompt, params, ends)
        assert_same(search(prompt, params, ends), expected, length_penalty)
        reasons |= {reason for _, _, reason in expected}
    assert "stop" in reasons


@pytest.mark.parametrize("seed", [1, 5, 9])
def test_the_search_goes_on_while_a_longer_answer_could_still_win(seed):
    """Prompts with which a bound at the present length would end the search too soon."""
    ends = tuple(range(0, 260, 2))
    params = BeamSearchParams(beam_width=3, max_tokens=10)
    [prompt] = make_prompts(1, max_length=8, seed=seed)
    assert_same(search(prompt, params, ends), reference(prompt, params, ends), 1.0)


def test_a_single_beam_is_greedy():
    prompt = [1, 2, 3]
    params = BeamSearchParams(beam_width=1, max_tokens=12)
    assert [search(prompt, params)[0].token_ids] == run(make_engine(), [prompt], GREEDY)[0]


def test_beams_share_the_blocks_of_what_they_have_in_common(monkeypatch):
    engine = make_engine()
    used = []

    def spy(model, pool, sequences, *args):
        logits = step(model, pool, sequences, *args)
        tables = [sequence.block_table for sequence in sequences]
        used.append((len({b for table in tables for b in table}), sum(map(len, tables))))
        pool.blocks.check_integrity(tables)
        return logits

    monkeypatch.setattr(beam_search, "step", spy)
    search(list(range(30)), BeamSearchParams(beam_width=4, max_tokens=16), engine=engine)
    assert all(distinct <= 7 + 4 * 5 for distinct, _ in used)
    assert used[-1][1] > 1.8 * used[-1][0]


def test_beams_find_a_cached_prefix_and_leave_it_unharmed():
    engine = make_engine()
    prompt = list(range(30, 43))
    expected = run(engine, [prompt])
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    found = search(prompt, params, engine=engine)
    assert_same(found, reference(prompt, params), 1.0)
    assert engine.stats().prefix.num_saved_tokens == 12
    assert run(engine, [prompt]) == expected


def test_a_long_prompt_is_stored_in_chunks():
    prompt = list(range(50))
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    found = search(prompt, params, max_num_batched_tokens=16, max_num_seqs=16)
    assert_same(found, reference(prompt, params), 1.0)


def test_beams_that_cannot_fit_are_refused_and_those_that_just_do_run():
    prompt = list(range(9))
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    # Two full blocks are shared; each beam has two of its own.
    assert len(search(prompt, params, num_blocks=8)) == 3
    with pytest.raises(ValueError, match=r"need up to 8 blocks .* and 7 are free"):
        search(prompt, params, num_blocks=7)

"""Drawing tokens: the right distribution, per row, and the same for the same seed."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.engine.filters import Filters
from mlx_paged.engine.params import SamplingParams
from mlx_paged.engine.penalties import TokenCounts
from mlx_paged.engine.sampler import Draw, Draws, adjust, draw_key, gumbel_noise, random_keys
from mlx_paged.engine.sampler import sample as sample_rows

VOCAB = 37


def logits_of(num_rows, seed=0, scale=3.0):
    return np.random.default_rng(seed).normal(size=(num_rows, VOCAB)).astype(np.float32) * scale


def sample(logits, draws, positions=None):
    """Rows that draw their first token, unless told otherwise."""
    positions = np.zeros(len(draws), int) if positions is None else np.array(positions)
    return sample_rows(logits, Draws(draws), positions)


def filter_logits(logits, params):
    return Filters(params, logits.shape[-1])(logits)


def keys_at(keys, positions):
    return random_keys(np.array(keys, np.uint64), np.array(positions))


def counts_of(prompt, output):
    counts = TokenCounts(prompt)
    for token_id in output:
        counts.add(token_id)
    return counts


def kept_by_hand(logits, params):
    """Tokens that top-k, top-p and min-p keep, one row, by sorting in float64."""
    order = np.argsort(-logits.astype(np.float64), kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    weights = np.exp(logits[order].astype(np.float64) - logits.max())
    shares = weights / weights.sum()
    if params.top_p < 1:
        order = order[np.cumsum(shares) - shares < params.top_p]
    kept = {int(t) for t in order}
    return {t for t in kept if np.exp(np.float64(logits[t] - logits.max())) >= params.min_p}


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 100},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 10, "top_p": 0.8},
    {"top_k": 10, "top_p": 0.8, "min_p": 0.2},
]


def test_each_row_is_filtered_by_its_own_parameters():
    params = [SamplingParams(**f) for f in FILTERS]
    logits = logits_of(len(params))
    filtered = np.array(filter_logits(mx.array(logits), params))
    for row, settings in enumerate(params):
        kept = {int(t) for t in np.flatnonzero(np.isfinite(filtered[row]))}
        assert kept == kept_by_hand(logits[row], settings), FILTERS[row]
        at = sorted(kept)
        np.testing.assert_array_equal(filtered[row, at], logits[row, at])


@pytest.mark.parametrize("settings", FILTERS)
def test_a_row_is_filtered_alone_as_in_company(settings):
    logits = mx.array(logits_of(len(FILTERS)))
    together = filter_logits(logits, [SamplingParams(**f) for f in FILTERS])
    row = FILTERS.index(settings)
    alone = filter_logits(logits[row : row + 1], [SamplingParams(**settings)])
    assert mx.array_equal(alone[0], together[row])


def test_draws_follow_the_softmax_at_the_temperature():
    logits, temperature, num_draws = logits_of(1, scale=1.5)[0], 0.7, 20_000
    params = SamplingParams(temperature=temperature)
    draws = [Draw(params, draw_key(1, 0))] * num_draws
    rows = mx.broadcast_to(mx.array(logits), (num_draws, VOCAB))
    drawn = sample(rows, draws, range(num_draws))
    found = np.bincount(np.array(drawn.token_ids), minlength=VOCAB)
    weights = np.exp(logits / temperature)
    expected = num_draws * weights / weights.sum()
    chi_squared = ((found - expected) ** 2 / expected).sum()
    # 36 degrees of freedom: above 68 once in a thousand seeds, and this one is fixed.
    assert chi_squared < 68


def test_a_seeded_draw_depends_on_seed_sample_and_position_alone():
    row = logits_of(1, scale=0.1)
    params = SamplingParams(temperature=1.0, seed=5)

    def draw(seed, index, position, company=0):
        draws = [Draw(params, draw_key(seed, index))]
        draws += [Draw(params, draw_key(9, i)) for i in range(company)]
        rows = np.concatenate([row, logits_of(company)]) if company else row
        drawn = sample(mx.array(rows), draws, [position, *range(company)])
        return drawn.token_ids.tolist()[0]

    def several(**changes):
        return [draw(**{"seed": 5, "index": 0, "position": p, **changes}) for p in range(12)]

    assert several() == several(company=3)
    different = [
        several(),
        several(seed=6),
        several(index=1),
        [draw(5, 0, p + 50) for p in range(12)],
    ]
    assert len({tuple(tokens) for tokens in different}) == 4


def test_keys_of_seeds_samples_and_positions_do_not_collide():
    keys = [draw_key(seed, index) for seed in (0, 1, 2, -1, 2**63) for index in range(20)]
    assert len(set(keys)) == 100
    pairs = [(key, position) for key in keys for position in range(50)]
    random = np.array(keys_at([k for k, _ in pairs], [p for _, p in pairs]))
    assert len({tuple(key) for key in random.tolist()}) == len(pairs)


def test_noise_is_never_infinite(monkeypatch):
    """A uniform draw of exactly 0 comes once in 2^32 times."""
    monkeypatch.setattr(mx.random, "uniform", lambda shape, key: mx.zeros(shape) + 0 * key[0])
    noise = gumbel_noise(keys_at([1, 2], [0, 0]), 8)
    assert mx.isfinite(noise).all()
    draws = [Draw(SamplingParams(top_k=1), 1)]
    assert sample(mx.array(logits_of(1)), draws).token_ids.item() == logits_of(1).argmax()


def test_greedy_and_random_rows_share_a_batch():
    logits = logits_of(4)
    draws = [
        Draw(SamplingParams(temperature=0), 0),
        Draw(SamplingParams(top_k=1), 1),
        Draw(SamplingParams(temperature=0), 2),
        Draw(SamplingParams(temperature=1e-4), 3),
    ]
    assert sample(mx.array(logits), draws).token_ids.tolist() == logits.argmax(-1).tolist()


def test_penalties_count_prompt_and_answer_as_they_should():
    logits = logits_of(3, seed=4)
    prompt, output = [1, 2, 2, 3], [3, 5, 5]
    settings = [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 0.5, "frequency_penalty": 0.25},
        {"repetition_penalty": 0.8, "presence_penalty": -1.0, "frequency_penalty": 0.5},
    ]
    expected = logits.copy()
    for row, s in enumerate(settings):
        for token_id in set(prompt + output):
            value, factor = expected[row, token_id], s.get("repetition_penalty", 1.0)
            expected[row, token_id] = value / factor if value > 0 else value * factor
        for token_id in set(output):
            expected[row, token_id] -= s.get("presence_penalty", 0)
            expected[row, token_id] -= s.get("frequency_penalty", 0) * output.count(token_id)
    draws = [Draw(SamplingParams(**s), 0, counts=counts_of(prompt, output)) for s in settings]
    found = np.array(adjust(mx.array(logits), Draws(draws), np.zeros(3)))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_bias_can_force_or_ban_a_token():
    logits = logits_of(2)
    best = int(logits[1].argmax())
    draws = [
        Draw(SamplingParams(temperature=0, logit_bias={7: 1e4}), 0),
        Draw(SamplingParams(temperature=0, logit_bias={best: -1e4}), 0),
    ]
    first, second = sample(mx.array(logits), draws).token_ids.tolist()
    assert first == 7
    assert second == int(np.argsort(-logits[1])[1])


def test_no_end_token_before_min_tokens():
    logits = logits_of(1)
    best, next_best = np.argsort(-logits[0])[:2].tolist()
    params = SamplingParams(temperature=0, min_tokens=3)
    ends = frozenset({best})
    draw = Draw(params, 0, num_prompt_tokens=4, end_token_ids=ends)
    found = [sample(mx.array(logits), [draw], [4 + n]).token_ids.item() for n in range(5)]
    assert found == [next_best] * 3 + [best] * 2


def test_logprobs_are_of_the_models_own_logits():
    logits = logits_of(3)
    params = [
        SamplingParams(temperature=0, logprobs=2, logit_bias={4: 100.0}),
        SamplingParams(temperature=0.5, top_k=2),
        SamplingParams(temperature=0, logprobs=4),
    ]
    drawn = sample(mx.array(logits), [Draw(p, 3) for p in params])
    logprobs = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    tokens = drawn.token_ids.tolist()
    assert tokens[0] == 4
    for row in (0, 2):
        assert math.isclose(drawn.logprobs.tolist()[row], logprobs[row, tokens[row]], abs_tol=1e-5)
        assert drawn.ranks.tolist()[row] == 1 + (logits[row] > logits[row, tokens[row]]).sum()
        order = np.argsort(-logits[row])[:4]
        assert drawn.top_ids.tolist()[row] == order.tolist()
        np.testing.assert_allclose(
            drawn.top_logprobs.tolist()[row], logprobs[row, order], atol=1e-5
        )


def test_without_logprobs_none_are_computed():
    drawn = sample(mx.array(logits_of(2)), [Draw(SamplingParams(), 0)] * 2)
    assert len(drawn.arrays) == 1


def test_half_precision_logits_are_sampled_in_float32():
    logits = mx.array(logits_of(2)).astype(mx.float16)
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=1)
    draws = [Draw(params, 5)] * 2
    found, expected = (sample(x, draws, [0, 1]) for x in (logits, logits.astype(mx.float32)))
    assert found.token_ids.tolist() == expected.token_ids.tolist()

"""Bad parameters are refused in a sentence, wherever they come from."""

import pytest

from mlx_paged.engine.params import BeamSearchParams, SamplingParams


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature must be from 0"),
        ({"temperature": "hot"}, "temperature must be a finite number, not 'hot'"),
        ({"temperature": float("nan")}, "finite"),
        ({"temperature": True}, "finite number"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -1}, "min_p must be from 0 to 1"),
        ({"top_k": -1}, "top_k must be at least 0"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"n": 0}, "n must be at least 1"),
        ({"n": 3, "best_of": 2}, "best_of is 2, fewer than the n = 3"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens is 4, more than max_tokens, 3"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"presence_penalty": 3}, "presence_penalty must be from -2 to 2"),
        ({"stop": [""]}, "stop strings must be non-empty"),
        ({"stop": [3]}, "stop strings must be"),
        ({"stop_token_ids": [-1]}, "stop token id must be at least 0"),
        ({"logit_bias": {1: "x"}}, "logit_bias of token 1"),
        ({"logprobs": 1000}, "logprobs must be at most"),
        ({"seed": 1.0}, "seed must be a whole number"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    "settings", [{"beam_width": 0}, {"max_tokens": 0}, {"length_penalty": "x"}]
)
def test_beam_search_parameters_are_checked(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        BeamSearchParams(**settings)


def test_lists_and_single_strings_are_accepted():
    params = SamplingParams(stop="END", stop_token_ids=[3], logit_bias=None)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("END",), (3,), {})


def test_the_choosing_of_the_best_needs_logprobs_that_nobody_asked_for():
    assert SamplingParams(n=1, best_of=2).num_logprobs == 0
    assert SamplingParams(n=2).num_logprobs is None

"""What goes wrong for one request must not touch the others, nor lose a block."""

import math

import mlx.core as mx
import mlx.nn as nn
import pytest
from tiny_engine import GREEDY, finish, make_engine, make_prompts, mlx_lm_answer, paged_model

from mlx_paged.engine.engine import Engine
from mlx_paged.engine.options import EngineOptions
from mlx_paged.engine.params import SamplingParams

POISON = 7


class PoisonedModel(nn.Module):
    """Gives logits of NaN after the token POISON."""

    def __init__(self, model):
        super().__init__()
        self.model, self.args, self.layers = model, model.args, model.layers

    def __call__(self, tokens, cache, rows=None):
        logits = self.model(tokens, cache, rows)
        last = tokens if rows is None else tokens[rows]
        return mx.where((last == POISON)[:, None], math.nan, logits)


def poisoned_engine(**options):
    defaults = {"block_size": 4, "num_blocks": 128, "max_num_seqs": 32}
    return Engine(PoisonedModel(paged_model()), None, EngineOptions(**{**defaults, **options}))


def clean(prompts):
    return [[t if t != POISON else POISON + 1 for t in prompt] for prompt in prompts]


@pytest.mark.parametrize("prefix_caching", ["hash", "radix", "off"])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_request_whose_logits_are_nan_ends_with_an_error_and_the_others_go_on(
    prefix_caching, temperature
):
    engine = poisoned_engine(prefix_caching=prefix_caching)
    prompts = clean(make_prompts(3))
    expected = {}
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, GREEDY)
        expected[str(i)] = mlx_lm_answer(prompt, GREEDY.max_tokens)
    # Whoever meets the poisoned token in its answer would end too.
    assert all(POISON not in answer for answer in expected.values())
    params = SamplingParams(temperature=temperature, n=2, max_tokens=8, logprobs=1)
    engine.add_request("bad", [*prompts[0], POISON], params)
    outputs = finish(engine)
    assert [o.finish_reason for o in outputs["bad"].outputs] == ["error", "error"]
    assert [o.token_ids for o in outputs["bad"].outputs] == [[], []]
    for request_id, answer in expected.items():
        assert outputs[request_id].outputs[0].token_ids == answer


@pytest.mark.parametrize("prefix_caching", ["hash", "radix"])
def test_no_prompt_finds_the_blocks_of_a_request_that_ended_with_nan(prefix_caching):
    engine = poisoned_engine(prefix_caching=prefix_caching)
    prompt = [*range(10, 25), POISON]
    engine.add_request("bad", prompt, GREEDY)
    finish(engine)
    assert engine.stats().num_blocks_cached == 0
    engine.add_request("next", [*prompt, 9], GREEDY)
    assert finish(engine)["next"].metrics.num_cached_tokens == 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_an_exception_in_a_step_costs_the_running_requests_only(preemption, monkeypatch):
    engine = make_engine(max_num_seqs=2, preemption=preemption)
    prompts = make_prompts(4)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, GREEDY)
    for _ in range(4):
        engine.step()
    running = {sample.request.request_id for sample in engine.scheduler.running}
    assert len(running) == 2

    def fail(*_):
        raise ArithmeticError("no such step")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "wait", fail)
        with pytest.raises(ArithmeticError):
            engine.step()
    # The next step's graph, built meanwhile, is dropped too: held, it would copy the pool.
    assert engine.runner._checkpoint is not None
    assert set(engine.recover()) == running
    assert engine.runner._checkpoint is None
    outputs = finish(engine)
    assert set(outputs) == {"0", "1", "2", "3"} - running
    for request_id, output in outputs.items():
        expected = mlx_lm_answer(prompts[int(request_id)], GREEDY.max_tokens)
        assert output.outputs[0].token_ids == expected


def test_what_was_to_be_swapped_out_in_a_failed_step_is_given_up(monkeypatch):
    engine = make_engine(num_blocks=8, preemption="swap", prefix_caching="off")
    for i in range(3):
        engine.add_request(str(i), [10 + i] * 7, SamplingParams(temperature=0, max_tokens=16))

    def fail(*_):
        raise ArithmeticError("no such copy")

    monkeypatch.setattr("mlx_paged.engine.model_runner.copy_out", fail)
    with pytest.raises(ArithmeticError):
        finish(engine)
    assert any(sample.is_lost for sample in engine.scheduler.waiting)
    engine.recover()
    assert not engine.scheduler.running
    finish(engine)


def test_one_sample_can_be_dropped_and_the_others_go_on():
    engine, prompt = make_engine(), make_prompts(1)[0]
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=12)
    engine.add_request("a", prompt, params)
    whole = finish(engine)["a"]
    engine.add_request("a", prompt, params)
    while not (outputs := engine.step()):
        pass
    assert {output.index for output in outputs} == {0, 1, 2}
    engine.abort("a", 1)
    engine.check_integrity()
    output = finish(engine)["a"]
    assert output.outputs[1].finish_reason == "abort"
    for index in (0, 2):
        assert output.outputs[index].token_ids == whole.outputs[index].token_ids


def test_a_request_whose_last_sample_is_dropped_is_gone():
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], SamplingParams(n=2, max_tokens=9))
    engine.step()
    engine.abort("a", 0)
    engine.abort("a", 1)
    assert not engine.requests and not engine.has_work()
    finish(engine)


def test_a_bias_on_a_token_outside_the_vocabulary_is_refused():
    engine = make_engine()
    with pytest.raises(ValueError, match=r"token 99999.*ends at 259"):
        engine.add_request("a", [1], SamplingParams(logit_bias={99999: 1.0}))
    assert not engine.has_work()


@pytest.mark.parametrize("max_tokens", [None, 1])
@pytest.mark.parametrize("num_prompt_tokens", [20, 21])
def test_a_prompt_that_fills_the_context_is_refused(num_prompt_tokens, max_tokens):
    engine = make_engine(max_model_len=20)
    params = SamplingParams(max_tokens=max_tokens)
    with pytest.raises(ValueError, match="context of 20"):
        engine.add_request("a", [1] * num_prompt_tokens, params)
    engine.add_request("b", [1] * 19, params)
    assert len(finish(engine)["b"].outputs[0].token_ids) == 1

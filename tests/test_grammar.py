"""Answers that follow a grammar, sampled from a random model that would never write any."""

import json

import pytest
from mlx_lm.utils import load_tokenizer
from tiny_engine import GREEDY, finish, make_engine, make_prompts, mlx_lm_answer
from tiny_models import write_tokenizer

from mlx_paged.engine.grammar import json_schema_grammar
from mlx_paged.engine.params import SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "sunny": {"type": "boolean"},
    },
    "required": ["city", "days", "sunny"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder, eos_token_ids=256)


def schema_params(**changes):
    defaults = {"temperature": 1.0, "max_tokens": 80, "seed": 1}
    return SamplingParams(grammar=json_schema_grammar(SCHEMA), **{**defaults, **changes})


def check(text):
    answer = json.loads(text)
    assert list(answer) == ["city", "days", "sunny"]
    assert answer["city"] in ("Oslo", "Rome") and type(answer["sunny"]) is bool
    assert 0 <= answer["days"] <= 99


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_every_sample_is_json_that_is_valid_by_its_schema(tokenizer, temperature):
    engine = make_engine(tokenizer)
    engine.add_request("a", [1, 2, 3], schema_params(n=4, temperature=temperature))
    outputs = finish(engine)["a"].outputs
    for output in outputs:
        assert output.finish_reason == "stop"
        check(output.text)
    assert temperature == 0 or len({output.text for output in outputs}) > 1


def test_a_grammar_and_free_answers_run_in_one_batch(tokenizer):
    engine, prompts = make_engine(tokenizer), make_prompts(3)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, GREEDY)
    engine.add_request("json", [5], schema_params(logprobs=2))
    outputs = finish(engine)
    check(outputs["json"].outputs[0].text)
    for i, prompt in enumerate(prompts):
        assert outputs[str(i)].outputs[0].token_ids == mlx_lm_answer(prompt, GREEDY.max_tokens)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_preempted_answer_stays_in_its_grammar(tokenizer, preemption):
    def answers(num_blocks):
        engine = make_engine(tokenizer, num_blocks=num_blocks, preemption=preemption)
        for i in range(4):
            engine.add_request(str(i), [i] * 9, schema_params(seed=i))
        outputs = finish(engine)
        return [outputs[str(i)].outputs[0].text for i in range(4)], engine

    roomy, _ = answers(128)
    crowded, engine = answers(26)
    assert engine.scheduler.num_preemptions > 0
    assert crowded == roomy
    for text in crowded:
        check(text)


def test_a_bad_grammar_is_refused_and_nothing_is_left(tokenizer):
    engine = make_engine(tokenizer)
    for grammar in ("start: nowhere", json_schema_grammar({"type": "objekt"})):
        with pytest.raises(ValueError, match="the grammar can't be followed"):
            engine.add_request("a", [1], SamplingParams(grammar=grammar))
    assert not engine.has_work() and not engine.requests


def test_a_grammar_needs_a_tokenizer():
    with pytest.raises(ValueError, match="needs a tokenizer"):
        make_engine().add_request("a", [1], schema_params())


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_a_grammar_alone_decides_where_the_answer_ends(options):
    with pytest.raises(ValueError, match="a grammar decides where"):
        schema_params(**options)


def test_what_the_grammar_leaves_open_follows_the_logits(tokenizer):
    """Of the tokens allowed, greedy takes the one with the largest logit."""
    engine = make_engine(tokenizer)
    allowed = [ord("a") - 33, ord("k") - 33, ord("x") - 33]  # the tokenizer's ids begin at "!"
    biased = SamplingParams(
        temperature=0, max_tokens=4, grammar="start: /[akx]+/", logit_bias={allowed[1]: 1000.0}
    )
    engine.add_request("a", [1], biased)
    assert finish(engine)["a"].outputs[0].text == "kkkk"

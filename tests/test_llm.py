"""The offline API on a checkpoint with one token per byte, so that text is easy to foretell."""

import math

import pytest
from tiny_engine import CONFIG
from tiny_models import tiny_model, write_checkpoint

import mlx_paged
from mlx_paged import LLM, BeamSearchParams, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=16)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = write_checkpoint(tmp_path_factory.mktemp("model"), CONFIG, tiny_model(CONFIG))
    return LLM(str(path), block_size=4, num_blocks=128, seed=0)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm):
    yield
    llm.engine.check_integrity()
    assert not llm.engine.has_work() and not llm.engine.requests
    assert llm.stats().num_blocks_used == 0


def test_texts_tokens_and_lists_of_them_are_prompts(llm):
    text, tokens = "blocks of a pool", list(b"blocks of a pool")
    expected = llm.generate(text, GREEDY)[0]
    assert len(llm.encode(text)) == len(tokens)
    many = llm.generate([text, llm.encode(text), "another"], GREEDY)
    assert [o.outputs[0].token_ids for o in many[:2]] == [expected.outputs[0].token_ids] * 2
    assert expected.prompt == text and many[1].prompt is None
    assert expected.prompt_token_ids == llm.encode(text)
    assert len({o.request_id for o in many}) == 3


def test_outputs_are_shaped_as_vllms(llm):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3)
    [output] = llm.generate(["abc"], params)
    [answer] = output.outputs
    assert output.finished and answer.index == 0
    assert answer.finish_reason == "length" and answer.stop_reason is None
    assert len(answer.token_ids) == len(answer.logprobs) == 5
    for token_id, logprobs in zip(answer.token_ids, answer.logprobs, strict=True):
        assert len(logprobs) == 3 and logprobs[token_id].rank == 1
    chosen = [lp[t].logprob for t, lp in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert math.isclose(answer.cumulative_logprob, sum(chosen), abs_tol=1e-5)
    assert output.metrics.num_output_tokens == 5


def test_each_prompt_can_have_its_own_params(llm):
    each = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 4, 2)]
    outputs = llm.generate(["a", "b", "c"], each)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 4, 2]
    with pytest.raises(ValueError, match="3 prompts with 2 params"):
        llm.generate(["a", "b", "c"], each[:2])


def test_a_stream_says_what_generate_says(llm):
    expected = llm.generate("stream", GREEDY)[0].outputs[0]
    tokens = list(llm.stream("stream", GREEDY))
    assert [t.token_id for t in tokens] == expected.token_ids
    assert "".join(t.text for t in tokens) == expected.text
    assert [t.finish_reason for t in tokens] == [None] * 15 + ["length"]
    assert tokens[-1].request_output.outputs[0].text == expected.text


def test_a_stream_tells_how_much_of_the_prompt_is_stored(tmp_path, llm):
    engine = llm.engine
    before = engine.scheduler.max_num_batched_tokens
    engine.scheduler.max_num_batched_tokens = 8
    try:
        seen = []
        list(llm.stream("x" * 20, GREEDY, progress=lambda done, total: seen.append((done, total))))
    finally:
        engine.scheduler.max_num_batched_tokens = before
    assert seen == [(8, 20), (16, 20), (20, 20)]


def test_a_stream_that_is_abandoned_frees_everything(llm):
    tokens = llm.stream("abandoned", GREEDY)
    next(tokens)
    assert llm.stats().num_blocks_used > 0
    tokens.close()


def test_streams_can_take_turns(llm):
    alone = [list(llm.stream(prompt, GREEDY)) for prompt in ("one", "two")]
    streams = [llm.stream(prompt, GREEDY) for prompt in ("one", "two")]
    turns = list(zip(*streams, strict=True))
    assert [[t.token_id for t in tokens] for tokens in zip(*turns, strict=True)] == (
        [[t.token_id for t in tokens] for tokens in alone]
    )


@pytest.mark.parametrize("n", [1, 3])
def test_nothing_of_a_stop_string_is_streamed(llm, n):
    params = SamplingParams(temperature=1.0, seed=4, n=n, max_tokens=40)
    texts = [o.text for o in llm.generate("stop", params)[0].outputs]
    assert max(map(len, texts)) > 12
    stop = max(texts, key=len)[6:9]
    stopping = SamplingParams(temperature=1.0, seed=4, n=n, max_tokens=40, stop=[stop])
    pieces = dict.fromkeys(range(n), "")
    for token in llm.stream("stop", stopping):
        pieces[token.index] += token.text
        assert stop not in pieces[token.index]
    [output] = llm.generate("stop", stopping)
    for i, text in enumerate(texts):
        assert pieces[i] == output.outputs[i].text == text.split(stop)[0]
        assert output.outputs[i].stop_reason == (stop if stop in text else None)


def test_an_end_token_has_no_text(llm):
    end = llm.tokenizer.eos_token_id
    params = SamplingParams(temperature=0, max_tokens=9, logit_bias={end: 1e6}, min_tokens=2)
    [output] = llm.generate("x", params)
    assert output.outputs[0].token_ids[-1] == end and len(output.outputs[0].token_ids) == 3
    assert output.outputs[0].finish_reason == "stop"
    assert "<eos>" not in output.outputs[0].text
    ignoring = SamplingParams(temperature=0, max_tokens=9, logit_bias={end: 1e6}, ignore_eos=True)
    assert llm.generate("x", ignoring)[0].outputs[0].token_ids == [end] * 9


def test_one_prompt_that_cannot_run_is_refused_before_any_starts(llm):
    with pytest.raises(ValueError, match=r"needs 13\d blocks .* the pool has 128"):
        llm.generate(["fine", "too long " * 56], GREEDY)


def test_a_chat_needs_a_template(llm):
    with pytest.raises(ValueError, match="no chat template"):
        llm.generate([{"role": "user", "content": "hi"}], GREEDY)


def test_chats_go_through_the_template(llm, monkeypatch):
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>"
    monkeypatch.setattr(llm.tokenizer._tokenizer, "chat_template", template)
    monkeypatch.setitem(vars(llm.tokenizer), "has_chat_template", True)
    chat = [{"role": "user", "content": "hi"}]
    expected = llm.encode("[user]hi>")
    assert llm.encode(chat) == expected
    one, two = llm.generate(chat, GREEDY), llm.generate([chat, chat], GREEDY)
    assert len(one) == 1 and len(two) == 2
    assert one[0].prompt_token_ids == two[1].prompt_token_ids == expected


def test_beam_search_returns_the_best_first(llm):
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    [output] = llm.beam_search("beams", params)
    sums = [answer.cumulative_logprob for answer in output.outputs]
    assert len(sums) == 3 and sums == sorted(sums, reverse=True)
    assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)


def test_a_bar_over_many_prompts_goes_to_stderr(llm, capsys):
    llm.generate(["a", "b"], SamplingParams(max_tokens=2), progress=True)
    assert capsys.readouterr().out == ""


def test_public_names_are_loaded_when_used():
    assert set(mlx_paged.__all__) <= set(dir(mlx_paged))
    assert mlx_paged.LLM is LLM
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = mlx_paged.nothing


def test_an_unknown_option_is_refused(llm):
    with pytest.raises(TypeError, match="block_sice"):
        LLM(llm.loaded.path, block_sice=3)
    with pytest.raises(ValueError, match="'hash', 'radix' or 'off'"):
        LLM(llm.loaded.path, prefix_caching="tree")

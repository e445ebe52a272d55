"""Many requests in one pool answer as each would alone over a contiguous cache."""

import random
import threading

import mlx.core as mx
import pytest
from tiny_engine import GREEDY, finish, make_engine, make_prompts, mlx_lm_answer, paged_model, run

from mlx_paged.blocks import BlockPool, Sequence
from mlx_paged.cache import Batch
from mlx_paged.engine.block_tables import BlockTables
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.options import EngineOptions
from mlx_paged.engine.params import SamplingParams
from mlx_paged.engine.request import Request, Sample

SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=7, max_tokens=12)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 1},
        {"block_size": 64, "num_blocks": 8},
        {"max_num_batched_tokens": 9, "max_num_seqs": 9},
        {"max_num_seqs": 1},
        {"prefix_caching": "off"},
        {"prefix_caching": "radix"},
    ],
)
def test_answers_equal_mlx_lms(options):
    prompts = make_prompts(7)
    expected = [[mlx_lm_answer(prompt, 12)] for prompt in prompts]
    assert run(make_engine(**options), prompts) == expected


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_pool_too_small_for_all_gives_the_same_tokens(preemption, params):
    prompts = make_prompts(8, max_length=20)
    undisturbed = run(make_engine(), prompts, params)
    engine = make_engine(num_blocks=14, preemption=preemption)
    assert run(engine, prompts, params) == undisturbed
    assert engine.stats().num_preemptions > 0


def test_a_preempted_request_that_finds_its_own_prefix_again():
    """Two requests in a pool one block short; the resumed one must not count hits as computed."""
    prompts = [[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]]
    engine = make_engine(num_blocks=7)
    assert run(engine, prompts) == run(make_engine(), prompts)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix.num_saved_tokens > 0


def test_a_seeded_answer_is_the_same_alone_in_company_and_after_preemption():
    prompts = make_prompts(6, max_length=20)
    each = [SamplingParams(temperature=1.0, seed=i, max_tokens=12, n=2) for i in range(6)]
    alone = [run(make_engine(), [p], [s])[0] for p, s in zip(prompts, each, strict=True)]
    assert run(make_engine(), prompts, each) == alone
    assert run(make_engine(num_blocks=16), prompts, each) == alone
    assert all(first != second for first, second in alone)


def test_requests_without_a_seed_differ_and_follow_the_engines():
    prompts, params = [[1, 2, 3]] * 4, SamplingParams(temperature=1.0, max_tokens=8)
    first = run(make_engine(seed=1), prompts, params)
    assert len({tuple(answer[0]) for answer in first}) == 4
    assert run(make_engine(seed=1), prompts, params) == first
    assert run(make_engine(seed=2), prompts, params) != first


@pytest.mark.parametrize("prefix_caching", ["hash", "radix"])
@pytest.mark.parametrize("num_tokens", [1, 4, 8, 11])
def test_the_same_prompt_again_gives_the_same_answer(prefix_caching, num_tokens):
    """A prompt of exactly k blocks, found whole, still needs its last token's logits."""
    prompt = list(range(50, 50 + num_tokens))
    engine = make_engine(prefix_caching=prefix_caching)
    expected = [[mlx_lm_answer(prompt, 12)]]
    assert run(engine, [prompt]) == expected
    assert run(engine, [prompt]) == expected
    assert run(engine, [prompt, prompt]) == expected * 2


def test_another_prompts_blocks_are_not_taken_for_its_own():
    """X, then Y in X's only blocks, then X again."""
    x, y = [1, 2, 3, 4, 5], [5, 4, 3, 2, 1]
    params = SamplingParams(temperature=0, max_tokens=3)
    engine = make_engine(num_blocks=2)
    answers = [run(engine, [prompt], params) for prompt in (x, y, x)]
    assert answers == [[[mlx_lm_answer(prompt, 3)]] for prompt in (x, y, x)]


def test_what_a_sharer_writes_does_not_reach_the_others():
    """Sixteen at once over one cached prefix, which must stay as it was."""
    prefix = list(range(20, 41))
    engine = make_engine(prefix_caching="radix")
    run(engine, [prefix])
    prompts = [[*prefix[: 20 - i % 3], 100 + i] for i in range(16)]
    assert run(engine, prompts) == [[mlx_lm_answer(prompt, 12)] for prompt in prompts]
    assert run(engine, [prefix]) == [[mlx_lm_answer(prefix, 12)]]


@pytest.mark.parametrize("attention", ["gather"])
def test_unwritten_slots_may_hold_nan(attention):
    engine = make_engine(attention=attention)
    for array in (*engine.pool.keys, *engine.pool.values):
        array[:] = mx.full(array.shape, mx.nan)
    prompts = [[3], [4, 5], *make_prompts(3)]
    assert run(engine, prompts) == [[mlx_lm_answer(prompt, 12)] for prompt in prompts]


def test_a_bfloat16_model_gets_a_bfloat16_pool():
    model = paged_model(mx.bfloat16)
    engine = Engine(model, None, EngineOptions(block_size=4, num_blocks=32, preemption="swap"))
    assert engine.pool.dtype == mx.bfloat16
    prompts = make_prompts(2, max_length=12)
    undisturbed = run(engine, prompts)
    small = Engine(model, None, EngineOptions(block_size=4, num_blocks=8, preemption="swap"))
    assert run(small, prompts) == undisturbed
    assert small.stats().num_preemptions > 0


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
def test_abort_at_any_moment_frees_everything_and_disturbs_nobody(num_steps):
    prompts = [list(range(12)), list(range(30, 50)), [7]]
    engine = make_engine(max_num_batched_tokens=8, max_num_seqs=8)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, GREEDY)
    for _ in range(num_steps):
        engine.step()
    engine.abort("1")
    engine.abort("unknown")
    outputs = finish(engine)
    assert sorted(outputs) == ["0", "2"]
    for i in (0, 2):
        assert outputs[str(i)].outputs[0].token_ids == mlx_lm_answer(prompts[i], 12)


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_an_aborted_request_is_over_though_some_samples_never_began(num_steps):
    engine = make_engine(max_num_batched_tokens=4, max_num_seqs=4)
    params = SamplingParams(temperature=1.0, max_tokens=9, n=3)
    request = engine.add_request("0", [1, 2, 3, 4, 5, 6], params)
    for _ in range(num_steps):
        engine.step()
    assert not request.is_finished
    engine.abort("0")
    assert request.is_finished and not engine.has_work()
    assert finish(engine) == {}


def test_a_request_that_arrives_while_a_step_runs_joins_the_next():
    engine = make_engine()
    engine.add_request("0", [1, 2, 3], GREEDY)
    for _ in range(4):
        engine.step()
    engine.add_request("1", [4, 5, 6], GREEDY)
    outputs = finish(engine)
    assert outputs["0"].outputs[0].token_ids == mlx_lm_answer([1, 2, 3], 12)
    assert outputs["1"].outputs[0].token_ids == mlx_lm_answer([4, 5, 6], 12)


def test_logits_are_computed_only_for_tokens_that_are_followed_by_a_draw():
    engine = make_engine(max_num_batched_tokens=10, max_num_seqs=4)
    seen = []
    model = engine.runner.model

    def spy(tokens, cache, rows=None):
        seen.append((tokens.size, 0 if rows is None else rows.size))
        return model(tokens, cache, rows)

    engine.runner.model = spy
    run(engine, [list(range(25))], SamplingParams(temperature=0, max_tokens=3))
    assert seen == [(10, 1), (10, 1), (5, 1), (1, 1), (1, 1)]


def test_no_padding_token_enters_a_batch():
    engine = make_engine(prefix_caching="off")
    prompts = make_prompts(5)
    seen = []
    model = engine.runner.model

    def spy(tokens, cache, rows=None):
        seen.append(tokens.size)
        return model(tokens, cache, rows)

    engine.runner.model = spy
    run(engine, prompts)
    assert seen[0] == sum(len(prompt) for prompt in prompts)
    assert seen[1:] == [5] * 11


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "at least one token"),
        ([1, 260], GREEDY, "from 0 to 259"),
        ([-1], GREEDY, "from -1 to -1"),
        ([1] * 30, SamplingParams(max_tokens=40), r"needs 18 blocks .* the pool has 16"),
        ([1] * 30, SamplingParams(max_tokens=40000), "context of 32768"),
        ([1], SamplingParams(stop="x"), "need a tokenizer"),
    ],
)
def test_what_can_never_run_is_refused_on_arrival(prompt, params, message):
    engine = make_engine(num_blocks=16)
    with pytest.raises(ValueError, match=message):
        engine.add_request("bad", prompt, params)
    assert not engine.has_work() and not engine.requests
    assert run(engine, [[1, 2]]) == [[mlx_lm_answer([1, 2], 12)]]


def test_a_prompt_whose_last_chunk_is_one_token():
    """It decodes in the next step, but drew nothing in this one."""
    prompts = [[3], list(range(8)), list(range(9)), list(range(20, 35))]
    engine = make_engine(max_num_batched_tokens=8, max_num_seqs=8)
    assert run(engine, prompts) == [[mlx_lm_answer(prompt, 12)] for prompt in prompts]
    assert run(make_engine(max_num_batched_tokens=8, max_num_seqs=8), [prompts[2]]) == (
        [[mlx_lm_answer(prompts[2], 12)]]
    )


def test_kept_block_tables_are_those_made_anew():
    rng = random.Random(0)
    pool = BlockPool(400, 4)
    tables = BlockTables(4)
    samples = []
    for _ in range(60):
        if not samples or rng.random() < 0.2:
            request = Request(str(len(samples)), [1] * rng.randrange(1, 9), GREEDY, 50)
            samples = [*samples, Sample(request, 0, Sequence(pool, request.prompt_token_ids), None)]
        if rng.random() < 0.1:
            samples = rng.sample(samples, len(samples) - 1) or samples
        if rng.random() < 0.1:
            other = rng.choice(samples).sequence
            other.free()
            tables.forget()
        for sample in samples:
            sample.num_scheduled_tokens = 1
            sample.sequence.reserve(1)
        batch = tables.batch(samples)
        rows = [(s.sequence.block_table, s.sequence.num_cached_tokens, 1) for s in samples]
        anew = Batch.of(rows, 4)
        assert batch.tables.tolist() == anew.tables.tolist()
        assert batch.num_cached.tolist() == anew.num_cached.tolist()
        for sample in samples:
            sample.sequence.num_cached_tokens += 1


def test_a_step_writes_the_slots_of_its_tokens_and_no_others():
    """Rows of different lengths, as a padded batch would write past the shorter ones."""
    engine = make_engine(num_blocks=32, prefix_caching="off")
    marks = [mx.full(array.shape, 7.0) for array in engine.pool.keys]
    for layer, mark in enumerate(marks):
        engine.pool.keys[layer][:] = mark
    requests = [
        engine.add_request(str(i), prompt, GREEDY)
        for i, prompt in enumerate([[1, 2, 3, 4, 5], [6], list(range(11))])
    ]
    for _ in range(3):
        engine.step()
        mx.eval(engine.pool.keys)
        written = {
            slot
            for request in requests
            for slot in request.samples[0].sequence.slots(
                0, request.samples[0].sequence.num_cached_tokens
            )
        }
        for keys, mark in zip(engine.pool.keys, marks, strict=True):
            changed = (keys != mark).any(axis=(1, 3)).reshape(-1).tolist()
            assert {slot for slot, is_changed in enumerate(changed) if is_changed} == written
    finish(engine)


def test_an_engine_runs_in_a_thread_of_its_own():
    """MLX's streams belong to threads; whoever makes the engine in one must step it there."""
    found = []

    def serve():
        found.extend(run(make_engine(), [[1, 2, 3]]))

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert found == [[mlx_lm_answer([1, 2, 3], 12)]]


def test_a_failed_build_loses_no_token(monkeypatch):
    """The model fails once while a step runs; the next call takes that step's tokens."""
    engine = make_engine()
    model, calls = engine.runner.model, []

    def fails_once(*args):
        calls.append(args)
        if len(calls) == 4:
            raise RuntimeError("out of memory")
        return model(*args)

    engine.runner.model = fails_once
    engine.add_request("0", [1, 2, 3], GREEDY)
    with pytest.raises(RuntimeError, match="out of memory"):
        finish(engine)
    assert finish(engine)["0"].outputs[0].token_ids == mlx_lm_answer([1, 2, 3], 12)


def test_one_id_names_one_request():
    engine = make_engine()
    engine.add_request("a", [1], GREEDY)
    with pytest.raises(ValueError, match="running or waiting already"):
        engine.add_request("a", [2], GREEDY)


def test_an_open_end_takes_what_the_pool_has():
    engine = make_engine(num_blocks=4)
    [[answer]] = run(engine, [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=None))
    assert len(answer) == 4 * 4 + 1 - 3


def test_end_tokens_end_an_answer_unless_told_otherwise():
    prompt, full = [1, 2, 3], mlx_lm_answer([1, 2, 3], 12)
    end = full[4]
    first = full.index(end)

    def answer(**settings):
        engine = make_engine()
        params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[end], **settings)
        engine.add_request("0", prompt, params)
        return finish(engine)["0"].outputs[0]

    stopped = answer()
    assert stopped.token_ids == full[: first + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", end)
    later = answer(min_tokens=first + 1)
    assert end not in later.token_ids[: first + 1]


def test_best_of_returns_the_likeliest_per_token():
    params = SamplingParams(temperature=1.0, seed=3, n=2, best_of=5, max_tokens=6)
    engine = make_engine()
    engine.add_request("0", [1, 2, 3], params)
    best = finish(engine)["0"].outputs
    every = SamplingParams(temperature=1.0, seed=3, n=5, max_tokens=6, logprobs=0)
    engine.add_request("0", [1, 2, 3], every)
    ranked = sorted(
        finish(engine)["0"].outputs, key=lambda o: o.cumulative_logprob / 6, reverse=True
    )
    assert [o.token_ids for o in best] == [o.token_ids for o in ranked[:2]]
    assert best[0].logprobs is None


def test_logprobs_come_with_every_token_and_survive_preemption():
    params = SamplingParams(temperature=0, max_tokens=10, logprobs=2)

    def logprobs(**options):
        engine = make_engine(**options)
        for i, prompt in enumerate(make_prompts(4, max_length=12)):
            engine.add_request(str(i), prompt, params)
        return {k: v.outputs[0] for k, v in finish(engine).items()}, engine

    plenty, _ = logprobs()
    scarce, engine = logprobs(num_blocks=8)
    assert engine.stats().num_preemptions > 0
    for key, output in plenty.items():
        assert len(output.logprobs) == len(output.token_ids) == 10
        for token_id, found, again in zip(
            output.token_ids, output.logprobs, scarce[key].logprobs, strict=True
        ):
            assert found[token_id].rank == 1 and len(found) == 2
            assert again[token_id].logprob == pytest.approx(found[token_id].logprob, abs=1e-4)


def test_penalties_look_at_every_token_so_far():
    """With the strongest presence penalty, a random tiny model hardly repeats itself."""
    prompt = [1, 2, 3]
    params = SamplingParams(temperature=0, max_tokens=30, repetition_penalty=1e6)
    [[answer]] = run(make_engine(), [prompt], params)
    assert len(set(answer)) == 30 and not set(answer) & set(prompt)
    assert len(set(mlx_lm_answer(prompt, 30))) < 30


def test_metrics_tell_when_and_how_much():
    engine = make_engine(num_blocks=10)
    for i in range(3):
        engine.add_request(str(i), list(range(9)), GREEDY)
    outputs = finish(engine)
    for output in outputs.values():
        m = output.metrics
        assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finished_time
        assert m.queue_time >= 0 and m.time_to_first_token > 0 and m.time_per_output_token > 0
        assert m.num_output_tokens == 12
    assert outputs["1"].metrics.num_cached_tokens == 8
    assert sum(o.metrics.num_preemptions for o in outputs.values()) > 0
    assert engine.stats().counts.num_generated_tokens == 36


def test_graphs_are_built_ahead_and_dropped_only_for_unforeseen_ends():
    engine = make_engine()
    run(engine, make_prompts(3))
    assert engine.counts.num_graphs_dropped == 0
    end = mlx_lm_answer([1, 2, 3], 6)[-1]
    stops = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[end])
    expected = [[mlx_lm_answer([9, 9], 12)], [mlx_lm_answer([1, 2, 3], 12)]]
    expected[1][0] = expected[1][0][: expected[1][0].index(end) + 1]
    assert run(engine, [[9, 9], [1, 2, 3]], [GREEDY, stops]) == expected
    assert engine.counts.num_graphs_dropped == 1

"""An engine between two messages, without a process: what goes in, what comes out."""

import pytest
from tiny_engine import GREEDY, make_engine, make_prompts, mlx_lm_answer, paged_model

from mlx_paged.engine.engine import Engine
from mlx_paged.engine.options import EngineOptions
from mlx_paged.engine.params import SamplingParams
from mlx_paged.server.engine_loop import EngineLoop
from mlx_paged.server.messages import (
    Abort,
    Add,
    Beat,
    Failed,
    PoolView,
    Refused,
    Tokens,
    Watch,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from mlx_paged.server.pool_view import pool_view, runs


class Loop(EngineLoop):
    """Keeps what was sent, after a journey through bytes."""

    def __init__(self, **options):
        self.sent = []
        defaults = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8}
        engine = Engine(paged_model(), None, EngineOptions(**{**defaults, **options}), texts=False)
        super().__init__(engine, lambda message: self.sent.append(self.travel(message)))

    @staticmethod
    def travel(message):
        return decode_from_engine(encode(message))

    def receive(self, message):
        super().receive(decode_to_engine(encode(message)))

    def run(self):
        while self.engine.has_work():
            self.turn()
            self.engine.check_integrity()

    def of(self, kind):
        return [message for message in self.sent if isinstance(message, kind)]

    def tokens(self, request_id, index=0):
        return [
            token
            for message in self.of(Tokens)
            for token in message.tokens
            if (token.request_id, token.index) == (request_id, index)
        ]

    @property
    def num_used(self):
        blocks = self.engine.pool.blocks
        return blocks.num_blocks - blocks.num_free_blocks


def test_requests_are_answered_with_the_tokens_of_mlx_lm():
    loop, prompts = Loop(), make_prompts(4)
    for i, prompt in enumerate(prompts):
        loop.receive(Add(str(i), prompt, GREEDY))
    loop.run()
    for i, prompt in enumerate(prompts):
        tokens = loop.tokens(str(i))
        assert [token.token_id for token in tokens] == mlx_lm_answer(prompt, GREEDY.max_tokens)
        assert [token.finish_reason for token in tokens] == [None] * 11 + ["length"]


def test_every_parameter_survives_the_journey():
    params = SamplingParams(
        n=2,
        best_of=3,
        temperature=0.5,
        top_k=4,
        logit_bias={3: -1.5},
        stop_token_ids=[7, 8],
        seed=-(2**40),
        logprobs=2,
        min_tokens=1,
        grammar=None,
    )
    message = Add("a", [1, 2], params, priority=-3, salt="x")
    assert decode_to_engine(encode(message)) == message


def test_logprobs_come_with_the_drawn_token_first_then_the_likeliest():
    loop = Loop()
    params = SamplingParams(temperature=2.0, seed=1, max_tokens=20, logprobs=3)
    loop.receive(Add("a", [1, 2, 3], params))
    loop.run()
    num_others = 0
    for token in loop.tokens("a"):
        (drawn, logprob), *known = token.logprobs
        assert drawn == token.token_id and (drawn, logprob) in known
        values = [value for _, value in known]
        assert values == sorted(values, reverse=True)
        assert len(known) in (3, 4)
        num_others += len(known) == 4
    assert num_others  # some tokens drawn are none of the likeliest


def test_what_can_never_run_is_refused_with_the_numbers():
    loop = Loop()
    loop.receive(Add("a", [1] * 500, SamplingParams(max_tokens=1)))
    loop.receive(Add("b", [], GREEDY))
    loop.receive(Add("c", [10**6], GREEDY))
    refused = {message.request_id: message.reason for message in loop.of(Refused)}
    assert set(refused) == {"a", "b", "c"}
    assert "500 prompt tokens" in refused["a"] and "the pool has 64" in refused["a"]


@pytest.mark.parametrize("num_turns", [0, 1, 3, 6])
def test_an_aborted_request_has_its_blocks_back_at_once(num_turns):
    loop = Loop(max_num_batched_tokens=8)
    loop.receive(Add("a", list(range(30)), SamplingParams(n=2, max_tokens=50)))
    for _ in range(num_turns):
        loop.turn()
    assert loop.num_used or num_turns == 0
    loop.receive(Abort("a"))
    assert loop.num_used == 0
    loop.engine.check_integrity()
    loop.run()
    assert not any(token.finish_reason for token in loop.tokens("a"))


def test_one_sample_ends_and_the_other_goes_on():
    loop = Loop()
    loop.receive(Add("a", [1, 2], SamplingParams(n=2, seed=1, max_tokens=20)))
    loop.turn()
    loop.receive(Abort("a", 0))
    loop.run()
    assert len(loop.tokens("a", 0)) < 20 == len(loop.tokens("a", 1))


def test_samples_that_end_in_one_step_are_all_told():
    loop = Loop()
    loop.receive(Add("a", [1, 2], SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True)))
    loop.run()
    for index in range(3):
        reasons = [token.finish_reason for token in loop.tokens("a", index)]
        assert reasons == [None, None, None, "length"]


def test_a_failed_step_costs_only_what_ran(monkeypatch):
    loop = Loop(max_num_seqs=1)
    prompts = make_prompts(2)
    for i, prompt in enumerate(prompts):
        loop.receive(Add(str(i), prompt, GREEDY))
    loop.turn()

    def fail(*_):
        raise ArithmeticError("lost a digit")

    with monkeypatch.context() as patch:
        patch.setattr(loop.engine.runner, "wait", fail)
        loop.turn()
    assert [(m.request_id, m.reason) for m in loop.of(Failed)] == [
        ("0", "the engine met an error: lost a digit")
    ]
    loop.run()
    assert [t.token_id for t in loop.tokens("1")] == mlx_lm_answer(prompts[1], 12)


def test_cached_prompt_tokens_are_told():
    loop, prompt = Loop(), list(range(17))
    for request_id in "ab":
        loop.receive(Add(request_id, prompt, GREEDY))
        loop.run()
    assert {token.num_cached_tokens for token in loop.tokens("a")} == {0}
    assert {token.num_cached_tokens for token in loop.tokens("b")} == {16}


def test_a_warm_up_leaves_no_trace():
    loop = Loop()
    loop.warm_up()
    stats = loop.engine.stats()
    assert stats.counts.num_steps == 0 and stats.prefix.num_queries == 0
    loop.receive(Add("a", [0] * 8, GREEDY))
    loop.run()
    assert {token.num_cached_tokens for token in loop.tokens("a")} == {0}


def test_beats_come_without_work_too():
    loop = Loop()
    loop.turn()
    assert len(loop.of(Beat)) == 1
    assert 0 < loop.seconds_to_wait() <= 1
    loop._next_beat = 0
    loop.turn()
    assert len(loop.of(Beat)) == 2


def test_views_come_to_watchers_when_something_has_changed():
    loop = Loop()
    loop.turn()
    assert not loop.of(PoolView)
    loop.receive(Watch(True))
    loop.turn()
    loop._next_view = 0
    loop.turn()
    assert len(loop.of(PoolView)) == 1  # nothing has happened since
    loop.receive(Add("a", [1, 2, 3, 4, 5], GREEDY))
    loop.turn()
    assert len(loop.of(PoolView)) == 2
    loop.receive(Watch(False))
    loop._next_view = 0
    loop.run()
    assert len(loop.of(PoolView)) == 2


def test_a_view_shows_tables_cached_blocks_and_copies():
    engine = make_engine(num_blocks=16)
    engine.add_request("old", list(range(8)), SamplingParams(temperature=0, max_tokens=1))
    while engine.has_work():
        engine.step()
    engine.add_request("new", list(range(50, 56)), SamplingParams(n=2, seed=1, max_tokens=9))
    engine.add_request("later", [1], SamplingParams(max_tokens=1))
    seen = []
    for _ in range(3):
        engine.step()
        view = pool_view(engine)
        tables = {(t.request_id, t.index): t for t in view.tables if t.is_running}
        seen += view.copies
    first, second = tables["new", 0], tables["new", 1]
    assert first.block_table[0] == second.block_table[0]  # the prompt's full block
    assert first.block_table[1] != second.block_table[1]  # written by both, so copied
    assert len(seen) == 1 and seen[0][0] != seen[0][1]
    assert {seen[0][0], seen[0][1]} == {first.block_table[1], second.block_table[1]}
    assert sum(count for _, count in view.cached) == engine.stats().num_blocks_cached == 2
    assert pool_view(engine).copies == []
    assert first.num_prompt_tokens == 6
    # A step that runs counts as stored.
    assert first.num_tokens - first.num_stored_tokens in (0, 1)


def test_runs_of_blocks():
    assert runs([]) == []
    assert runs([7, 3, 4, 5, 9]) == [(3, 3), (7, 1), (9, 1)]
    assert runs([0, 1]) == [(0, 2)]

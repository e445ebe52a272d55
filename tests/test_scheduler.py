"""Who runs, who waits, who gives blocks back: always the same tokens, never a lost block."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated_engine import SimulatedEngine, answer


def finished_as_alone(engine):
    for request in engine.requests:
        for sample in request.samples:
            assert sample.output_token_ids == answer(request, sample.index)
    assert engine.pool.num_free_blocks == engine.pool.num_blocks


def lengths(plan):
    return [sample.num_scheduled_tokens for sample in plan.samples]


def test_prompts_are_cut_into_chunks_that_leave_room_for_running_answers():
    engine = SimulatedEngine(num_blocks=32, max_num_batched_tokens=8, max_num_seqs=8)
    short = engine.add([1, 2, 3], max_tokens=20)
    engine.step()
    long = engine.add([3, 2, 1, 1, 2] * 4, max_tokens=2)
    plans = [engine.step() for _ in range(4)]
    assert len(short.samples[0].output_token_ids) == 5
    assert len(long.samples[0].output_token_ids) == 1
    assert [len(plan.samples) for plan in plans[1:]] == [2, 2, 2]


def test_a_prompt_longer_than_a_steps_budget_runs():
    engine = SimulatedEngine(num_blocks=16, max_num_batched_tokens=3, max_num_seqs=2)
    engine.add([1, 2, 3] * 7, max_tokens=4)
    engine.run()
    finished_as_alone(engine)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "fits"), [(9, 8, True), (10, 8, False), (17, 1, False)]
)
def test_what_can_never_fit_is_refused_on_arrival(num_prompt, max_tokens, fits):
    """Four blocks of four hold 16 tokens, and the last token's K/V are never stored."""
    engine = SimulatedEngine(num_blocks=4, block_size=4)
    blocker = engine.add([1] * 5, max_tokens=2)
    if fits:
        engine.add([1] * num_prompt, max_tokens)
    else:
        with pytest.raises(ValueError, match=r"needs 5 blocks .* the pool has 4"):
            engine.add([1] * num_prompt, max_tokens)
    engine.run()
    assert blocker.is_finished
    finished_as_alone(engine)


def test_more_samples_than_sequences_can_run_are_refused():
    engine = SimulatedEngine(max_num_seqs=2)
    with pytest.raises(ValueError, match="asks for 3 samples, and at most 2"):
        engine.add([1, 2], n=3)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("prefix_caching", ["hash", "radix", "off"])
def test_two_sequences_in_a_pool_one_block_short(preemption, prefix_caching):
    engine = SimulatedEngine(5, 4, prefix_caching, preemption=preemption)
    first, second = engine.add([1, 2, 3, 1, 2], 9), engine.add([2, 2, 3, 1, 2], 9)
    engine.run()
    finished_as_alone(engine)
    assert engine.scheduler.num_preemptions >= 1
    assert first.metrics.num_preemptions == 0 or second.metrics.num_preemptions == 0


def test_the_youngest_is_preempted_and_comes_back_before_newcomers():
    engine = SimulatedEngine(7, 2, "off")
    requests = [engine.add([i, 1, 2], max_tokens=8) for i in (1, 2, 3)]
    while not engine.scheduler.num_preemptions:
        engine.step()
    engine.add([1, 1], max_tokens=1)
    [victim] = [s for p in engine.plans for s in p.preempted]
    running = [s.request for s in engine.scheduler.running]
    assert victim.request is requests[len(running)]
    assert engine.scheduler.waiting[0] is victim
    engine.run()
    finished_as_alone(engine)


def test_a_block_per_running_sequence_is_kept_back_from_newcomers():
    engine = SimulatedEngine(6, 2, "off")
    for prompt in ([1, 2], [3, 2], [2, 2]):
        engine.add(prompt, max_tokens=4)
    engine.step()
    # Two blocks each for prompt and first token would make six; the third finds 2 of 4 left.
    assert len(engine.scheduler.running) == 3
    engine = SimulatedEngine(4, 2, "off")
    for prompt in ([1, 2], [3, 2], [2, 2]):
        engine.add(prompt, max_tokens=4)
    engine.step()
    assert len(engine.scheduler.running) == 2


def test_identical_prompts_that_arrive_together_are_computed_once():
    engine = SimulatedEngine(128, 4, "hash", max_num_batched_tokens=512, max_num_seqs=16)
    prompt = [1, 2, 3, 3, 2, 1, 1] * 5
    for _ in range(8):
        engine.add(prompt, max_tokens=3)
    engine.run()
    finished_as_alone(engine)
    computed = sum(n for p in engine.plans for n in lengths(p) if n > 1)
    assert computed <= len(prompt) + 7 * 4
    assert engine.scheduler.prefix_cache.stats.num_saved_tokens == 7 * 32


def test_who_shares_nothing_does_not_wait_for_a_prefix_being_computed():
    engine = SimulatedEngine(64, 4, "hash", max_num_batched_tokens=64, max_num_seqs=16)
    a, twin, other = engine.add([1] * 9), engine.add([1] * 9), engine.add([2] * 9)
    stranger = engine.add([1] * 9, salt="not to be shared with a")
    plan = engine.step()
    assert {s.request for s in plan.samples} == {a, other, stranger}
    plan = engine.step()
    assert twin.samples[0] in plan.samples and twin.metrics.num_cached_tokens == 8


def test_samples_fork_once_the_prompt_is_stored_and_copy_on_write():
    engine = SimulatedEngine(32, 4, "off")
    request = engine.add([1, 2, 3, 1, 2, 3], max_tokens=6, n=3)
    engine.step()
    alive = [s for s in request.samples if s.is_running]
    tables = [s.sequence.block_table for s in alive]
    assert len(request.samples) == 3 and all(table == [0, 1] for table in tables)
    plan = engine.step()
    assert len(plan.copies) == len(alive) - 1
    engine.run()
    finished_as_alone(engine)


def test_a_better_priority_goes_first_but_not_for_ever():
    def order(ageing_steps):
        engine = SimulatedEngine(
            64, 4, "off", policy="priority", max_num_seqs=1, ageing_steps=ageing_steps
        )
        engine.add([1], max_tokens=1)
        late = engine.add([2], max_tokens=1, priority=1)
        started = []
        for _ in range(12):
            engine.add([3], max_tokens=1, priority=0)
            started += [s.request for s in engine.step().samples]
        return started.index(late) if late in started else None

    assert order(ageing_steps=1000) is None
    assert 2 <= order(ageing_steps=4) <= 8


def test_longest_prefix_first_but_nobody_starves():
    def admitted(ageing_steps):
        engine = SimulatedEngine(
            64, 4, "hash", policy="longest-prefix", max_num_seqs=1, ageing_steps=ageing_steps
        )
        engine.add([1] * 9, max_tokens=1)
        engine.run()
        stranger = engine.add([2] * 9, max_tokens=1)
        order = []
        for i in range(12):
            engine.add([1] * 9 + [i + 1], max_tokens=1)
            order += [s.request for s in engine.step().samples]
        return order.index(stranger) if stranger in order else None

    assert admitted(ageing_steps=1000) is None
    assert 2 <= admitted(ageing_steps=5) <= 8


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding", "preempted", "in flight"])
def test_abort_at_any_moment_frees_everything(when):
    engine = SimulatedEngine(7, 2, "hash", max_num_batched_tokens=4, max_num_seqs=4)
    keep = engine.add([1, 2, 3], max_tokens=9)
    gone = engine.add([3, 2, 3, 1, 1, 3], max_tokens=8)
    if when != "waiting":
        reached = {
            "prefilling": lambda s: 0 < s.sequence.num_cached_tokens < 6,
            "decoding": lambda s: s.num_output_tokens > 0,
            "preempted": lambda s: s.num_preemptions > 0,
            "in flight": lambda s: engine.in_flight and s in engine.in_flight.samples,
        }[when]
        while not gone.is_finished and not reached(gone.samples[0]):
            engine.step()
        assert not gone.is_finished
    engine.abort(gone)
    assert gone.samples[0].sequence.block_table == []
    engine.run()
    assert keep.samples[0].output_token_ids == answer(keep, 0)
    assert engine.pool.num_free_blocks == engine.pool.num_blocks


def test_the_step_ahead_is_planned_only_if_it_is_sure():
    engine = SimulatedEngine(64, 4, "off")
    engine.add([1, 2, 3, 1], max_tokens=30)
    plan = engine.scheduler.schedule()
    engine._start(plan)
    assert engine.scheduler.schedule_next(plan) is not None
    engine.add([1, 2, 3], max_tokens=3)
    assert engine.scheduler.schedule_next(plan) is None


@pytest.mark.parametrize("option", [{"policy": "lifo"}, {"preemption": "never"}])
def test_unknown_choices_are_refused_with_the_known_ones(option):
    with pytest.raises(ValueError, match="is one of"):
        SimulatedEngine(**option)


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests, steps and aborts; whatever was admitted ends as it would alone."""

    @initialize(
        num_blocks=st.integers(1, 50),
        block_size=st.integers(1, 5),
        prefix_caching=st.sampled_from(["hash", "radix", "off"]),
        policy=st.sampled_from(["fcfs", "priority", "longest-prefix"]),
        preemption=st.sampled_from(["recompute", "swap"]),
        max_num_seqs=st.integers(1, 6),
        spare=st.integers(0, 12),
        ageing_steps=st.integers(1, 10),
    )
    def begin(self, num_blocks, block_size, prefix_caching, max_num_seqs, spare, **options):
        self.engine = SimulatedEngine(
            num_blocks,
            block_size,
            prefix_caching,
            ends=True,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare,
            **options,
        )
        self.aborted = set()

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=14),
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 3),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "", "", "x"]),
    )
    def add(self, prompt, max_tokens, n, priority, salt):
        scheduler, pool = self.engine.scheduler, self.engine.pool
        num_stored = len(prompt) + max_tokens - 1
        fits = num_stored <= pool.num_blocks * pool.block_size and n <= scheduler.max_num_seqs
        try:
            self.engine.add(prompt, max_tokens, n, priority, salt)
        except ValueError:
            assert not fits
        else:
            assert fits

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps):
        for _ in range(num_steps):
            self.engine.step()

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(self.engine.requests))
        if not request.is_finished:
            self.engine.abort(request)
            self.aborted.add(request)

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "engine"):
            self.engine.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.engine.run()
        for request in self.engine.requests:
            if request not in self.aborted:
                assert request.is_finished
                for sample in request.samples:
                    assert sample.output_token_ids == answer(request, sample.index)
        assert self.engine.pool.num_free_blocks == self.engine.pool.num_blocks
        self.engine.pool.check_integrity([])


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)

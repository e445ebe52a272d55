"""What preemption costs, and how often it happens."""

import json
from types import SimpleNamespace

import _scripts  # noqa: F401
import mlx.core as mx
import preempt
import pytest
from measurements import serving
from measurements.preemption import cost
from measurements.serving import Arrival, serve_paged
from tiny_engine import paged_model


def test_costs_are_measured_for_whole_and_partly_filled_blocks():
    loaded = SimpleNamespace(model=paged_model(), dtype=mx.float32)
    for block_size, num_tokens in ((1, 5), (16, 40), (256, 600)):
        measured = cost(loaded, block_size, num_tokens, repeats=1)
        assert min(vars(measured).values()) > 0
        assert measured.swap == measured.swap_out + measured.swap_in


def test_requests_of_a_group_begin_alike_and_go_on_differently():
    groups = preempt.Groups(num_groups=3, num_tokens=5)
    prompts = [groups.prompt(i, Arrival(0, 9, 1)) for i in range(9)]
    assert all(len(prompt) == 9 for prompt in prompts)
    for i in range(9):
        for j in range(i):
            assert (prompts[i][:5] == prompts[j][:5]) == (i % 3 == j % 3)
            assert not set(prompts[i][5:]) & set(prompts[j])
    # Every group has requests of every priority.
    assert {(i % 3, groups.priority(i)) for i in range(9)} == {
        (group, priority) for group in range(3) for priority in range(3)
    }


@pytest.mark.parametrize("policy", preempt.POLICIES)
def test_preempted_requests_finish_and_only_what_was_given_up_is_computed_twice(
    policy, monkeypatch
):
    schedulers = []
    scheduler = serving.Scheduler
    monkeypatch.setattr(
        serving,
        "Scheduler",
        lambda *args, **kwargs: schedulers.append(scheduler(*args, **kwargs)) or schedulers[-1],
    )
    requests = [Arrival(i / 3, 30, 60) for i in range(40)]
    alone = sum(request.num_stored for request in requests)
    meter = serve_paged(requests, 60, 4, policy=policy)
    assert meter.num_finished == len(meter.delays) == 40
    assert meter.num_preemptions > 0
    assert meter.num_computed == alone + meter.num_preempted_tokens
    # With a common beginning cached, less is computed.
    shared = serve_paged(requests, 60, 4, policy=policy, traits=preempt.Groups(2, 16))
    assert shared.num_finished == 40
    assert shared.num_computed < alone + shared.num_preempted_tokens - 30 * 16
    for each in schedulers:
        each.check_integrity()
        assert each.pool.num_free_blocks == 60


def test_urgent_requests_wait_less_under_priority():
    groups = preempt.Groups(1, 1)
    requests = [Arrival(0, 20, 30) for _ in range(60)]
    orders = {}
    for policy in ("fcfs", "priority"):
        begun = []
        library = serving._Library(40, 4, policy, groups)
        for request in requests:
            library.add(request)
        while library.scheduler.has_work():
            plan = library.scheduler.schedule()
            begun += [
                int(s.request.request_id)
                for s in plan.samples
                if s.num_output_tokens == 0 and not s.num_preemptions
            ]
            library.scheduler.advance(plan)
            library.scheduler.publish(plan)
            library.draw(plan.samples)
        orders[policy] = [groups.priority(i) for i in begun]
    assert orders["priority"] == sorted(orders["priority"])
    assert orders["fcfs"] != sorted(orders["fcfs"])


def test_preemptions_grow_with_the_load(capsys):
    options = ["--requests", "400", "--loads", "0.3", "1.2", "--no-model"]
    preempt.main([*options, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["costs"] is None
    light, heavy = result["counts"]
    for policy in preempt.POLICIES:
        assert light[policy]["preemptions_per_100"] == 0 < heavy[policy]["preemptions_per_100"]
        assert light[policy]["in_flight"] == pytest.approx(light["in_flight_asked_for"], rel=0.2)
        assert light[policy]["mean_delay_steps"] < heavy[policy]["mean_delay_steps"]

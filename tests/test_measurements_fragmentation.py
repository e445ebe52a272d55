"""Allocators against a memory of marked slots, and servers against each other and by hand."""

import json
import random

import _scripts  # noqa: F401
import fragmentation
import pytest
from measurements import serving, traces, virtual_memory
from measurements.allocators import ALLOCATORS, BestFit, Buddy, FirstFit
from measurements.meter import Meter
from measurements.reservations import contiguous
from measurements.serving import Arrival, serve_contiguous, serve_paged
from measurements.virtual_memory import serve_pages


def some_requests(num_requests, seed=0, gap=2.0):
    rng = random.Random(seed)
    time, requests = 0.0, []
    for _ in range(num_requests):
        time += rng.expovariate(1 / gap)
        requests.append(Arrival(time, rng.randrange(1, 60), rng.randrange(1, 40)))
    return requests


def gaps_of(marked):
    """(size, start) of each run of unmarked slots."""
    gaps, start = [], None
    for i, mark in enumerate([*marked, True]):
        if not mark and start is None:
            start = i
        elif mark and start is not None:
            gaps.append((i - start, start))
            start = None
    return gaps


def expected_start(name, marked, size):
    fitting = [(gap, start) for gap, start in gaps_of(marked) if gap >= size]
    if not fitting:
        return None
    return min(fitting)[1] if name == "best-fit" else min(start for _, start in fitting)


@pytest.mark.parametrize("name", ALLOCATORS)
@pytest.mark.parametrize("num_slots", [64, 100])
def test_allocators_place_as_a_search_of_all_slots_would(name, num_slots):
    rng = random.Random(num_slots)
    allocator, marked, ranges = ALLOCATORS[name](num_slots), [False] * num_slots, {}
    for _ in range(2000):
        if ranges and rng.random() < 0.48:
            start = rng.choice(list(ranges))
            size = ranges.pop(start)
            allocator.release(start)
            marked[start : start + size] = [False] * size
        else:
            wanted = rng.randrange(1, 30)
            size = allocator.size(wanted)
            start = allocator.reserve(wanted)
            if name == "buddy":
                assert size == 2 ** (wanted - 1).bit_length()
                aligned = range(0, num_slots - size + 1, size)
                possible = [s for s in aligned if not any(marked[s : s + size])]
                assert (start is None) == (not possible)
                assert start is None or start in possible
            else:
                assert start == expected_start(name, marked, wanted)
            if start is not None:
                assert not any(marked[start : start + size])
                marked[start : start + size] = [True] * size
                ranges[start] = size
        assert allocator.num_free == marked.count(False)
    for start in ranges:
        allocator.release(start)
    whole = 64
    assert allocator.reserve(whole) == 0


def test_first_fit_and_best_fit_choose_different_gaps():
    for allocator, expected in ((FirstFit(20), 0), (BestFit(20), 12)):
        starts = [allocator.reserve(size) for size in (10, 2, 3, 5)]
        allocator.release(starts[0])
        allocator.release(starts[2])
        assert allocator.reserve(3) == expected


def brute_force_contiguous(requests, reserve, num_slots):
    """First-fit on marked slots, every request counted in every step."""
    marked, waiting, running, step = [False] * num_slots, [], [], 0
    left, delays, in_flight, stored, gaps = list(requests), [], 0, 0, 0
    while left or waiting or running:
        while left and left[0].time <= step:
            waiting.append(left.pop(0))
        while waiting:
            size = reserve(waiting[0].prompt, waiting[0].answer)
            start = expected_start("first-fit", marked, size)
            if start is None:
                break
            request = waiting.pop(0)
            marked[start : start + size] = [True] * size
            running.append([request, start, size, 0])
            delays.append(step - request.time)
        for entry in running:
            entry[3] += 1
        if waiting:
            in_flight += len(running)
            stored += sum(r.prompt + t - 1 for r, _, _, t in running)
            free = marked.count(False)
            gaps += free if reserve(waiting[0].prompt, waiting[0].answer) <= free else 0
        step += 1
        for entry in [e for e in running if e[3] == e[0].answer]:
            running.remove(entry)
            marked[entry[1] : entry[1] + entry[2]] = [False] * entry[2]
    return step, delays, in_flight, stored, gaps


@pytest.mark.parametrize("policy", ["max", "pow2", "oracle"])
def test_contiguous_server_equals_one_that_counts_slot_by_slot(policy, monkeypatch):
    monkeypatch.setattr(serving, "Meter", lambda num_requests: Meter(num_requests, warm_up=0))
    requests, reserve = some_requests(120), contiguous(128)[policy]
    meter = serve_contiguous(requests, reserve, FirstFit(400))
    step, delays, in_flight, stored, gaps = brute_force_contiguous(requests, reserve, 400)
    assert meter.last_step == step
    assert meter.delays == delays
    assert meter.num_running_full == in_flight
    assert meter.full.stored == stored
    assert meter.full.gaps == gaps
    assert (gaps > 0) == (policy != "max")
    assert meter.full.total == 400 * meter.num_full_steps


@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_pages_of_a_block_s_size_are_served_as_the_scheduler_serves_blocks(block_size):
    requests = some_requests(250, gap=1.0)
    paged = serve_paged(requests, 480 // block_size, block_size)
    pages = serve_pages(requests, 480 // block_size, 10 * block_size, 10)
    assert sorted(paged.delays) == sorted(pages.delays)
    assert paged.num_preemptions == pages.num_preemptions
    assert block_size > 1 or paged.num_preemptions > 0
    assert paged.last_step == pages.last_step
    assert paged.full.shares() == pytest.approx(pages.full.shares())
    assert paged.in_flight == pages.in_flight


def test_a_page_may_hold_a_part_of_a_token(monkeypatch):
    monkeypatch.setattr(virtual_memory, "Meter", lambda num_requests: Meter(num_requests, 0))
    # 4, 5, 6 tokens are 160, 200, 240 bytes in 3, 4, 4 pages; the second has room only then.
    requests = [Arrival(0, 4, 3), Arrival(0, 1, 1)]
    meter = serve_pages(requests, 4, page_nbytes=64, token_nbytes=40)
    assert meter.delays == [0, 3]
    assert meter.num_full_steps == 3
    assert meter.full.stored == 4 + 5 + 6
    assert meter.full.reserved == pytest.approx((3 + 4 + 4) * 64 / 40)


def test_servers_refuse_what_never_fits():
    requests = [Arrival(0, 50, 20)]
    with pytest.raises(ValueError, match="reserves 70 slots"):
        serve_contiguous(requests, contiguous()["oracle"], FirstFit(69))
    with pytest.raises(ValueError, match="lower max_tokens"):
        serve_paged(requests, 4, 16)
    with pytest.raises(ValueError, match="needs 5 pages"):
        serve_pages(requests, 4, 16, 1)


def test_arrivals_come_at_the_load_asked_for():
    pairs = [(10, answer) for answer in range(1, 2001)]
    arrivals = traces.poisson(pairs, load=20)
    mean = sum(answer for _, answer in pairs) / len(pairs)
    assert len(arrivals) * mean / arrivals[-1].time == pytest.approx(20, rel=0.1)
    stretched = traces.at_load([Arrival(3 * i, p, a) for i, (p, a) in enumerate(pairs)], 5)
    assert stretched[0].time == 0
    assert len(pairs) * mean / stretched[-1].time == pytest.approx(5)


def test_a_trace_is_read_and_bad_lines_are_named(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens\n2.5,10,3\n0.5,7,1\n3,5,0\n")
    assert traces.read_trace(file) == [Arrival(0.5, 7, 1), Arrival(2.5, 10, 3)]
    file.write_text("arrival_s,prompt_tokens,output_tokens\n2.5,10,3\n0.5,x,1\n")
    with pytest.raises(ValueError, match="line 3"):
        traces.read_trace(file)


def test_contiguous_loses_to_gaps_and_paged_does_not(capsys):
    fragmentation.main(["--json", "--requests", "700", "--loads", "20", "--sweep-requests", "200"])
    result = json.loads(capsys.readouterr().out)["ShareGPT"]
    for way, figures in result["full"].items():
        lost = figures["share_of_reserved"] - figures["share_of_taken"]
        if way.startswith(("pow2", "oracle")):
            assert lost > 0.02
        else:
            assert lost == pytest.approx(0)
        assert sum(figures["memory"].values()) == pytest.approx(1)
    assert result["full"]["paged"]["share_of_taken"] > 0.97
    in_flight = {way: figures["in_flight"] for way, figures in result["full"].items()}
    assert in_flight["paged"] > 2 * in_flight["oracle, buddy"] > 4 * in_flight["max, buddy"]
    assert all(len(points) == 1 for points in result["by_load"].values())
    assert not result["by_load"]["paged"][0]["is_saturated"]
    assert result["by_load"]["max, buddy"][0]["is_saturated"]


def test_memory_that_is_never_full_is_not_measured():
    with pytest.raises(ValueError, match="20 requests don't fill the memory"):
        fragmentation.main(["--requests", "20", "--loads"])


def test_buddies_halve_and_merge():
    buddy = Buddy(12)  # 8 + 4
    assert [buddy.reserve(3), buddy.reserve(2), buddy.reserve(5), buddy.reserve(4)] == [
        8,
        0,
        None,
        4,
    ]
    assert buddy.num_free == 2
    buddy.release(0)
    buddy.release(4)
    assert buddy.reserve(8) == 0

"""Servers of requests, simulated step by step: contiguous reservations, and this library.

In each step every running request stores its last token and draws the next, and a new request
stores its whole prompt. A request with an answer of a tokens runs for a steps, and stores
p + t - 1 tokens by step t. Requests are admitted in the order of arrival.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from measurements.allocators import Allocator
from measurements.meter import Memory, Meter
from measurements.reservations import Reserve
from mlx_paged.blocks import BlockPool
from mlx_paged.blocks.prefix import HashIndex
from mlx_paged.blocks.prefix_cache import PrefixCache
from mlx_paged.engine.params import SamplingParams
from mlx_paged.engine.request import Request, Sample
from mlx_paged.engine.scheduler import Policy, Scheduler

MAX_RUNNING = 4096

# Called whenever a request has finished.
Tick = Callable[[], object]


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes, in steps, and its lengths in tokens."""

    time: float
    prompt: int
    answer: int

    @property
    def num_stored(self) -> int:
        """Tokens stored at the end; the last one's K/V are never computed."""
        return self.prompt + self.answer - 1


class Arrivals:
    """Requests in the order of arrival, taken as their time comes."""

    def __init__(self, arrivals: list[Arrival]) -> None:
        self._left = deque(arrivals)
        self.num_arrived = 0

    def __bool__(self) -> bool:
        return bool(self._left)

    def until(self, step: int) -> Iterator[Arrival]:
        while self._left and self._left[0].time <= step:
            self.num_arrived += 1
            yield self._left.popleft()

    def next_step(self) -> int:
        return math.ceil(self._left[0].time)


class _Ranges:
    """The requests that hold a contiguous range each, and what they store together."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        # The first to end first: step after the last one, start of the range, request, size.
        self._ends: list[tuple[int, int, Arrival, int]] = []
        self._stored = self._final = self._reserved = 0

    def __len__(self) -> int:
        return len(self._ends)

    def start(self, request: Arrival, num_slots: int, step: int) -> bool:
        """Let a request run from this step on; False if no gap is long enough."""
        start = self.allocator.reserve(num_slots)
        if start is None:
            return False
        size = self.allocator.size(num_slots)
        heapq.heappush(self._ends, (step + request.answer, start, request, size))
        # The forward pass adds one token to each.
        self._stored += request.prompt - 1
        self._final += request.num_stored
        self._reserved += size
        return True

    def forward(self, num_needed: int) -> Memory:
        """Run a step. `num_needed` is what the next waiting request reserves."""
        self._stored += len(self._ends)
        free = self.allocator.num_free
        return Memory(
            self._stored,
            self._final - self._stored,
            self._reserved - self._final,
            gaps=free if num_needed <= free else 0,
            too_few=free if num_needed > free else 0,
        )

    def end(self, step: int) -> int:
        """Release what ends before this step; how many those are."""
        num_before = len(self._ends)
        while self._ends and self._ends[0][0] <= step:
            _, start, request, size = heapq.heappop(self._ends)
            self.allocator.release(start)
            self._stored -= request.num_stored
            self._final -= request.num_stored
            self._reserved -= size
        return num_before - len(self._ends)


def serve_contiguous(
    requests: list[Arrival], reserve: Reserve, allocator: Allocator, tick: Tick = bool
) -> Meter:
    """Each request runs when a gap holds its reservation, and gives it back at the end.

    Raises:
        ValueError: a request fits into no gap although nothing runs.
    """
    meter, left, ranges = Meter(len(requests)), Arrivals(requests), _Ranges(allocator)
    waiting: deque[Arrival] = deque()
    step = 0
    while left or waiting or ranges:
        waiting.extend(left.until(step))
        num_needed = 0
        while waiting and len(ranges) < MAX_RUNNING:
            head = waiting[0]
            num_needed = reserve(head.prompt, head.answer)
            if not ranges.start(head, num_needed, step):
                break
            meter.delays.append(step - waiting.popleft().time)
        if not ranges:
            if waiting:
                raise ValueError(
                    f"a request reserves {num_needed} slots, and no gap of the "
                    f"{allocator.num_slots} is that long; give more --slots"
                )
            step = left.next_step()
            continue
        num_running, memory = len(ranges), ranges.forward(num_needed)
        meter.count(num_running, len(waiting), left.num_arrived, memory)
        step += 1
        for _ in range(ranges.end(step)):
            meter.num_finished += 1
            tick()
    meter.last_step = step
    return meter


class Traits(Protocol):
    """What the scheduler sees of requests, beside their lengths."""

    def prompt(self, i: int, arrival: Arrival) -> list[int]:
        """Token ids of the i-th request's prompt."""

    def priority(self, i: int) -> int:
        """Lower goes first, under the policy "priority"."""


class _Library:
    """This library's BlockPool and Scheduler, with a model that costs nothing."""

    def __init__(
        self, num_blocks: int, block_size: int, policy: Policy, traits: Traits | None
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        cache = PrefixCache(self.pool, HashIndex(block_size)) if traits else None
        self.scheduler = Scheduler(
            self.pool,
            cache,
            policy=policy,
            max_num_seqs=MAX_RUNNING,
            max_num_batched_tokens=2**30,
        )
        self.traits = traits
        self.times: dict[str, float] = {}

    def add(self, arrival: Arrival) -> None:
        i = len(self.times)
        self.times[str(i)] = arrival.time
        params = SamplingParams(max_tokens=arrival.answer)
        prompt = self.traits.prompt(i, arrival) if self.traits else [0] * arrival.prompt
        priority = self.traits.priority(i) if self.traits else 0
        self.scheduler.add(Request(str(i), prompt, params, arrival.answer, priority))

    def begun(self, samples: list[Sample]) -> Iterator[float]:
        """Times of arrival of those that run for the first time."""
        for sample in samples:
            if sample.num_output_tokens == 0 and sample.num_preemptions == 0:
                yield self.times[sample.request.request_id]

    def memory(self, samples: list[Sample]) -> Memory:
        size = self.pool.block_size
        stored = used = reserved = 0
        for sample in samples:
            num_slots = len(sample.sequence.block_table) * size
            stored += sample.sequence.num_cached_tokens
            used += min(num_slots, sample.max_num_tokens - 1)
            reserved += num_slots
        free = self.pool.num_free_blocks * size
        return Memory(stored, used - stored, reserved - used, too_few=free)

    def draw(self, samples: list[Sample]) -> int:
        """Give each sample a token; how many have all of theirs now."""
        num_finished = 0
        for sample in samples:
            sample.sequence.token_ids.append(0)
            if sample.num_tokens == sample.max_num_tokens:
                self.scheduler.remove(sample)
                num_finished += 1
        return num_finished


def serve_paged(
    requests: list[Arrival],
    num_blocks: int,
    block_size: int,
    tick: Tick = bool,
    policy: Policy = "fcfs",
    traits: Traits | None = None,
) -> Meter:
    """Blocks are taken as answers grow; the youngest requests are preempted when none is left.

    Args:
        policy: of the scheduler.
        traits: of the requests; with them prefixes are cached.

    Raises:
        ValueError: a request is longer than the pool.
    """
    library = _Library(num_blocks, block_size, policy, traits)
    scheduler = library.scheduler
    meter, left = Meter(len(requests)), Arrivals(requests)
    step = 0
    while left or scheduler.has_work():
        for arrival in left.until(step):
            library.add(arrival)
        plan = scheduler.schedule()
        if not plan:
            step = left.next_step()
            continue
        samples = plan.samples
        meter.delays += [step - time for time in library.begun(samples)]
        meter.num_computed += plan.num_tokens
        meter.num_preempted_tokens += sum(sample.num_tokens - 1 for sample in plan.preempted)
        scheduler.advance(plan)
        scheduler.publish(plan)
        num_waiting, memory = len(scheduler.waiting), library.memory(samples)
        meter.count(len(samples), num_waiting, left.num_arrived, memory)
        step += 1
        for _ in range(library.draw(samples)):
            meter.num_finished += 1
            tick()
    meter.num_preemptions = scheduler.num_preemptions
    meter.last_step = step
    return meter

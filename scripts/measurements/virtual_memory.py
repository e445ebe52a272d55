"""Paging by virtual memory: a request's cache is contiguous in addresses, not in memory.

A page of physical memory is mapped when the tokens reach it, in every layer for K and for V.
Whom to admit and whom to preempt follows the rules of this library's Scheduler.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from measurements.meter import Memory, Meter
from measurements.serving import MAX_RUNNING, Arrival, Arrivals, Tick


@dataclass
class _Request:
    """A request, ordered by arrival. Pages are those of one layer's K.

    Attributes:
        num_tokens: to be stored after the next step.
    """

    index: int
    arrival: Arrival
    num_tokens: int
    num_pages: int = 0

    def __lt__(self, other: _Request) -> bool:
        return self.index < other.index


class _Server:
    """Requests that run, oldest first, requests that wait, and pages that are free."""

    def __init__(self, num_pages: int, page_nbytes: int, token_nbytes: int) -> None:
        self.num_pages = self.num_free = num_pages
        self.page_nbytes, self.token_nbytes = page_nbytes, token_nbytes
        self.waiting: list[_Request] = []  # a heap
        self.running: list[_Request] = []
        self.num_added = self.num_preemptions = 0

    def add(self, arrival: Arrival) -> None:
        num_pages = self._pages(arrival.num_stored)
        if num_pages > self.num_pages:
            raise ValueError(
                f"a request of {arrival.num_stored} tokens needs {num_pages} pages of "
                f"{self.page_nbytes} bytes, and there are {self.num_pages}; give more --slots"
            )
        heapq.heappush(self.waiting, _Request(self.num_added, arrival, arrival.prompt))
        self.num_added += 1

    def grow(self) -> bool:
        """Map what the running ones need, at the cost of the youngest; False if there was one."""
        num_before = self.num_preemptions
        i = 0
        while i < len(self.running):
            request = self.running[i]
            num_missing = self._pages(request.num_tokens) - request.num_pages
            if num_missing > self.num_free:
                self._preempt()
                continue
            request.num_pages += num_missing
            self.num_free -= num_missing
            i += 1
        return self.num_preemptions == num_before

    def admit(self) -> list[Arrival]:
        """Start whom there is room for, with a page to spare for each that runs.

        Returns those that run for the first time.
        """
        begun = []
        while self.waiting and len(self.running) < MAX_RUNNING:
            head = self.waiting[0]
            num_needed = self._pages(head.num_tokens)
            if num_needed + len(self.running) > self.num_free:
                break
            heapq.heappop(self.waiting)
            head.num_pages = num_needed
            self.num_free -= num_needed
            self.running.append(head)
            if head.num_tokens == head.arrival.prompt:
                begun.append(head.arrival)
        self.running.sort()
        return begun

    def end(self) -> int:
        """Count the step's tokens and let go whoever has all; how many those are."""
        staying = []
        for request in self.running:
            request.num_tokens += 1
            if request.num_tokens <= request.arrival.num_stored:
                staying.append(request)
            else:
                self.num_free += request.num_pages
        num_finished = len(self.running) - len(staying)
        self.running = staying
        return num_finished

    def memory(self) -> Memory:
        page_tokens = self.page_nbytes / self.token_nbytes
        stored = used = reserved = 0.0
        for request in self.running:
            num_slots = request.num_pages * page_tokens
            stored += request.num_tokens
            used += min(num_slots, request.arrival.num_stored)
            reserved += num_slots
        too_few = self.num_free * page_tokens
        return Memory(stored, used - stored, reserved - used, too_few=too_few)

    def _preempt(self) -> None:
        youngest = self.running.pop()
        self.num_free += youngest.num_pages
        youngest.num_pages = 0
        heapq.heappush(self.waiting, youngest)
        self.num_preemptions += 1

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens * self.token_nbytes // self.page_nbytes)


def serve_pages(
    requests: list[Arrival],
    num_pages: int,
    page_nbytes: int,
    token_nbytes: int,
    tick: Tick = bool,
) -> Meter:
    """Pages are mapped as answers grow; the youngest requests are preempted when none is left.

    Args:
        num_pages: of one layer's K.
        page_nbytes: bytes of a page, which need not hold whole tokens.
        token_nbytes: bytes of a token's K in one layer.

    Raises:
        ValueError: a request needs more pages than there are.
    """
    meter, left = Meter(len(requests)), Arrivals(requests)
    server = _Server(num_pages, page_nbytes, token_nbytes)
    step = 0
    while left or server.waiting or server.running:
        for arrival in left.until(step):
            server.add(arrival)
        if server.grow():
            meter.delays += [step - begun.time for begun in server.admit()]
        if not server.running:
            step = left.next_step()
            continue
        num_running, num_waiting = len(server.running), len(server.waiting)
        meter.count(num_running, num_waiting, left.num_arrived, server.memory())
        step += 1
        for _ in range(server.end()):
            meter.num_finished += 1
            tick()
    meter.num_preemptions = server.num_preemptions
    meter.last_step = step
    return meter

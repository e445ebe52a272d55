"""What a simulated server reports of its steps: who runs, what memory holds, who waits how long."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Memory:
    """Slots of a cache by what is in them, in one step or added up over many.

    Attributes:
        stored: hold a token's K/V.
        to_come: reserved for a token that the same request stores later.
        never_used: reserved, and stay empty.
        gaps: free, and enough for the next waiting request if they lay together.
        too_few: free, and less than the next waiting request needs.
    """

    stored: float = 0
    to_come: float = 0
    never_used: float = 0
    gaps: float = 0
    too_few: float = 0

    @property
    def reserved(self) -> float:
        return self.stored + self.to_come + self.never_used

    @property
    def total(self) -> float:
        return self.reserved + self.gaps + self.too_few

    @property
    def share_of_reserved(self) -> float:
        """Stored tokens over reserved slots: what waste.py calculates."""
        return self.stored / self.reserved

    @property
    def share_of_taken(self) -> float:
        """Stored tokens over reserved slots and gaps: with external fragmentation."""
        return self.stored / (self.reserved + self.gaps)

    @property
    def share_of_all(self) -> float:
        """Stored tokens over all slots."""
        return self.stored / self.total

    def shares(self) -> dict[str, float]:
        """Each kind of slot over all slots."""
        return {name: value / self.total for name, value in vars(self).items()}


@dataclass
class Meter:
    """Adds up steps: those in which somebody waited, and those in which requests arrive.

    Attributes:
        full: memory, added up over the steps in which somebody waited.
        num_steps, num_running: steps until the last arrival, and requests that ran in them.
        num_waiting_at_end: requests that waited when the last one arrived.
        num_preempted_tokens: stored tokens that preempted requests gave up.
        num_computed: tokens of all forward passes.

    Args:
        num_requests: that will be served.
        warm_up: share of the requests that finish before full steps count, and that arrive
            before others do.
    """

    num_requests: int
    warm_up: float = 0.1
    full: Memory = field(default_factory=Memory)
    num_full_steps: int = 0
    num_running_full: int = 0
    num_steps: int = 0
    num_running: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    num_preempted_tokens: int = 0
    num_computed: int = 0
    last_step: int = 0
    delays: list[float] = field(default_factory=list)
    num_waiting_at_end: int = 0

    def count(self, num_running: int, num_waiting: int, num_arrived: int, memory: Memory) -> None:
        """Take one step in."""
        if self.warm_up * self.num_requests <= num_arrived < self.num_requests:
            self.num_steps += 1
            self.num_running += num_running
            self.num_waiting_at_end = num_waiting
        if num_waiting and self.num_finished >= self.warm_up * self.num_requests:
            self.num_full_steps += 1
            self.num_running_full += num_running
            full = self.full
            full.stored += memory.stored
            full.to_come += memory.to_come
            full.never_used += memory.never_used
            full.gaps += memory.gaps
            full.too_few += memory.too_few

    @property
    def in_flight_full(self) -> float:
        """Requests that run at once while others wait."""
        return self.num_running_full / max(1, self.num_full_steps)

    @property
    def in_flight(self) -> float:
        """Requests that run at once while requests arrive."""
        return self.num_running / max(1, self.num_steps)

    @property
    def mean_delay(self) -> float:
        """Steps from arrival to the first step, of the requests after the warm-up."""
        counted = self.delays[int(self.warm_up * self.num_requests) :]
        return sum(counted) / max(1, len(counted))

    @property
    def is_saturated(self) -> bool:
        """Whether requests came faster than they were served: the queue only grew."""
        return self.num_waiting_at_end > 0.03 * self.num_requests

"""Allocators of contiguous memory, in slots: first-fit, best-fit, buddy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort


class Allocator(ABC):
    """Hands out ranges of `num_slots` slots.

    Attributes:
        num_slots: of the whole memory.
        num_free: slots in no range that was handed out.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"memory needs at least 1 slot, not {num_slots}")
        self.num_slots = self.num_free = num_slots

    def size(self, num_slots: int) -> int:
        """Slots that are really taken for a range of `num_slots`."""
        return num_slots

    @abstractmethod
    def reserve(self, num_slots: int) -> int | None:
        """Start of a range that was free; None if no gap is long enough."""

    @abstractmethod
    def release(self, start: int) -> None:
        """Give back the range that starts there."""


class FirstFit(Allocator):
    """The first gap that is long enough; neighbouring gaps merge."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._gaps = [(0, num_slots)]
        self._sizes: dict[int, int] = {}

    def _find(self, num_slots: int) -> int | None:
        """Index of the gap to use."""
        return next((i for i, (_, size) in enumerate(self._gaps) if size >= num_slots), None)

    def reserve(self, num_slots: int) -> int | None:
        i = self._find(num_slots)
        if i is None:
            return None
        start, size = self._gaps[i]
        self._gaps[i : i + 1] = [(start + num_slots, size - num_slots)] if size > num_slots else []
        self._sizes[start] = num_slots
        self.num_free -= num_slots
        return start

    def release(self, start: int) -> None:
        size, gaps = self._sizes.pop(start), self._gaps
        self.num_free += size
        stop = start + size
        i = bisect_left(gaps, (start,))
        j = i
        if j < len(gaps) and gaps[j][0] == stop:
            stop += gaps[j][1]
            j += 1
        if i and sum(gaps[i - 1]) == start:
            i -= 1
            start = gaps[i][0]
        gaps[i:j] = [(start, stop - start)]


class BestFit(FirstFit):
    """The shortest gap that is long enough, the first of equals."""

    def _find(self, num_slots: int) -> int | None:
        fitting = ((size, i) for i, (_, size) in enumerate(self._gaps) if size >= num_slots)
        return min(fitting, default=(0, None))[1]


class Buddy(Allocator):
    """Ranges of 2^k slots at multiples of 2^k; two halves that are free merge.

    Memory whose size is no power of two is cut into ever smaller ones.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._free: list[list[int]] = [[] for _ in range(num_slots.bit_length())]
        self._orders: dict[int, int] = {}
        start = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots >> order & 1:
                self._free[order].append(start)
                start += 1 << order

    def size(self, num_slots: int) -> int:
        return 1 << _order(num_slots)

    def reserve(self, num_slots: int) -> int | None:
        wanted = _order(num_slots)
        order = next((k for k in range(wanted, len(self._free)) if self._free[k]), None)
        if order is None:
            return None
        start = self._free[order].pop(0)
        while order > wanted:
            order -= 1
            insort(self._free[order], start + (1 << order))
        self._orders[start] = wanted
        self.num_free -= 1 << wanted
        return start

    def release(self, start: int) -> None:
        order = self._orders.pop(start)
        self.num_free += 1 << order
        while (buddy := start ^ (1 << order)) in self._free[order]:
            self._free[order].remove(buddy)
            start = min(start, buddy)
            order += 1
        insort(self._free[order], start)


ALLOCATORS: dict[str, type[Allocator]] = {
    "first-fit": FirstFit,
    "best-fit": BestFit,
    "buddy": Buddy,
}


def _order(num_slots: int) -> int:
    """The smallest k with 2^k >= num_slots."""
    return (num_slots - 1).bit_length()

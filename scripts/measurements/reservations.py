"""Slots that a request reserves under each policy, summed over its decode steps.

At step t of 1 to a, a request with a prompt of p tokens and an answer of a holds p + t tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from measurements.lengths import Pair

WINDOW = 2048
BLOCK_SIZE = 16

Reserve = Callable[[int, int], int]


def contiguous(window: int = WINDOW) -> dict[str, Reserve]:
    """Slots that a contiguous policy reserves for a prompt of p and an answer of a, by its name.

    "max" reserves the window (a longer request its own length); "pow2" knows the answer up to
    the next power of two; "oracle" knows it.
    """
    return {
        "max": lambda p, a: max(window, p + a),
        "pow2": lambda p, a: p + 2 ** math.ceil(math.log2(a)),
        "oracle": lambda p, a: p + a,
    }


def num_tokens_held(p: int, a: int) -> int:
    """Sum of p + t over the steps."""
    return a * p + a * (a + 1) // 2


def num_slots_paged(p: int, a: int, block_size: int) -> int:
    """Sum over the steps of the slots in the blocks that p + t tokens need."""
    return block_size * (_sum_of_blocks(p + a, block_size) - _sum_of_blocks(p, block_size))


def _sum_of_blocks(num_tokens: int, block_size: int) -> int:
    """Sum of ceil(n / block_size) over n = 1 .. num_tokens."""
    full, rest = divmod(num_tokens, block_size)
    return block_size * full * (full + 1) // 2 + rest * (full + 1)


@dataclass(frozen=True)
class Use:
    """What one policy does to a list of requests.

    Attributes:
        share: of reserved slots that hold a token, over all requests and steps.
        share_error: its standard error, as the requests are a sample.
        slots: reserved per running request, on average over steps.
        slots_error: its standard error.
    """

    share: float
    share_error: float
    slots: float
    slots_error: float

    def at_once(self, num_slots: int) -> int:
        """Requests that fit on average."""
        return int(num_slots // self.slots)


def use(pairs: list[Pair], num_reserved: Reserve) -> Use:
    """`num_reserved(p, a)` is a request's reserved slots, summed over its steps."""
    held = [num_tokens_held(p, a) for p, a in pairs]
    reserved = [num_reserved(p, a) for p, a in pairs]
    steps = [a for _, a in pairs]
    return Use(*_ratio(held, reserved), *_ratio(reserved, steps))


def uses(pairs: list[Pair], window: int = WINDOW, block_size: int = BLOCK_SIZE) -> dict[str, Use]:
    """Every policy's use, by its name."""

    def over_steps(reserve: Reserve) -> Reserve:
        return lambda p, a: a * reserve(p, a)

    policies = {name: over_steps(reserve) for name, reserve in contiguous(window).items()}
    policies["paged"] = lambda p, a: num_slots_paged(p, a, block_size)
    return {name: use(pairs, reserved) for name, reserved in policies.items()}


def _ratio(above: list[int], below: list[int]) -> tuple[float, float]:
    """Ratio of sums, and its standard error (to first order in the deviations)."""
    ratio = sum(above) / sum(below)
    squares = sum((x - ratio * y) ** 2 for x, y in zip(above, below, strict=True))
    return ratio, math.sqrt(squares) / sum(below)


def mean(numbers: Iterable[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    values = list(numbers)
    average = sum(values) / len(values)
    squares = sum((value - average) ** 2 for value in values)
    return average, math.sqrt(squares) / len(values)

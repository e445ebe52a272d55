"""Times of asynchronous work, measured so that they mean something on a GPU.

A GPU leaves its idle clock only after a while, so all arms are warmed first; its clock drifts, so
arms take turns within one run; a lone call can't be told from its launch, so many are evaluated
together, with every output kept, since MLX doesn't compute what is dropped.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import mlx.core as mx

MAX_CALLS = 50
MAX_KEPT_BYTES = 2**30

# Memory bandwidth of the fastest chip with that last letter in MLX's architecture name, and more
# than half as much again: phone, base or Pro, Max, Ultra. What is faster wasn't computed, or came
# from the cache.
MAX_GB_PER_S = {"p": 150, "g": 500, "s": 1000, "d": 2000}


Call = Callable[[int], list[mx.array]]


@dataclass(frozen=True)
class Arm:
    """Something to time. `call(i)` builds its `i`-th call, each on other buffers than the last."""

    name: str
    call: Call
    moved_bytes: int
    kept_bytes: int  # of one call's outputs


@dataclass(frozen=True)
class Clock:
    """How long to measure."""

    warm_s: float = 1.0
    windows: int = 5
    window_s: float = 0.4


def measure(
    arms: list[Arm], clock: Clock, track: Callable[[Iterable[Arm]], Iterable[Arm]] = iter
) -> dict[str, float]:
    """Median seconds a call of each arm. `track` wraps the arms in a progress bar."""
    for arm in arms:
        mx.eval(arm.call(0))  # compile
    _window(arms[0], 1, clock.warm_s)
    calls = {arm.name: _calls_at_once(arm, clock) for arm in arms}
    times: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for arm in track(arms * clock.windows):
        times[arm.name].append(_window(arm, calls[arm.name], clock.window_s))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def gb_per_s(arm: Arm, seconds: float) -> float:
    return arm.moved_bytes / seconds / 1e9


def refuse_impossible(rates: dict[str, float], chip: str) -> None:
    """Raise RuntimeError for rates that no memory of `chip` has."""
    limit = MAX_GB_PER_S.get(chip[-1:], max(MAX_GB_PER_S.values()))
    impossible = {name: round(rate) for name, rate in rates.items() if rate > limit}
    if impossible:
        raise RuntimeError(
            f"{impossible} GB/s is more than the memory of {chip} delivers ({limit} GB/s at most): "
            "outputs weren't computed or inputs came from the cache, and no time here counts"
        )


def _calls_at_once(arm: Arm, clock: Clock) -> int:
    """As many as can be kept, in at most about a quarter of a window."""
    most = min(MAX_CALLS, int(clock.window_s / 4 / _window(arm, 1, 0)))
    return max(1, min(most, MAX_KEPT_BYTES // arm.kept_bytes))


def _window(arm: Arm, calls_at_once: int, seconds: float) -> float:
    """Seconds a call, from evaluations of `calls_at_once` that fill `seconds`."""
    calls = 0
    mx.synchronize()
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or not calls:
        mx.eval([arm.call(calls + i) for i in range(calls_at_once)])
        calls += calls_at_once
    return elapsed / calls

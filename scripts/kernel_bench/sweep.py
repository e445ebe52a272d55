"""Tries launch choices on this chip and keeps the fastest for a shape."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from mlx_paged.kernels.defaults import default_launch, num_cores
from mlx_paged.kernels.launch import DecodeLaunch, DecodeShape, Splits

from .metal_arms import MetalArms
from .timing import Arm, Clock, gb_per_s, measure
from .workload import MAX_ERROR, Workload, max_error

BLOCK_SIZE = 16

# Beyond this many live floats kernels spilled in every published measurement.
MAX_LIVE_FLOATS = 112
SHORT = Clock(warm_s=1.0, windows=3, window_s=0.2)


def register_choices(shape: DecodeShape, start: DecodeLaunch) -> list[DecodeLaunch]:
    """Heads, lanes and keys that could fit a lane's registers."""
    heads = sorted({-(-shape.group_size // n) for n in range(1, shape.group_size + 1)})
    launches = (
        replace(start, heads=heads, lanes=lanes, keys=keys)
        for heads, lanes, keys in itertools.product(heads, (4, 8, 16, 32), (1, 2, 4))
        if shape.num_quant_groups <= lanes <= shape.head_dim // 2
    )
    return [
        launch
        for launch in launches
        if launch.live_floats(shape.head_dim, shape.dtype.size, shape.kv_bits is not None)
        <= MAX_LIVE_FLOATS
    ]


def thread_choices(best: DecodeLaunch) -> list[DecodeLaunch]:
    """SIMD groups a threadgroup and tokens a split."""
    return [
        replace(best, slices=slices, splits=Splits(tokens, tokens, 1))
        for slices, tokens in itertools.product((1, 2, 4, 8), (64, 128, 256, 512, 1024))
    ]


def sweep(
    workload: Workload,
    chip: str,
    track: Callable[[Iterable[Arm]], Iterable[Arm]],
    tell: Callable[[str], None],
) -> tuple[DecodeLaunch, float]:
    """The fastest launch at a block size of 16, and its GB/s.

    Registers first, with the default threads; then threads, with the best registers.
    """
    shape = workload.shape
    start = default_launch(shape, num_cores(chip))
    candidates = [start, *register_choices(shape, start)]
    best, _ = _fastest(workload, candidates, track, tell)
    return _fastest(workload, [best, *thread_choices(best)], track, tell)


def _fastest(
    workload: Workload,
    launches: list[DecodeLaunch],
    track: Callable[[Iterable[Arm]], Iterable[Arm]],
    tell: Callable[[str], None],
) -> tuple[DecodeLaunch, float]:
    arms = dict(_arms(workload, launches, tell))
    times = measure(list(arms.values()), SHORT, track)
    by_name = {arm.name: launch for launch, arm in arms.items()}
    name = min(times, key=lambda name: times[name])
    return by_name[name], gb_per_s(arms[by_name[name]], times[name])


def _arms(
    workload: Workload, launches: list[DecodeLaunch], tell: Callable[[str], None]
) -> Iterator[tuple[DecodeLaunch, Arm]]:
    """Arms of the launches that this chip runs and that give the right result."""
    metal_arms = MetalArms(workload)
    reference = workload.reference(metal_arms.caches[0], BLOCK_SIZE, "scattered")
    for launch in dict.fromkeys(launches):
        arm = metal_arms.attention(BLOCK_SIZE, "scattered", launch)
        try:
            error = max_error(arm.call(0)[0], reference)
        except (RuntimeError, ValueError) as refusal:  # too many threads for its registers
            tell(f"left out {launch}: {refusal}")
            continue
        if not error <= MAX_ERROR[workload.shape.dtype]:
            tell(f"left out {launch}: error {error:.1e}")
            continue
        yield launch, replace(arm, name=str(launch))

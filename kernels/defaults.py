"""The reasoned launch choices, from measurements that others published on Macs.

None of them was measured by this project. `scripts/kernel.py --sweep` measures the choices on a
chip and keeps the best, which `tuned.choose` prefers.
"""

from __future__ import annotations

from .launch import DecodeLaunch, DecodeShape, Splits

LANES = (8, 16, 32)
KEYS = (4, 2, 1)

# Live floats of a lane. Kernels for an M5 Pro and an M1 Ultra were best near 50 to 64 and spilled,
# over three times slower, near 110 (ml-explore/mlx #3837, #4077).
REGISTER_BUDGET = 64

# Several threadgroups a core hide memory latency. Sharing K and V at the price of too few was up
# to 4.7 times slower on an M4 (VeloxQuant-MLX #307): threadgroups first, sharing second.
THREADGROUPS_PER_CORE = 8
SIMDGROUPS = 4

# Cores by the last letter of MLX's architecture name: phone, base or Pro, Max, Ultra.
CORES = {"p": 6, "g": 16, "s": 32, "d": 64}

# A partial result is written and read once in float, and should be small beside K and V.
MAX_PARTIAL_TRAFFIC = 1 / 16
# Found best on an M1 Pro (vllm-metal, paged_ops.cpp): beyond it partial results are cheap anyway,
# and many splits balance the cores.
SPLIT_TOKENS = 512
MIN_SPLIT_TOKENS = 128  # 32 for each of four SIMD groups


def num_cores(chip: str) -> int:
    """GPU cores, roughly, of a chip by MLX's name of its architecture."""
    return CORES.get(chip[-1:], CORES["g"])


def default_launch(shape: DecodeShape, cores: int) -> DecodeLaunch:
    """Heads first, then as few lanes and as many keys as the registers allow.

    A SIMD group with all heads of a group loads each row once. Among the lane counts that hold the
    most heads the smallest is taken: the lanes of a row share a reduction and each repeat the
    softmax's exponentials, so that fewer lanes serve more tokens with the same instructions.
    """
    splits = default_splits(shape, enough=1)
    candidates = [
        launch
        for lanes in LANES
        for heads in range(1, shape.group_size + 1)
        if _fits(launch := DecodeLaunch(heads, lanes, 2, SIMDGROUPS, splits), shape)
    ]
    widest = max(candidates, key=lambda launch: (launch.heads, -launch.lanes))
    head_groups = -(-shape.group_size // widest.heads)
    heads = -(-shape.group_size // head_groups)  # evenly
    slices = max(1, SIMDGROUPS // head_groups)
    launch = next(
        launch
        for keys in KEYS
        if _fits(launch := DecodeLaunch(heads, widest.lanes, keys, slices, splits), shape)
    )
    threadgroups = shape.num_kv_heads * launch.head_splits(shape.group_size)
    enough = -(-THREADGROUPS_PER_CORE * cores // threadgroups)
    return DecodeLaunch(heads, launch.lanes, launch.keys, slices, default_splits(shape, enough))


def default_splits(shape: DecodeShape, enough: int) -> Splits:
    """Tokens per split from the shape; they grow once `enough` splits fill the chip."""
    floats_per_token = 2 * shape.row_nbytes / 4 / shape.head_dim  # K and V, per element of a head
    smallest = MIN_SPLIT_TOKENS
    while 2 * shape.group_size > MAX_PARTIAL_TRAFFIC * smallest * floats_per_token:
        smallest *= 2
    return Splits(smallest, max(smallest, SPLIT_TOKENS), enough)


def _fits(launch: DecodeLaunch, shape: DecodeShape) -> bool:
    if not shape.num_quant_groups <= launch.lanes <= shape.head_dim // 2:
        return False
    live_floats = launch.live_floats(shape.head_dim, shape.dtype.size, shape.kv_bits is not None)
    return live_floats <= REGISTER_BUDGET

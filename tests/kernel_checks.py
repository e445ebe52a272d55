"""What the kernels must pass, as a list, so that broken kernels can be held to it as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import msl
import numpy as np
from kernel_cases import (
    EXECUTOR,
    MAX_ERROR,
    SMALL_SPLITS,
    Case,
    Factory,
    Recording,
    as_floats,
    bits,
    run_header,
)

from mlx_paged.kernels import metal
from mlx_paged.kernels.copy import contiguous_copy, paged_copy
from mlx_paged.kernels.launch import DecodeLaunch, Splits

# Each check returns what is wrong, or None. A fault that the executor raises is left to the caller.
Check = Callable[[Factory], str | None]

ONE_SPLIT = Splits(64, 64, 1)


# Between them: one split and many, slices and none, idle lanes, heads that don't divide, head
# groups side by side and in threadgroups of their own, tables in constant memory.
CASES = (
    Case(lens=(0, 1, 17, 50), launch=DecodeLaunch(6, 16, 2, 4, ONE_SPLIT)),
    Case(head_dim=80, block_size=5, group_size=7, launch=DecodeLaunch(3, 8, 4, 2, SMALL_SPLITS)),
    Case(
        head_dim=32, block_size=3, dtype=mx.float32, launch=DecodeLaunch(1, 8, 1, 2, SMALL_SPLITS)
    ),
    Case(head_dim=96, dtype=mx.bfloat16, launch=DecodeLaunch(2, 16, 1, 8, SMALL_SPLITS)),
    Case(lens=(16,), unused_entries=0, launch=DecodeLaunch(6, 32, 2, 1, SMALL_SPLITS)),
)


def small_error(factory: Factory) -> str | None:
    """Against float64, with NaN in unwritten slots and garbage in unused table entries."""
    for case in CASES:
        with metal.using(factory):
            error = case.error()
        if not error <= MAX_ERROR[case.dtype]:
            return f"error {error:.1e} at {case}"
    return None


def cold_scores(factory: Factory) -> str | None:
    """All scores below -100: a maximum that starts at 0 or counts missing tokens as 0 loses all."""
    case = replace(CASES[1], dtype=mx.float32, lens=(9, 1, 30), is_cold=True, query_factor=40)
    with metal.using(factory):
        error = case.error()
    return None if error <= 1e-4 else f"error {error:.1e} where all scores are far below 0"


def exact_traffic(factory: Factory) -> str | None:
    """Each row of K and V once for all heads of a SIMD group, and no byte more."""
    case = CASES[0]
    recording = Recording(factory)
    with metal.using(recording):
        case.attend()
    needed = sum(case.lens) * case.num_kv_heads * case.head_dim * case.dtype.size
    report = recording.reports["decode_paged"]
    for pool in ("key_pool", "value_pool"):
        if report[pool].bytes_loaded != needed:
            return f"{pool}: {report[pool].bytes_loaded} bytes loaded, {needed} needed"
    return None


def windows(factory: Factory) -> str | None:
    """The last tokens alone count, are loaded, and are what splits are made of."""
    case = replace(CASES[1], lens=(50, 9, 20), window=18)
    recording = Recording(factory)
    with metal.using(recording):
        error = case.error()
    if not error <= MAX_ERROR[case.dtype]:
        return f"error {error:.1e} with a window"
    assert case.launch
    rows = (18 + 9 + 18) * case.num_kv_heads * case.launch.row_loads(case.group_size)
    loaded = recording.reports["decode_paged_partial"]["key_pool"].bytes_loaded
    needed = rows * case.head_dim * case.dtype.size
    return None if loaded == needed else f"{loaded} bytes loaded, {needed} in the window"


def same_bits_in_any_batch(factory: Factory) -> str | None:
    """A sequence alone, in one split, as in a batch whose longest has several."""
    launch = DecodeLaunch(6, 16, 2, 4, SMALL_SPLITS)
    batch = Case(lens=(50, 8, 3), launch=launch)
    with metal.using(factory):
        together = bits(batch.attend())
        for row, length in enumerate(batch.lens):
            alone = bits(replace(batch, lens=(length,)).attend())
            if not np.array_equal(alone[0], together[row]):
                return f"a sequence of {length} tokens differs alone and in a batch"
    return None


def same_bits_without_table(factory: Factory) -> str | None:
    with metal.using(factory):
        if not np.array_equal(bits(CASES[1].attend()), bits(CASES[1].attend_contiguous())):
            return "paged and contiguous differ"
    return None


def split_sizes(factory: Factory) -> str | None:
    lengths = [1, 23, 24, 25, 48, 49, 96, 97, 500]
    tokens = run_header(factory, "softmax.metal", "tokens_per_split<8, 32, 3>(x)", lengths)
    expected = [SMALL_SPLITS.tokens(length) for length in lengths]
    return None if tokens == expected else f"splits of {tokens} tokens, {expected} on the host"


def far_offsets(factory: Factory) -> str | None:
    """Rows beyond 2^31 elements, for which no pool here is large enough."""
    blocks = [0, 5, 10**6, 2**31 - 1]
    offsets = run_header(factory, "paging.metal", "row_offset<8, 256, 128>(x, 3, 9)", blocks)
    expected = [((block * 8 + 3) * 256 + 9) * 128 for block in blocks]
    return None if offsets == expected else f"row offsets {offsets}, not {expected}"


def copies(factory: Factory) -> str | None:
    case = Case(head_dim=80, block_size=3)
    tables, lens, longest = case.tables, case.context_lens, case.max_len
    rows = case.contiguous(case.keys), case.contiguous(case.values)
    with metal.using(factory):
        paged = paged_copy(
            case.pool(case.keys), case.pool(case.values), tables, lens, max_context_len=longest
        )
        for copied in (paged, contiguous_copy(*rows, lens, max_context_len=longest)):
            for copy, expected in zip(copied, rows, strict=True):
                if not np.array_equal(as_floats(copy), np.nan_to_num(as_floats(expected))):
                    return "copied rows differ"
    return None


CHECKS: tuple[Check, ...] = (
    small_error,
    split_sizes,
    far_offsets,
    copies,
    same_bits_without_table,
    exact_traffic,
    cold_scores,
    windows,
    same_bits_in_any_batch,
)


def what_is_wrong(
    factory: Factory = EXECUTOR.metal_kernel, checks: tuple[Check, ...] = CHECKS
) -> str | None:
    """The first check that fails, and how, or the executor's fault; None if all pass."""
    for check in checks:
        try:
            wrong = check(factory)
        except msl.KernelFault as fault:
            return f"executor: {fault}"
        if wrong:
            return f"{check.__name__}: {wrong}"
    return None

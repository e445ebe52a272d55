"""What the decode kernel must pass over quantised pools, as it is and as its mutants are."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
from kernel_cases import MAX_ERROR, SMALL_SPLITS, Case, Factory, Recording, as_floats, bits
from kernel_checks import ONE_SPLIT, Check

from mlx_paged.kernels import metal
from mlx_paged.kernels.launch import DecodeLaunch
from mlx_paged.kernels.quantized import QuantizedArray

# Between them: both bits and group sizes, loads of 1, 2 and 4 bytes, idle lanes, several vectors
# a lane, groups of one lane's vectors and of many lanes', one split and many.
QUANTIZED_CASES = (
    Case(lens=(0, 1, 17, 50), launch=DecodeLaunch(6, 16, 2, 4, ONE_SPLIT), kv_bits=8),
    Case(
        head_dim=96,
        block_size=5,
        group_size=7,
        launch=DecodeLaunch(3, 16, 4, 2, SMALL_SPLITS),
        kv_bits=4,
    ),
    Case(
        head_dim=64,
        block_size=3,
        group_size=2,
        dtype=mx.float32,
        launch=DecodeLaunch(2, 32, 1, 2, SMALL_SPLITS),
        kv_bits=4,
    ),
    Case(
        head_dim=128,
        dtype=mx.bfloat16,
        block_size=5,
        lens=(15,),
        unused_entries=0,
        launch=DecodeLaunch(6, 32, 2, 1, SMALL_SPLITS),
        kv_bits=8,
        kv_group_size=64,
    ),
)


def small_quantized_error(factory: Factory) -> str | None:
    """Against float64 over the dequantised rows, with NaN and garbage in unwritten slots."""
    for case in QUANTIZED_CASES:
        with metal.using(factory):
            error = case.error()
        if not error <= MAX_ERROR[case.dtype]:
            return f"error {error:.1e} at {case}"
    return None


def exact_quantized_traffic(factory: Factory) -> str | None:
    """Each byte of a packed row once for all heads of a SIMD group, and no byte more."""
    for case in QUANTIZED_CASES:
        assert case.launch is not None
        recording = Recording(factory)
        with metal.using(recording):
            case.attend()
        is_partial = case.launch.splits.most(case.max_len) > 1
        name = "decode_paged_quantized" + "_partial" * is_partial
        needed = packed_bytes(case) * case.launch.row_loads(case.group_size)
        for pool, loaded in bytes_loaded(recording.reports[name]).items():
            if loaded != needed:
                return f"{pool}: {loaded} bytes loaded, {needed} needed at {case}"
    return None


def bytes_loaded(report: object) -> dict[str, int]:
    """Of K and of V, with scales and biases."""
    parts = ("codes", "scales", "biases")
    return {
        of: sum(report[f"{of}_{part}"].bytes_loaded for part in parts)  # type: ignore[index]
        for of in ("key", "value")
    }


def packed_bytes(case: Case) -> int:
    """Of the rows of K, or of V, that hold a token."""
    groups = case.head_dim // case.kv_group_size
    row = case.head_dim * (case.kv_bits or 0) // 8 + 2 * groups * case.dtype.size
    return sum(case.lens) * case.num_kv_heads * row


def same_quantized_bits_in_any_batch(factory: Factory) -> str | None:
    batch = replace(QUANTIZED_CASES[1], lens=(30, 8, 3))
    with metal.using(factory):
        together = bits(batch.attend())
        for row, length in enumerate(batch.lens):
            alone = bits(replace(batch, lens=(length,)).attend())
            if not np.array_equal(alone[0], together[row]):
                return f"a sequence of {length} tokens differs alone and in a batch"
    return None


def strided_parts_give_nan(factory: Factory) -> str | None:
    """A part that doesn't lie as it is read shows, as numbers from other rows would not."""
    case = Case(lens=(9, 30), kv_bits=8, block_size=2)
    for of, tokens in (("key_pool", case.keys), ("value_pool", case.values)):
        for i in range(3):
            parts = case.pool(tokens).parts
            parts[i] = mx.contiguous(parts[i].swapaxes(1, 2)).swapaxes(1, 2)
            codes, scales, biases = parts
            with metal.using(factory):
                out = case.attend(**{of: QuantizedArray(codes, scales, biases, bits=8)})
            if not np.isnan(as_floats(out)).all():
                return f"part {i} of the {of} was read though it is strided"
    return None


QUANTIZED_CHECKS: tuple[Check, ...] = (
    small_quantized_error,
    exact_quantized_traffic,
    same_quantized_bits_in_any_batch,
    strided_parts_give_nan,
)

"""What the prefill kernel must pass, as a list, so that broken ones can be held to it as well."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
from kernel_cases import MAX_ERROR, Factory, Recording, bits
from kernel_checks import Check
from prefill_cases import PrefillCase, dequantized

from mlx_paged.kernels import metal
from mlx_paged.kernels.prefill import tile_list
from mlx_paged.kernels.prefill_launch import PrefillLaunch

PARTS = ("codes", "scales", "biases")

# Between them: tiles that end within a token's heads, SIMD groups without rows, tiles of keys above
# the diagonal, prefixes in front, split heads and columns, a window, a table in constant memory.
CASES = (
    PrefillCase(group_size=6, lens=(37, 1, 90, 21), new=(37, 1, 33, 16), block_size=5),
    PrefillCase(
        head_dim=80,
        group_size=3,
        dtype=mx.float32,
        lens=(51, 90),
        new=(30, 1),
        window=7,
        launch=PrefillLaunch(heads=1, keys=8, simdgroups=4, column_splits=2),
    ),
    PrefillCase(head_dim=32, group_size=1, lens=(20,), new=(5,), unused_entries=0),
)


def small_error(factory: Factory) -> str | None:
    """Against float64, with NaN in unwritten slots and garbage in unused table entries."""
    for case in CASES:
        with metal.using(factory):
            error = case.error()
        if not error <= MAX_ERROR[case.dtype]:
            return f"error {error:.1e} at {case}"
    return None


def exact_traffic(factory: Factory) -> str | None:
    """Each tile's rows of K and V once, from the first that one of its tokens sees to the last."""
    for case in CASES[:2]:
        recording = Recording(factory)
        with metal.using(recording):
            case.attend()
        needed = loaded_bytes(case)
        report = recording.reports["prefill"]
        for pool in ("key_pool", "value_pool"):
            if report[pool].bytes_loaded != needed:
                return f"{pool}: {report[pool].bytes_loaded} bytes loaded, not {needed}"
    return None


def skipped_products(factory: Factory) -> str | None:
    """No SIMD group multiplies keys that none of its rows sees."""
    for case in CASES[:2]:
        recording = Recording(factory)
        with metal.using(recording):
            case.attend()
        products = recording.reports["prefill"].collectives["simdgroup_multiply_accumulate"]
        if products != needed_products(case):
            return f"{products} products of matrices, not {needed_products(case)}"
    return None


def cold_scores(factory: Factory) -> str | None:
    """All scores far below 0: a maximum that starts at 0, or a missing key's score of 0, shows."""
    case = replace(CASES[1], is_cold=True, query_factor=40)
    with metal.using(factory):
        error = case.error()
    return None if error <= 1e-4 else f"error {error:.1e} where all scores are far below 0"


def same_bits_in_any_chunks(factory: Factory) -> str | None:
    for case in (CASES[0], replace(CASES[1], lens=(90, 50), new=(30, 9))):
        with metal.using(factory):
            whole = bits(case.attend())[: case.new[0]]
            chunked = chunks(case, [5, case.new[0] - 5])
        if not np.array_equal(whole, chunked):
            return "a sequence differs alone, in chunks, and whole in a batch"
    return None


def joined_splits(factory: Factory) -> str | None:
    """Where keys are split and the splits' results joined, those of shared columns too."""
    launch = PrefillLaunch(2, 16, 8, column_splits=2, enough=1000, split_tokens=40)
    case = PrefillCase(lens=(100, 3, 60), new=(9, 3, 20), launch=launch)
    recording = Recording(factory)
    with metal.using(recording):
        error = case.error()
    if "merge" not in recording.reports:
        return "no keys were split"
    return None if error <= MAX_ERROR[case.dtype] else f"error {error:.1e} where keys are split"


def same_bits_from_codes(factory: Factory) -> str | None:
    """A quantised pool gives what the same pool dequantised before does."""
    case = replace(CASES[0], lens=(37, 1, 50), new=(7, 1, 13))
    for bits_of_code, group_size in ((8, 32), (4, 64)):
        key_pool, value_pool = (
            case.pool_in_codes(tokens, bits_of_code, group_size)
            for tokens in (case.keys, case.values)
        )
        plain = {"key_pool": dequantized(key_pool), "value_pool": dequantized(value_pool)}
        recording = Recording(factory)
        with metal.using(recording):
            expected = bits(case.attend(**plain))
            if not np.array_equal(
                bits(case.attend(key_pool=key_pool, value_pool=value_pool)), expected
            ):
                return f"{bits_of_code}-bit codes in groups of {group_size} differ"
        tokens = loaded_bytes(case) // (case.head_dim * case.dtype.size)
        row_bytes = case.head_dim * bits_of_code // 8
        row_bytes += 2 * (case.head_dim // group_size) * case.dtype.size
        report = recording.reports["prefill_quantized"]
        for of in ("key", "value"):
            loaded = sum(report[f"{of}_{part}"].bytes_loaded for part in PARTS)
            if loaded != tokens * row_bytes:
                return f"{loaded} bytes of {of}s loaded, not {tokens} rows of {row_bytes}"
    return None


PREFILL_CHECKS: tuple[Check, ...] = (
    small_error,
    exact_traffic,
    skipped_products,
    cold_scores,
    same_bits_in_any_chunks,
    joined_splits,
    same_bits_from_codes,
)


def chunks(case: PrefillCase, sizes: list[int]) -> np.ndarray:
    """The bits of the first sequence's new tokens, computed alone in chunks of `sizes`."""
    length, new = case.lens[0], case.new[0]
    whole = replace(case, lens=(length,), new=(new,))
    pools = {"key_pool": whole.pool(whole.keys), "value_pool": whole.pool(whole.values)}
    results = []
    done = 0
    for size in sizes:
        size = min(size, new - done)
        stop = length - new + done + size
        rows = bits(
            whole.attend(
                queries=whole.queries[done : done + size],
                context_lens=mx.array([stop], mx.int32),
                row_starts=[0, size],
                **pools,
            )
        )
        results.append(rows)
        done += size
    assert done == new
    return np.concatenate(results)


def loaded_bytes(case: PrefillCase) -> int:
    """Of K, or of V, by the tile list alone."""
    launch = case.choices
    tokens = sum(
        last + 1 - first
        for first, last in (
            seen(case, seq, first_row, launch.rows, launch.heads)
            for seq, first_row, _, _ in tiles_of(case, launch)
        )
    )
    row_bytes = case.head_dim * case.dtype.size
    return tokens * case.num_kv_heads * launch.head_splits(case.group_size) * row_bytes


def needed_products(case: PrefillCase) -> int:
    """8x8 products of scores and outputs, for tiles of keys that each SIMD group's rows see."""
    launch = case.choices
    key_tiles = 0
    for seq, first_row, _, num_queries in tiles_of(case, launch):
        for row in range(first_row, min(first_row + launch.rows, num_queries * launch.heads), 8):
            first, last = seen(case, seq, row, 8, launch.heads)
            key_tiles += last // launch.keys - first // launch.keys + 1
    simdgroups = key_tiles * case.num_kv_heads * launch.head_splits(case.group_size)
    depth, splits = case.head_dim // 8, launch.column_splits
    return simdgroups * (launch.keys // 8) * (depth * splits + depth)


def tiles_of(case: PrefillCase, launch: PrefillLaunch) -> list[list[int]]:
    return tile_list(tuple(case.row_starts), launch.heads, launch.rows).tolist()


def seen(case: PrefillCase, seq: int, row: int, num_rows: int, heads: int) -> tuple[int, int]:
    """First and last key that any of the rows sees."""
    cached = case.lens[seq] - case.new[seq]
    last_row = min(row + num_rows, case.new[seq] * heads) - 1
    first = cached + row // heads - (case.window or case.max_len) + 1
    return max(0, first), cached + last_row // heads

"""The prefill kernel's own text, run on this machine and held to causal attention in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kernel_cases import EXECUTOR, MAX_ERROR, Factory, Recording, as_floats, bits, require_compiler
from kernel_checks import Check
from prefill_cases import CORES, PrefillCase, dequantized
from prefill_checks import PREFILL_CHECKS, chunks, loaded_bytes

from mlx_paged.kernels import metal
from mlx_paged.kernels.launch import DTYPES, HEAD_DIMS, DecodeShape
from mlx_paged.kernels.prefill import PREFILL, tile_list
from mlx_paged.kernels.prefill_launch import (
    KEYS,
    TILE_BYTES,
    PrefillLaunch,
    default_prefill_launch,
)

require_compiler()


@pytest.fixture(autouse=True)
def recording() -> Iterator[Recording]:
    recording = Recording(EXECUTOR.metal_kernel)
    with metal.using(recording):
        yield recording


BLOCK_SIZES = (1, 7, 16, 100, 256)
GROUP_SIZES = (1, 3, 4, 6, 8)


def covering_cases() -> list[PrefillCase]:
    """Each head dim with each block size, dtypes and group sizes going round beside them."""
    cases = []
    for (i, head_dim), (j, size) in itertools.product(enumerate(HEAD_DIMS), enumerate(BLOCK_SIZES)):
        cases.append(
            PrefillCase(
                head_dim=head_dim,
                block_size=size,
                dtype=DTYPES[(i + j) % 3],
                group_size=GROUP_SIZES[(i + 2 * j) % 5],
                num_kv_heads=1 + (i + j) % 2,
                lens=(20, 45, 1),
                new=(18, 5, 1),
            )
        )
    return cases


@pytest.mark.parametrize("check", PREFILL_CHECKS, ids=lambda check: check.__name__)
def test_the_kernel_passes_what_its_mutants_must_not(check: Check) -> None:
    assert check(EXECUTOR.metal_kernel) is None


def test_the_cases_cover_every_pair_of_choices() -> None:
    axes = {
        "head_dim": HEAD_DIMS,
        "dtype": DTYPES,
        "block_size": BLOCK_SIZES,
        "group_size": GROUP_SIZES,
    }
    for (a, first), (b, second) in itertools.combinations(axes.items(), 2):
        pairs = {(getattr(case, a), getattr(case, b)) for case in covering_cases()}
        assert pairs == set(itertools.product(first, second)), (a, b)


@pytest.mark.parametrize("case", covering_cases(), ids=str)
def test_error_stays_within_the_outputs_rounding(case: PrefillCase) -> None:
    assert case.error() <= MAX_ERROR[case.dtype]


@pytest.mark.parametrize("window", [None, 20])
def test_any_chunks_after_a_prefix_give_the_bits_of_the_whole(window: int | None) -> None:
    """Alone in chunks, and whole beside others that decode and prefill."""
    case = PrefillCase(
        group_size=4, num_kv_heads=1, lens=(130, 1, 77), new=(67, 1, 9), window=window
    )
    whole = bits(case.attend())[:67]
    assert case.error() <= MAX_ERROR[case.dtype]
    for size in (1, 7, 16, 33, 67):
        sizes = [min(size, 67 - start) for start in range(0, 67, size)]
        assert np.array_equal(chunks(case, [*sizes[:5], 67 - sum(sizes[:5])]), whole), size


def test_one_new_token_each_is_decoding() -> None:
    case = PrefillCase(lens=(1, 60, 17), new=(1, 1, 1), group_size=8)
    assert case.error() <= MAX_ERROR[case.dtype]


@pytest.mark.parametrize("window", [1, 8, 33, 1000])
def test_a_window_of_tokens_is_all_that_a_token_sees(window: int) -> None:
    case = PrefillCase(group_size=2, lens=(30, 70, 5), new=(30, 21, 1), window=window, block_size=4)
    assert case.error() <= MAX_ERROR[case.dtype]
    if window > case.max_len:
        assert np.array_equal(bits(case.attend()), bits(replace(case, window=None).attend()))


def test_blocks_that_lie_wholly_before_the_window_may_be_gone() -> None:
    case = PrefillCase(group_size=2, lens=(70, 90), new=(9, 1), window=10, block_size=4)
    tables = np.array(case.tables)
    for table, length, new in zip(tables, case.lens, case.new, strict=True):
        table[: (length - new - 10 + 1) // 4] = 10**6
    assert np.array_equal(bits(case.attend(block_tables=mx.array(tables))), bits(case.attend()))


@pytest.mark.parametrize(
    ("heads", "simdgroups", "column_splits"), [(1, 1, 1), (2, 4, 2), (3, 3, 1), (6, 16, 4)]
)
def test_launch_choices_leave_every_bit(heads: int, simdgroups: int, column_splits: int) -> None:
    """Only `keys` orders the sums."""
    launch = PrefillLaunch(heads, 16, simdgroups, column_splits)
    case = PrefillCase(launch=launch)
    default = replace(case, launch=replace(case.choices, keys=16))
    assert np.array_equal(bits(case.attend()), bits(default.attend()))


@pytest.mark.parametrize("is_cold", [False, True])
def test_scores_of_hundreds_neither_overflow_nor_vanish(is_cold: bool) -> None:
    case = PrefillCase(dtype=mx.float32, query_factor=100, is_cold=is_cold)
    assert case.error() <= 3e-4  # exponents of up to a thousand are rounded to float too


def test_no_bit_hangs_on_the_order_in_which_threads_run() -> None:
    case = PrefillCase()
    in_order = bits(case.attend())
    for schedule in (1, 2):
        with metal.using(replace(EXECUTOR, schedule=schedule).metal_kernel):
            assert np.array_equal(bits(case.attend()), in_order)


def test_overflow_in_the_model_shows() -> None:
    """A score of NaN is no missing key's."""
    case = PrefillCase(dtype=mx.float32, lens=(20,), new=(4,))
    queries = as_floats(case.queries).astype(np.float32)
    queries[2] = np.nan
    out = as_floats(case.attend(queries=mx.array(queries)))
    assert np.isnan(out[2]).all() and not np.isnan(out[[0, 1, 3]]).any()


def test_strided_queries_are_read_where_they_lie_and_strided_pools_show() -> None:
    case = PrefillCase()
    expected = bits(case.attend())
    wide = mx.concatenate([case.queries, case.queries], axis=1)
    assert np.array_equal(
        bits(case.attend(queries=wide[:, : case.shape.num_query_heads])), expected
    )
    transposed = mx.contiguous(case.pool(case.keys).swapaxes(1, 2)).swapaxes(1, 2)
    assert np.isnan(as_floats(case.attend(key_pool=transposed))).all()


def loads_over_need(recording: Recording, case: PrefillCase) -> float:
    case.attend()
    report = recording.reports["prefill"]
    assert report["key_pool"].bytes_loaded == report["value_pool"].bytes_loaded
    assert report["key_pool"].bytes_loaded == loaded_bytes(case)
    assert set(report["key_pool"].load_widths) == {4 * case.dtype.size}
    needed = sum(case.lens) * case.num_kv_heads * case.head_dim * case.dtype.size
    return report["key_pool"].bytes_loaded / needed


MIXES = {
    "1 to 64 new": ((100, 45, 64, 300), (37, 1, 64, 5)),
    "1 to 64 new, no prefix": ((1, 7, 16, 33, 64), (1, 7, 16, 33, 64)),
    "1 to 64 new, prefixes": ((101, 107, 216, 133, 364), (1, 7, 16, 33, 64)),
}


@pytest.mark.parametrize("mix", MIXES)
def test_a_group_loads_keys_and_values_at_most_065_as_often_as_its_heads_one_by_one(
    mix: str, recording: Recording, capsys: pytest.CaptureFixture[str]
) -> None:
    lens, new = MIXES[mix]
    case = PrefillCase(group_size=4, num_kv_heads=1, head_dim=32, lens=lens, new=new)
    shared = case.choices
    assert shared.heads == 4
    alone = replace(shared, heads=1)
    assert alone.rows == shared.rows
    by_group = loads_over_need(recording, replace(case, launch=shared))
    by_head = loads_over_need(recording, replace(case, launch=alone))
    with capsys.disabled():
        print(
            f"\n{mix}: K and V bytes loaded over needed {by_group:.2f} with 4 heads in a tile, "
            f"{by_head:.2f} with one: {by_group / by_head:.2f}"
        )
    assert by_group <= 0.65 * by_head


def test_a_group_never_loads_more_than_its_heads_one_by_one() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        new = random.integers(1, 200, random.integers(1, 6))
        lens = new + random.integers(0, 300, len(new))
        window = None if random.random() < 0.5 else int(random.integers(1, 300))
        case = PrefillCase(
            group_size=int(random.integers(1, 17)),
            lens=tuple(lens.tolist()),
            new=tuple(new.tolist()),
            window=window,
        )
        shared = case.choices
        by_head = loaded_bytes(replace(case, launch=replace(shared, heads=1)))
        assert loaded_bytes(case) <= by_head


def test_tiles_hold_every_row_once_and_no_sequences_share_one() -> None:
    tiles = tile_list((0, 5, 5, 6, 40), heads=3, rows=16).tolist()
    assert {tuple(tile[2:]) for tile in tiles} == {(0, 5), (5, 1), (6, 34)}
    rows = sorted((seq, row) for seq, row, _, _ in tiles)
    assert rows == [(0, 0), (2, 0), *((3, row) for row in range(0, 102, 16))]


class Launches:
    """Stands in for mx.fast.metal_kernel and keeps what it was asked for."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.run: list[dict[str, Any]] = []

    def __call__(self, **arguments: Any) -> Factory:
        self.made.append(arguments)

        def launch(**arguments: Any) -> list[mx.array]:
            self.run.append(arguments)
            return [mx.zeros(shape) for shape in arguments["output_shapes"]]

        return launch


@pytest.fixture
def launches() -> Iterator[Launches]:
    launches = Launches()
    with metal.using(launches):
        yield launches


def test_prompts_of_any_length_run_one_compiled_kernel(launches: Launches) -> None:
    for lens, new in [((5,), (5,)), ((90, 30), (60, 1)), ((200,), (64,))]:
        PrefillCase(lens=lens, new=new).attend()
        PrefillCase(lens=lens, new=new, window=9).attend()
    assert len(launches.made) == 1 and not launches.made[0]["ensure_row_contiguous"]
    assert len({str(run["template"]) for run in launches.run}) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queries": mx.zeros((5, 12, 63), mx.float16)}, "takes head_dim"),
        ({"queries": mx.zeros((5, 12, 64), mx.bfloat16)}, "share one dtype"),
        ({"queries": mx.zeros((5, 11, 64), mx.float16)}, "11 query heads can't share 2 KV heads"),
        ({"queries": mx.zeros((5, 64), mx.float16)}, "queries are"),
        ({"row_starts": [0, 4]}, r"rise from 0 to the number of queries, 5, and not as \[0, 4\]"),
        ({"row_starts": [0, 6, 5]}, "row_starts rise"),
        ({"row_starts": []}, "row_starts rise"),
        ({"row_starts": [0, 2, 5]}, "block_tables are int32 with 2 rows"),
        ({"context_lens": mx.array([5], mx.int64)}, "context_lens are int32"),
        ({"block_tables": mx.zeros((1, 3), mx.uint32)}, "block_tables are int32"),
        ({"window": 0}, "at least 1 token"),
        ({"launch": PrefillLaunch(4, 16, 8, 1)}, "4 query heads don't divide the 6"),
        ({"launch": PrefillLaunch(6, 12, 8, 1)}, "not 12 at once"),
        ({"launch": PrefillLaunch(6, 16, 3, 2)}, "must divide 3 SIMD groups"),
        ({"launch": PrefillLaunch(6, 16, 0, 1)}, "at least 1"),
        ({"launch": PrefillLaunch(6, 16, 33, 1)}, "1056 threads a threadgroup, .* allows 1024"),
        ({"launch": PrefillLaunch(6, 128, 8, 1)}, "36864 bytes of threadgroup memory"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_kernel_does_not_take_is_refused(
    changes: dict[str, Any], message: str, launches: Launches
) -> None:
    with pytest.raises(ValueError, match=message):
        PrefillCase(lens=(5,), new=(5,)).attend(**changes)
    assert not launches.made


def test_no_new_tokens_give_no_rows(launches: Launches) -> None:
    case = PrefillCase(lens=(5,), new=(5,))
    assert case.attend(queries=case.queries[:0], row_starts=[0, 0]).shape == (0, 12, 64)
    assert not launches.run


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_default_launches_fit_registers_and_threadgroup_memory(
    head_dim: int, dtype: mx.Dtype
) -> None:
    for group_size in (1, 3, 7, 71):
        shape = DecodeShape(2 * group_size, 2, head_dim, dtype)
        launch = default_prefill_launch(shape, CORES)
        launch.check(shape)
        assert launch.threadgroup_bytes(shape) <= TILE_BYTES or launch.keys == KEYS[-1]
        assert launch.num_threads <= 256
        most = 104 if (head_dim, dtype) == (256, mx.float32) else 80
        assert launch.live_floats(shape) <= most
    assert max(kernel.num_buffers for kernel in PREFILL.values()) <= metal.MAX_BUFFERS


def test_threadgroup_memory_is_what_the_launch_was_checked_for(recording: Recording) -> None:
    case = PrefillCase(head_dim=80, lens=(9,), new=(3,))
    case.attend()
    needed = case.choices.threadgroup_bytes(case.shape)
    assert recording.reports["prefill"].threadgroup_bytes == needed


@pytest.mark.parametrize(
    ("head_dim", "dtype", "kv_format"),
    [
        (32, mx.float16, (4, 32)),
        (64, mx.bfloat16, (8, 64)),
        (96, mx.float32, (8, 32)),
        (128, mx.float16, (4, 64)),
        (192, mx.float32, (4, 64)),
        (256, mx.bfloat16, (4, 32)),
    ],
    ids=str,
)
def test_quantised_pools_of_every_format_are_dequantised_on_the_way(
    head_dim: int, dtype: mx.Dtype, kv_format: tuple[int, int]
) -> None:
    case = PrefillCase(head_dim=head_dim, dtype=dtype, lens=(20, 45, 1), new=(18, 5, 1))
    pools = [case.pool_in_codes(tokens, *kv_format) for tokens in (case.keys, case.values)]
    plain = case.attend(key_pool=dequantized(pools[0]), value_pool=dequantized(pools[1]))
    out = case.attend(key_pool=pools[0], value_pool=pools[1])
    assert np.array_equal(bits(out), bits(plain))
    with pytest.raises(ValueError, match="in one format"):
        case.attend(key_pool=pools[0])


SPLIT = {"enough": 1000, "split_tokens": 40}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_tokens_after_a_long_prefix_split_its_keys(
    dtype: mx.Dtype, recording: Recording
) -> None:
    """Sequences shorter than the first split, splits above the diagonal, and one that ends."""
    case = PrefillCase(dtype=dtype, lens=(200, 3, 90, 130), new=(5, 3, 20, 1), block_size=7)
    split = replace(case, launch=replace(case.choices, **SPLIT))
    assert split.error() <= MAX_ERROR[dtype]
    assert "merge" in recording.reports
    report = recording.reports["prefill_partial"]
    assert report["key_pool"].bytes_loaded == loaded_bytes(case)
    num_splits = -(-200 // split.choices.tokens_per_split(1, 200))
    assert report.num_threadgroups == 5 * case.num_kv_heads * num_splits
    assert num_splits == (4 if split.choices.keys == 32 else 5)


def test_keys_are_split_only_where_tiles_leave_cores_idle(launches: Launches) -> None:
    def splits(*arguments: int) -> int:
        return -(-arguments[1] // launch.tokens_per_split(*arguments))

    launch = PrefillLaunch(6, 16, 8, 1, enough=32, split_tokens=256)
    assert splits(32, 10**6) == splits(2, 511) == splits(1, 0 + 1) == 1
    assert splits(2, 512) == 2
    assert splits(2, 10**5) == 16
    assert splits(31, 10**5) == 2
    assert launch.tokens_per_split(2, 1001) % launch.keys == 0
    case = PrefillCase(lens=(2000,), new=(4,), num_kv_heads=1)
    case.attend()
    case.attend(window=10)
    shapes = [run["output_shapes"][0] for run in launches.run]
    assert shapes[0] == (4, 6, 7, 64) and shapes[2:] == [(4, 6, 64)]

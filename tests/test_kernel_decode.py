"""The decode kernel's own text, run on this machine and held to attention in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from kernel_cases import (
    EXECUTOR,
    MAX_ERROR,
    SMALL_SPLITS,
    Case,
    Factory,
    bits,
    require_compiler,
    run_header,
)
from kernel_checks import CHECKS, Check

from mlx_paged.kernels import metal
from mlx_paged.kernels.defaults import default_launch
from mlx_paged.kernels.launch import DTYPES, HEAD_DIMS, DecodeLaunch, Splits

require_compiler()


@pytest.fixture(autouse=True)
def metal_kernel() -> Iterator[Factory]:
    with metal.using(EXECUTOR.metal_kernel):
        yield EXECUTOR.metal_kernel


BLOCK_SIZES = (1, 2, 7, 8, 16, 32, 64, 100, 256)
GROUP_SIZES = (1, 3, 6, 7, 8)
CORES = 10


def with_small_splits(case: Case) -> Case:
    """The default launch, but for splits so small that short sequences have several."""
    return replace(case, launch=replace(default_launch(case.shape, CORES), splits=SMALL_SPLITS))


def covering_cases() -> list[Case]:
    """Each head dim with each block size, dtypes and group sizes going round beside them."""
    cases = []
    for (i, head_dim), (j, size) in itertools.product(enumerate(HEAD_DIMS), enumerate(BLOCK_SIZES)):
        case = Case(
            head_dim=head_dim,
            block_size=size,
            dtype=DTYPES[(i + j) % 3],
            group_size=GROUP_SIZES[(i + j // 2) % 5],
            num_kv_heads=1 + (i + j) % 2,
            lens=(0, 1, size - 1, size, size + 1, 45) if size < 100 else (33, 1, size, 0),
        )
        cases.append(with_small_splits(case))
    return cases


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_kernels_pass_what_their_mutants_must_not(check: Check, metal_kernel: Factory) -> None:
    assert check(metal_kernel) is None


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
def test_error_stays_within_the_outputs_rounding(case: Case) -> None:
    assert case.error() <= MAX_ERROR[case.dtype]


@pytest.mark.parametrize("lens", [(700,), (300, 0, 129, 128, 127), (1, 2, 3, 513)], ids=str)
def test_the_default_splits_serve_short_and_long_sequences(lens: tuple[int, ...]) -> None:
    case = Case(head_dim=128, group_size=6, lens=lens)
    assert case.error() <= MAX_ERROR[case.dtype]


@pytest.mark.parametrize("lanes", [4, 8, 16, 32])
@pytest.mark.parametrize(("heads", "keys", "slices"), [(6, 1, 1), (4, 2, 3), (1, 4, 2), (3, 3, 8)])
def test_every_launch_choice_gives_the_result(
    lanes: int, heads: int, keys: int, slices: int
) -> None:
    launch = DecodeLaunch(heads, lanes, keys, slices, SMALL_SPLITS)
    case = Case(head_dim=80, group_size=6, block_size=4, lens=(70, 9, 0), launch=launch)
    assert case.error() <= MAX_ERROR[case.dtype]


def test_sixteen_query_heads_spill_into_a_second_threadgroup() -> None:
    launch = DecodeLaunch(heads=2, lanes=16, keys=2, slices=2, splits=SMALL_SPLITS)
    assert launch.head_splits(16) == 2
    case = Case(group_size=16, num_kv_heads=1, launch=launch)
    assert case.error() <= MAX_ERROR[case.dtype]


@pytest.mark.parametrize("is_cold", [False, True])
def test_scores_of_hundreds_neither_overflow_nor_vanish(is_cold: bool) -> None:
    case = Case(lens=(60,), dtype=mx.float32, query_factor=100, is_cold=is_cold)
    assert with_small_splits(case).error() <= 1e-4  # the exponents are rounded to float too


@pytest.mark.parametrize("block_size", [1, 16, 37, 256])
def test_block_size_and_order_leave_every_bit(block_size: int) -> None:
    case = with_small_splits(Case(block_size=block_size, seed=3))
    assert np.array_equal(bits(case.attend()), bits(case.attend_contiguous()))


def test_a_row_is_the_same_alone_and_in_any_batch() -> None:
    lens = (300, 0, 1, 128, 129, 40)
    together = bits(Case(lens=lens).attend())
    reversed_ = bits(Case(lens=lens[::-1], block_size=5, seed=0).attend())[::-1]
    assert np.array_equal(together, reversed_)
    for row, length in enumerate(lens[:1] + lens[2:]):
        alone = bits(Case(lens=(length,)).attend())
        assert np.array_equal(alone[0], together[row + (row > 0)]), length


def test_no_bit_hangs_on_the_order_in_which_threads_run() -> None:
    case = with_small_splits(Case(lens=(50, 0, 17)))
    in_order = bits(case.attend())
    for schedule in (1, 2):
        with metal.using(replace(EXECUTOR, schedule=schedule).metal_kernel):
            assert np.array_equal(bits(case.attend()), in_order)


@pytest.mark.parametrize(
    ("shape", "read_as", "expected"),
    [
        ((3, 2, 4, 8), "2, 4, 8", True),
        ((3, 2, 4, 8), "4, 2, 8", False),
        ((3, 2, 4, 8), "2, 4, 4", False),
        ((3, 2, 4, 8), "1, 4, 8", False),
        ((1, 2, 4, 8), "1, 4, 8", True),  # one block, so the stride between blocks says nothing
        ((3, 1, 4, 8), "1, 4, 8", True),
        ((3, 2, 1, 8), "2, 1, 8", True),
    ],
)
def test_strides_tell_whether_a_pool_lies_as_it_is_read(
    shape: tuple[int, ...], read_as: str, expected: bool, metal_kernel: Factory
) -> None:
    kernel = metal_kernel(
        name="strides",
        input_names=["pool"],
        output_names=["result"],
        header=metal.read("paging.metal"),
        source=f"result[0] = is_row_contiguous<{read_as}>(pool_strides, pool_shape[0]);",
    )
    (result,) = kernel(
        inputs=[mx.zeros(shape)],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )
    assert bool(result.item()) == expected


def test_a_table_of_fewer_than_eight_entries_lies_in_constant_memory() -> None:
    """MLX passes small arrays in another address space, where a `device` pointer can't go."""
    for lens, unused in [((16,), 0), ((16, 32), 1), ((20, 1, 0, 7, 3, 9, 11), 0)]:
        case = with_small_splits(Case(lens=lens, unused_entries=unused))
        assert case.error() <= MAX_ERROR[case.dtype]


def test_one_query_head_and_one_sequence_make_the_smallest_partial_results() -> None:
    case = Case(group_size=1, num_kv_heads=1, lens=(16,), launch=None)
    assert with_small_splits(case).error() <= MAX_ERROR[case.dtype]


@pytest.mark.parametrize("splits", [Splits(8, 32, 3), Splits(128, 512, 40), Splits(64, 64, 1)])
def test_host_and_kernel_split_alike(splits: Splits, metal_kernel: Factory) -> None:
    parameters = f"{splits.smallest}, {splits.largest}, {splits.enough}"
    limits = [splits.smallest * 2**i * splits.enough for i in range(4)]
    lengths = [1, *(limit + i for limit in limits for i in (-1, 0, 1))]
    tokens = run_header(
        metal_kernel, "softmax.metal", f"tokens_per_split<{parameters}>(x)", lengths
    )
    assert tokens == [splits.tokens(length) for length in lengths]


@pytest.mark.parametrize("splits", [Splits(8, 32, 3), Splits(4, 64, 1), Splits(5, 40, 7)])
def test_no_sequence_has_more_splits_than_there_is_room_for(splits: Splits) -> None:
    most = 1
    for length in range(600):
        most = max(most, splits.count(length))
        assert splits.most(length) == most


def test_no_sequences_give_no_rows() -> None:
    case = Case(lens=(5,))
    out = case.attend(
        queries=case.queries[:0],
        block_tables=case.tables[:0],
        context_lens=case.context_lens[:0],
    )
    assert out.shape == (0, 12, 64)


@pytest.mark.parametrize("window", [1, 8, 30, 500])
def test_a_window_of_its_last_tokens_is_all_that_a_sequence_sees(window: int) -> None:
    case = with_small_splits(Case(lens=(0, 1, 31, 100), block_size=4, window=window))
    assert case.error() <= MAX_ERROR[case.dtype]
    if window > case.max_len:
        assert np.array_equal(bits(case.attend()), bits(replace(case, window=None).attend()))


def test_blocks_that_lie_wholly_before_the_window_may_be_gone() -> None:
    case = with_small_splits(Case(lens=(70, 90, 3), window=10, block_size=4))
    tables = np.array(case.tables)
    for table, length in zip(tables, case.lens, strict=True):
        table[: max(0, length - 10) // 4] = 10**6
    assert np.array_equal(bits(case.attend(block_tables=mx.array(tables))), bits(case.attend()))

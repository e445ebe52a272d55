"""Bytes that the decode kernel loads, counted by the executor and known in advance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from kernel_cases import (
    EXECUTOR,
    SMALL_SPLITS,
    Case,
    Recording,
    as_floats,
    require_compiler,
)

from mlx_paged.kernels import metal
from mlx_paged.kernels.copy import contiguous_copy, paged_copy
from mlx_paged.kernels.defaults import default_launch
from mlx_paged.kernels.launch import HEAD_DIMS, DecodeLaunch

require_compiler()

INT_BYTES = 4
FLOAT_BYTES = 4


@pytest.fixture
def recording() -> Iterator[Recording]:
    recording = Recording(EXECUTOR.metal_kernel)
    with metal.using(recording):
        yield recording


def one_simdgroup_for_all_heads(case: Case, lanes: int, keys: int = 2) -> Case:
    launch = DecodeLaunch(case.group_size, lanes, keys, slices=4, splits=SMALL_SPLITS)
    return replace(case, launch=launch)


def needed_bytes(case: Case) -> int:
    """Of K, or of V."""
    return sum(case.lens) * case.num_kv_heads * case.head_dim * case.dtype.size


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("dtype", "group_size"), [(mx.float16, 6), (mx.float32, 1)], ids=str)
def test_each_row_is_loaded_once_for_all_heads_of_its_group(
    head_dim: int, dtype: mx.Dtype, group_size: int, recording: Recording
) -> None:
    case = Case(head_dim=head_dim, dtype=dtype, group_size=group_size, block_size=7)
    one_simdgroup_for_all_heads(case, lanes=16).attend()
    report = recording.reports["decode_paged_partial"]
    for pool in ("key_pool", "value_pool"):
        assert report[pool].bytes_loaded == needed_bytes(case)
        assert report[pool].distinct_bytes_loaded == needed_bytes(case)


@pytest.mark.parametrize(
    ("group_size", "head_dim", "loads"), [(6, 128, 1), (7, 64, 1), (1, 64, 1), (8, 128, 2)]
)
def test_the_default_launch_loads_rows_once_where_registers_allow(
    group_size: int, head_dim: int, loads: int, recording: Recording
) -> None:
    case = Case(head_dim=head_dim, group_size=group_size)
    case.attend()
    assert default_launch(case.shape, cores=16).row_loads(group_size) == loads
    report = recording.reports["decode_paged"]
    assert report["key_pool"].bytes_loaded == loads * needed_bytes(case)
    assert report["value_pool"].bytes_loaded == loads * needed_bytes(case)


def test_head_groups_load_rows_as_often_as_the_launch_says(recording: Recording) -> None:
    launch = DecodeLaunch(heads=1, lanes=16, keys=2, slices=4, splits=SMALL_SPLITS)
    case = Case(group_size=6, launch=launch)
    case.attend()
    assert launch.row_loads(6) == 6
    report = recording.reports["decode_paged_partial"]
    assert report["key_pool"].bytes_loaded == 6 * needed_bytes(case)
    assert report["key_pool"].distinct_bytes_loaded == needed_bytes(case)


@pytest.mark.parametrize(("head_dim", "lanes", "vector"), [(64, 16, 4), (64, 32, 2), (128, 32, 4)])
def test_every_load_of_a_row_is_a_vector(
    head_dim: int, lanes: int, vector: int, recording: Recording
) -> None:
    case = one_simdgroup_for_all_heads(Case(head_dim=head_dim), lanes)
    case.attend()
    report = recording.reports["decode_paged_partial"]
    for pool in ("key_pool", "value_pool"):
        assert set(report[pool].load_widths) == {vector * case.dtype.size}


def test_the_table_is_read_once_a_token_by_each_lane_of_a_row(recording: Recording) -> None:
    case = one_simdgroup_for_all_heads(Case(block_size=4), lanes=16)
    case.attend()
    table = recording.reports["decode_paged_partial"]["block_tables"]
    assert table.bytes_loaded == sum(case.lens) * case.num_kv_heads * 16 * INT_BYTES
    used_entries = sum(-(-length // case.block_size) for length in case.lens)
    assert table.distinct_bytes_loaded == used_entries * INT_BYTES


def test_the_contiguous_variant_has_no_table_and_loads_the_same_rows(recording: Recording) -> None:
    case = one_simdgroup_for_all_heads(Case(), lanes=16)
    case.attend_contiguous()
    report = recording.reports["decode_partial"]
    assert "block_tables" not in report.buffers
    assert report["key_pool"].bytes_loaded == needed_bytes(case)
    assert report["value_pool"].bytes_loaded == needed_bytes(case)


def test_one_split_writes_its_output_and_nothing_else(recording: Recording) -> None:
    case = Case(lens=(100, 3, 0))
    out = case.attend()
    assert set(recording.reports) == {"decode_paged"}
    stored = {name: t.bytes_stored for name, t in recording.reports["decode_paged"].buffers.items()}
    assert {name: count for name, count in stored.items() if count} == {"out": out.nbytes}


def test_splits_cost_a_float_row_and_two_numbers_each(recording: Recording) -> None:
    case = one_simdgroup_for_all_heads(Case(lens=(0, 1, 8, 9, 100)), lanes=16)
    case.attend()
    splits = sum(SMALL_SPLITS.count(length) for length in case.lens)
    assert splits == 0 + 1 + 1 + 2 + 4
    rows = splits * case.shape.num_query_heads
    decode, merge = recording.reports["decode_paged_partial"], recording.reports["merge"]
    row_bytes = case.head_dim * FLOAT_BYTES
    assert decode["partial_out"].bytes_stored == rows * row_bytes
    assert decode["partial_stats"].bytes_stored == rows * 2 * FLOAT_BYTES
    assert merge["partial_out"].bytes_loaded == rows * row_bytes


def test_threadgroup_memory_is_what_the_launch_was_checked_for(recording: Recording) -> None:
    for head_dim, slices in [(64, 4), (256, 8)]:
        case = Case(head_dim=head_dim)
        launch = DecodeLaunch(heads=2, lanes=16, keys=1, slices=slices, splits=SMALL_SPLITS)
        replace(case, launch=launch).attend()
        report = recording.reports["decode_paged_partial"]
        assert 0 <= report.threadgroup_bytes - launch.threadgroup_bytes(case.shape) < 3 * 16


@pytest.mark.parametrize("is_paged", [True, False])
def test_the_copy_reads_each_row_once_and_loses_none(is_paged: bool, recording: Recording) -> None:
    case = Case(head_dim=80, block_size=3)
    if is_paged:
        pools = case.pool(case.keys), case.pool(case.values)
        copies = paged_copy(*pools, case.tables, case.context_lens, max_context_len=case.max_len)
    else:
        rows = case.contiguous(case.keys), case.contiguous(case.values)
        copies = contiguous_copy(*rows, case.context_lens, max_context_len=case.max_len)
    for copy, tokens in zip(copies, (case.keys, case.values), strict=True):
        expected = np.nan_to_num(as_floats(case.contiguous(tokens)))
        assert np.array_equal(as_floats(copy), expected)
    report = recording.reports["copy_paged" if is_paged else "copy"]
    assert report["key_pool"].bytes_loaded == needed_bytes(case)
    assert report["value_pool"].bytes_loaded == needed_bytes(case)

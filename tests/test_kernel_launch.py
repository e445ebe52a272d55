"""Launches that are refused, names that never meet, and choices that are kept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from kernel_cases import SMALL_SPLITS, Case

from mlx_paged.kernels import copy, decode, metal, prefill, tuned
from mlx_paged.kernels.defaults import REGISTER_BUDGET, default_launch
from mlx_paged.kernels.launch import DTYPES, HEAD_DIMS, DecodeLaunch, DecodeShape

KERNELS = [
    *decode.DECODE.values(),
    decode.MERGE,
    *prefill.PREFILL.values(),
    copy.PAGED,
    copy.CONTIGUOUS,
]
SHAPE = DecodeShape(12, 2, 128, mx.float16)


class Launches:
    """Stands in for mx.fast.metal_kernel and keeps what it was asked for."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.run: list[dict[str, Any]] = []

    def __call__(self, **arguments: Any) -> Any:
        self.made.append(arguments)

        def launch(**launch_arguments: Any) -> list[mx.array]:
            self.run.append({"name": arguments["name"], **launch_arguments})
            outputs = zip(
                launch_arguments["output_shapes"], launch_arguments["output_dtypes"], strict=True
            )
            return [mx.zeros(shape, dtype) for shape, dtype in outputs]

        return launch


@pytest.fixture
def launches() -> Iterator[Launches]:
    launches = Launches()
    with metal.using(launches):
        yield launches


def launch_of(**choices: int) -> DecodeLaunch:
    fields = {"heads": 1, "lanes": 16, "keys": 1, "slices": 4} | choices
    return DecodeLaunch(**fields, splits=SMALL_SPLITS)


def test_a_factory_is_replaced_in_its_block_alone(launches: Launches) -> None:
    assert metal.is_available()
    Case(lens=(5,)).attend()
    assert len(launches.made) == 1
    other = Launches()
    with metal.using(other):
        Case(lens=(5,)).attend()
    assert (len(launches.run), len(other.run)) == (1, 1)
    Case(lens=(5,)).attend()
    assert (len(launches.run), len(other.run)) == (2, 1)


def test_a_kernel_is_made_once_and_launched_often(launches: Launches) -> None:
    for length in (5, 50, 500, 900):
        Case(lens=(length,)).attend()
    assert [made["name"].rpartition("_")[0] for made in launches.made] == [
        "decode_paged",
        "decode_paged_partial",
        "merge",
    ]
    templates = {str(run["template"]) for run in launches.run if len(run["output_shapes"]) == 2}
    assert len(templates) == 1, "a growing sequence compiled a kernel anew"


def test_inputs_are_never_copied(launches: Launches) -> None:
    Case(lens=(500,)).attend()
    assert {made["ensure_row_contiguous"] for made in launches.made} == {False}


@pytest.mark.parametrize("length", [5, 500])
def test_mlx_itself_takes_the_launches(length: int, tmp_path: Path) -> None:
    """Without Metal too, as long as the kernel is only recorded."""
    case = Case(lens=(length,))
    arrays = case.queries, case.pool(case.keys), case.pool(case.values), case.tables

    def attend(queries: mx.array, keys: mx.array, values: mx.array, tables: mx.array) -> mx.array:
        return case.attend(queries=queries, key_pool=keys, value_pool=values, block_tables=tables)

    mx.export_function(str(tmp_path / "attend.mlxfn"), attend, *arrays)
    assert (tmp_path / "attend.mlxfn").stat().st_size > 0


def test_a_strided_pool_is_refused_where_its_strides_are_known() -> None:
    pool = mx.zeros((3, 2, 4, 8), mx.bfloat16)
    metal.require_row_contiguous("key_pool", pool)
    with pytest.raises(ValueError, match=r"key_pool of shape \(3, 4, 2, 8\).*mx.contiguous"):
        metal.require_row_contiguous("key_pool", pool.swapaxes(1, 2))


def test_no_two_texts_share_a_name() -> None:
    names = {kernel.unique_name for kernel in KERNELS}
    assert len(names) == len(KERNELS)
    changed = replace(decode.MERGE, headers=("softmax.metal", "paging.metal"))
    assert changed.unique_name not in names


def test_whatever_varies_between_launches_is_in_the_template(launches: Launches) -> None:
    """MLX names a compiled kernel after its template, so that variants can't be mixed up."""
    for lens in [(2000,), (5,)]:
        Case(lens=lens).attend(), Case(lens=lens).attend_contiguous()
        Case(lens=lens, kv_bits=4).attend()
    assert len(launches.run) == 9
    kernels = {kernel.unique_name: kernel for kernel in KERNELS}
    for run in launches.run:
        kernel = kernels[run["name"]]
        code = re.sub(r"//.*|#.*|::\w+", "", compiled(kernel))
        constants = set(re.findall(r"\b[A-Z][A-Z_]*\b", code)) - {"UNROLL", "LOWEST", "POOLS"}
        own = set(re.findall(r"\bconstexpr int ([A-Z_]+)\b", code))
        assert constants - own == {name for name, _ in run["template"]}


def compiled(kernel: metal.Kernel) -> str:
    """The lines of the kernel's text that its macros leave."""
    lines, is_kept = [], [True]
    for line in kernel.source.splitlines():
        if line.startswith("#if "):
            is_kept.append(is_kept[-1] and line.removeprefix("#if ") in kernel.defines)
        elif line == "#else":
            is_kept[-1] = is_kept[-2] and not is_kept[-1]
        elif line == "#endif":
            is_kept.pop()
        elif is_kept[-1]:
            lines.append(line)
    return "\n".join(lines)


def test_block_sizes_and_dtypes_differ_in_the_template(launches: Launches) -> None:
    cases = [Case(lens=(5,), block_size=b, dtype=dtype) for b in (1, 16) for dtype in DTYPES]
    for case in cases:
        case.attend()
    assert len({str(run["template"]) for run in launches.run}) == len(cases)


def test_a_launch_beyond_metals_limits_is_refused_before_it_compiles(launches: Launches) -> None:
    case = Case(head_dim=256, lens=(5,))
    with pytest.raises(ValueError, match=r"1056 threads a threadgroup.*allows 1024"):
        replace(case, launch=launch_of(slices=33)).attend()
    with pytest.raises(ValueError, match=r"33024 bytes of threadgroup memory.*allows 32768"):
        replace(case, launch=launch_of(slices=32)).attend()
    with pytest.raises(ValueError, match=r"32 buffers.*allows 31"):
        metal.check_limits("wide", (32, 1, 1), 0, 32)
    assert not launches.made


def test_the_kernels_need_few_buffers() -> None:
    plain = [kernel for kernel in KERNELS if "QUANTIZED" not in kernel.defines]
    assert max(kernel.num_buffers for kernel in plain) <= 17
    assert max(kernel.num_buffers for kernel in KERNELS) <= 24  # six arrays for two


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queries": mx.zeros((1, 12, 63), mx.float16)}, "takes head_dim"),
        ({"queries": mx.zeros((1, 12, 64), mx.bfloat16)}, "share one dtype"),
        ({"queries": mx.zeros((1, 11, 64), mx.float16)}, "11 query heads can't share 2 KV heads"),
        ({"queries": mx.zeros((1, 64), mx.float16)}, "queries are"),
        ({"context_lens": mx.array([5], mx.int64)}, "context_lens are int32"),
        ({"context_lens": mx.array([5, 6], mx.int32)}, r"of shape \(1,\)"),
        ({"block_tables": mx.zeros((1, 3), mx.uint32)}, "block_tables are int32"),
        ({"block_tables": mx.zeros((2, 3), mx.int32)}, "1 queries with 2 block tables"),
        ({"max_context_len": 49}, "49 doesn't fit tables of 3 blocks of 16"),
        ({"window": 0}, "at least 1 token"),
        ({"launch": launch_of(lanes=12)}, "not 12"),
        ({"launch": launch_of(keys=0)}, "at least 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_kernel_does_not_take_is_refused(
    changes: dict[str, Any], message: str, launches: Launches
) -> None:
    with pytest.raises(ValueError, match=message):
        Case(lens=(5,)).attend(**changes)
    assert not launches.made


def test_block_sizes_beyond_256_are_refused(launches: Launches) -> None:
    with pytest.raises(ValueError, match="block sizes 1 to 256, not 257"):
        Case(lens=(5,), block_size=257).attend()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_default_launches_keep_to_the_register_budget(head_dim: int, dtype: mx.Dtype) -> None:
    for group_size in (1, 2, 3, 6, 7, 8, 16, 71):
        shape = DecodeShape(2 * group_size, 2, head_dim, dtype)
        launch = default_launch(shape, cores=10)
        launch.check(head_dim)
        assert launch.live_floats(head_dim, dtype.size) <= REGISTER_BUDGET
        assert launch.num_threads(group_size) <= 256
        heads = launch.heads * launch.row_loads(group_size)
        assert group_size <= heads < group_size + launch.heads * launch.head_groups(group_size)


@pytest.mark.parametrize(
    ("shape", "heads", "lanes", "keys"),
    [
        (DecodeShape(12, 2, 128, mx.float16), 6, 32, 2),  # Qwen2.5-1.5B: all heads of a group
        (DecodeShape(32, 8, 128, mx.bfloat16), 4, 32, 4),  # Llama-3-8B
        (DecodeShape(16, 2, 128, mx.bfloat16), 4, 32, 4),  # 8 heads a group spilled in MLX
        (DecodeShape(16, 2, 64, mx.bfloat16), 8, 32, 4),  # and were best with narrower rows
        (DecodeShape(32, 32, 128, mx.bfloat16), 1, 8, 2),  # one head: few lanes, many rows
    ],
    ids=str,
)
def test_default_launches_share_what_registers_hold(
    shape: DecodeShape, heads: int, lanes: int, keys: int
) -> None:
    launch = default_launch(shape, cores=16)
    assert (launch.heads, launch.lanes, launch.keys) == (heads, lanes, keys)


def test_default_splits_fill_the_chip_with_one_sequence_and_keep_partials_small() -> None:
    for cores in (8, 40, 80):
        splits = default_launch(SHAPE, cores).splits
        assert splits.smallest * splits.enough * 8 > 8192
        threadgroups = splits.count(splits.largest * splits.enough) * SHAPE.num_kv_heads
        assert threadgroups >= 8 * cores
        partial_bytes = 2 * SHAPE.num_query_heads * 128 * 4
        kv_bytes = 2 * splits.smallest * SHAPE.num_kv_heads * 128 * 2
        assert partial_bytes <= kv_bytes / 16


@pytest.fixture
def launch_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MLX_PAGED_CACHE", str(tmp_path))
    monkeypatch.setattr(metal, "chip", lambda: "applegpu_g13s")
    tuned.chosen.cache_clear()
    yield tmp_path / "launch.json"
    tuned.chosen.cache_clear()


def test_a_measured_launch_is_preferred_and_shown(launch_file: Path) -> None:
    assert tuned.choose(SHAPE) == default_launch(SHAPE, cores=32)
    assert "nothing measured" in tuned.describe()[0]
    measured = launch_of(heads=3)
    tuned.save(SHAPE, launch_of(heads=2), gb_per_s=100.0)
    assert tuned.save(SHAPE, measured, gb_per_s=123.4) == launch_file
    assert tuned.choose(SHAPE) == measured
    assert tuned.choose(replace(SHAPE, head_dim=64)) != measured
    assert len(tuned.entries()) == 1
    assert "12q 2kv d128 float16" in tuned.describe()[1]
    assert "123 GB/s" in tuned.describe()[1]


def test_a_measurement_counts_for_its_chip_and_kernel_text_alone(
    launch_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned.save(SHAPE, launch_of(), gb_per_s=1.0)
    monkeypatch.setattr(metal, "chip", lambda: "applegpu_g16g")
    tuned.chosen.cache_clear()
    assert tuned.choose(SHAPE) == default_launch(SHAPE, cores=16)
    monkeypatch.setattr(metal, "chip", lambda: "applegpu_g13s")
    text = json.loads(launch_file.read_text())
    text["launches"][0]["kernel"] = "of another day"
    launch_file.write_text(json.dumps(text))
    tuned.chosen.cache_clear()
    assert tuned.choose(SHAPE) == default_launch(SHAPE, cores=32)
    assert "not used" in tuned.describe()[1]


def test_a_file_that_makes_no_sense_is_named_with_the_way_out(launch_file: Path) -> None:
    launch_file.write_text('{"launches": [{"chip": 1}]}')
    with pytest.raises(ValueError, match=r"launch.json isn't a file of launch choices.*delete it"):
        tuned.choose(SHAPE)

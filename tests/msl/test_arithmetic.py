"""Metal's types and functions, against numpy and MLX."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from msl.snippets import fault_of, out_of, run

I = "uint i = thread_position_in_grid.x;"  # noqa: E741
N = 256


def normal(seed: int, scale: float = 1.0) -> np.ndarray[Any, Any]:
    return (np.random.default_rng(seed).standard_normal(N) * scale).astype(np.float32)


def compute(
    expression: str, inputs: dict[str, Any], dtype: mx.Dtype = mx.float32, **more: Any
) -> Any:
    """`expression` for each of N threads."""
    return out_of(
        f"{I} out[i] = {expression};", inputs, outputs={"out": ((N,), dtype)}, threads=N, **more
    )


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("operation", ["+", "-", "*", "/"])
def test_every_16_bit_operation_rounds(dtype: mx.Dtype, operation: str) -> None:
    a, b = (mx.array(normal(seed)).astype(dtype) for seed in (1, 2))
    ours = compute(f"a[i] {operation} b[i] + a[i]", {"a": a, "b": b}, dtype)
    first = {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[operation]
    assert first.dtype == dtype
    np.testing.assert_array_equal(ours, np.array((first + a).astype(mx.float32)))


def test_float16_agrees_with_numpy_where_one_rounding_less_would_not() -> None:
    a, b = normal(1).astype(np.float16), normal(2).astype(np.float16)
    ours = compute("a[i] * b[i] + a[i]", {"a": mx.array(a), "b": mx.array(b)}, mx.float16)
    np.testing.assert_array_equal(ours, a * b + a)
    once = (a.astype(np.float32) * b + a).astype(np.float16)
    assert (ours != once).any()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_conversion_from_float_rounds_as_mlx_does(dtype: mx.Dtype) -> None:
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-8, 6e-8, 65504, 65520, 1e38, 3.4e38, 1 / 3]
    values = np.concatenate([special, normal(3, 100.0)[len(special) :]]).astype(np.float32)
    ours = compute("T(a[i])", {"a": mx.array(values)}, dtype, template=[("T", dtype)])
    np.testing.assert_array_equal(ours, np.array(mx.array(values).astype(dtype).astype(mx.float32)))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_vectors_of_16_bit_numbers_round_as_scalars_do(dtype: mx.Dtype) -> None:
    a, b = (mx.array(normal(seed)).astype(dtype) for seed in (1, 2))
    body = (
        f"{I} vec<T, 4> x = ((const device vec<T, 4>*)a)[i], y = ((const device vec<T, 4>*)b)[i];"
        "((device vec<T, 4>*)out)[i] = x * y - y / x;"
    )
    outputs = {"out": ((N,), dtype)}
    result, kernel = run(
        body, {"a": a, "b": b}, outputs=outputs, threads=N // 4, template=[("T", dtype)]
    )
    expected = a * b - b / a
    assert mx.array_equal(result["out"], expected)
    assert kernel.report is not None
    assert kernel.report["a"].load_widths == {8: N // 4}
    assert kernel.report["out"].store_widths == {8: N // 4}


def test_a_literal_is_a_float() -> None:
    a = normal(4)
    ours = compute("1.0 / 3 * a[i] + 0.1", {"a": mx.array(a)})
    np.testing.assert_array_equal(ours, np.float32(1) / np.float32(3) * a + np.float32(0.1))


def test_products_and_sums_are_not_contracted() -> None:
    a, b, c = normal(5), normal(6), normal(7)
    inputs = {"a": mx.array(a), "b": mx.array(b), "c": mx.array(c)}
    np.testing.assert_array_equal(compute("a[i] * b[i] + c[i]", inputs), a * b + c)
    fused = (a.astype(np.float64) * b + c).astype(np.float32)
    np.testing.assert_array_equal(compute("fma(a[i], b[i], c[i])", inputs), fused)


@pytest.mark.parametrize("space", ["", "metal::", "fast::", "metal::precise::"])
def test_functions_are_accurate_to_a_float(space: str) -> None:
    functions: dict[str, Any] = {
        "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "sqrt": np.sqrt,
        "tanh": np.tanh, "sin": np.sin, "cos": np.cos, "rsqrt": lambda x: 1 / np.sqrt(x),
    }  # fmt: skip
    a = np.abs(normal(8)) + np.float32(0.1)
    stores = (f"out[{k * N} + i] = {space}{name}(a[i]);" for k, name in enumerate(functions))
    outputs = {"out": ((len(functions), N), mx.float32)}
    ours = out_of(I + "".join(stores), {"a": mx.array(a)}, outputs=outputs, threads=N)
    for row, (name, exact) in zip(ours, functions.items(), strict=True):
        np.testing.assert_allclose(row, exact(a.astype(np.float64)), 3e-7, 3e-7, err_msg=name)


def test_exp2_of_minus_infinity_is_zero_and_nan_stays() -> None:
    values = mx.array([-np.inf, np.nan] * (N // 2))
    ours = compute("fast::exp2(a[i])", {"a": values})
    assert ours[0] == 0
    assert np.isnan(ours[1])


def test_max_and_min_take_the_number_before_nan() -> None:
    a = np.where(np.arange(N) % 3 == 0, np.nan, normal(9)).astype(np.float32)
    b = np.where(np.arange(N) % 5 == 0, np.nan, normal(10)).astype(np.float32)
    inputs = {"a": mx.array(a), "b": mx.array(b)}
    np.testing.assert_array_equal(compute("max(a[i], b[i])", inputs), np.fmax(a, b))
    np.testing.assert_array_equal(compute("min(a[i], b[i])", inputs), np.fmin(a, b))


VALUES: list[tuple[str, Any]] = [
    ("dot(float4(1, 2, 3, 4), float4(1, 2, 3, 4).wzyx)", 20),
    ("float4(float2(1, 2), float2(3, 4)).w", 4),
    ("float4(float3(1, 2, 3), 4).z", 3),
    ("float4(1, half2(2, 3), 4).z", 3),
    ("(float2(1, 2) * 2 + 1).y", 5),
    ("(2 / float2(1, 4)).y", 0.5),
    ("float(half4(1, 2, 3, 4).y)", 2),
    ("float4(bfloat4(1.5f)).x", 1.5),
    ("max(float2(1, 5), float2(3, 2)).x", 3),
    ("clamp(7.0f, 0.0f, 2.0f)", 2),
    ("select(1.0f, 2.0f, true)", 2),
    ("select(float2(1, 2), float2(3, 4), float2(1, 2) < float2(2, 2)).x", 3),
    ("any(float2(1, 2) > float2(2, 2)) ? 1.0f : 0.0f", 0),
    ("(-float2(1, 2)).y", -2),
    ("as_type<float>(0x40490fdbu)", np.float32(np.pi)),
    ("float(as_type<uchar4>(0x04030201u).z)", 3),
    ("float(as_type<half2>(0x3c004000u).x)", 2),
    ("float(as_type<ushort>(bfloat(1.0f)))", 0x3F80),
    ("float(popcount(0xf0f0u) + clz(1u) + ctz(8u))", 42),
    ("float(extract_bits(0xabcdu, 4u, 8u))", 0xBC),
    ("float(-7 / 2)", -3),
    ("float(uint3(5, 6, 7).z)", 7),
    ("0.5h * 3h", 1.5),
    ("float(numeric_limits<half>::max())", 65504),
    ("Limits<float>::min", -np.inf),
    ("float(char(200))", -56),
    ("float(long(1) << 40)", 2.0**40),
    ("float(sizeof(float3)) + float(sizeof(packed_float3))", 28),
    ("float(sizeof(bfloat4)) + float(sizeof(long))", 16),
    ("M_LOG2E_F", np.float32(np.log2(np.e))),
    ("length(float2(3, 4))", 5),
    ("fract(2.25f) + floor(-0.5f) + ceil(0.5f) + rint(2.5f) + abs(-3.0f)", 5.25),
    ("float(ceildiv(7, 2))", 4),
]


def test_expressions_have_metals_values() -> None:
    stores = "".join(f"out[{k}] = {expression};" for k, (expression, _) in enumerate(VALUES))
    ours = out_of(stores, outputs={"out": ((len(VALUES),), mx.float32)}, threads=1)
    for value, (expression, expected) in zip(ours, VALUES, strict=True):
        assert value == expected, expression


def test_swizzles_are_assigned() -> None:
    body = f"{I} float4 v = float4(i); v.xw = float2(1, 2); v.zy = v.xw; v.x += 5; out[i] = v[j];"
    for j, expected in enumerate((6, 2, 1, 2)):
        assert out_of(body, {"j": j})[7] == expected
    body = f"{I} float4 v = float4(1, 2, 3, 4); v.xy *= 2; v.zw = v.xy; out[i] = v.w;"
    assert out_of(body)[0] == 4


@pytest.mark.parametrize(
    "statement",
    [
        "bfloat q = 1.0f;",
        "half h = bfloat(1.0f);",
        "float4 v = half4(1.0h);",
        "float4 v = float4(1, 2);",
        "float2 v = float4(1).xyz;",
        "float4 v = float4(1) * half4(1.0h);",
        "float v = as_type<float>(1.0h);",
        "auto v = max(1.0f, 1);",
    ],
)
def test_a_conversion_that_metal_does_not_have_is_refused(statement: str) -> None:
    assert fault_of(f"{I} {statement} out[i] = 0;").kind == "compile"


def test_simd_reductions_give_every_lane_the_result() -> None:
    a = np.arange(N, dtype=np.float32)
    groups = a.reshape(-1, 32)
    for name, reduce in (("sum", np.sum), ("max", np.max), ("min", np.min)):
        expected = np.repeat(reduce(groups, axis=1), 32)
        np.testing.assert_array_equal(compute(f"simd_{name}(a[i])", {"a": mx.array(a)}), expected)
    assert compute("simd_any(i == 40) ? 1 : 0", {}).sum() == 32
    assert compute("simd_all(i != 40) ? 1 : 0", {}).sum() == N - 32
    prefix = compute("simd_prefix_exclusive_sum(1.0f)", {})
    np.testing.assert_array_equal(prefix, np.arange(N) % 32)


def test_a_simd_sum_adds_in_a_tree() -> None:
    a = normal(11)
    tree = a.reshape(-1, 32)
    while tree.shape[1] > 1:
        half = tree.shape[1] // 2
        tree = tree[:, :half] + tree[:, half:]
    ours = compute("simd_sum(a[i])", {"a": mx.array(a)})
    np.testing.assert_array_equal(ours, np.repeat(tree[:, 0], 32))


@pytest.mark.parametrize(
    ("call", "source"),
    [
        ("simd_shuffle(x, ushort(31 - lane))", lambda lane: 31 - lane),
        ("simd_shuffle_xor(x, ushort(5))", lambda lane: lane ^ 5),
        ("simd_shuffle_down(x, ushort(3))", lambda lane: lane + 3 if lane + 3 < 32 else lane),
        ("simd_shuffle_up(x, ushort(3))", lambda lane: lane - 3 if lane >= 3 else lane),
        ("simd_broadcast(x, ushort(9))", lambda lane: 9),
        ("simd_broadcast_first(x)", lambda lane: 0),
        ("quad_shuffle_xor(x, ushort(1))", lambda lane: lane ^ 1),
    ],
)
def test_a_shuffle_takes_the_value_of_the_lane(call: str, source: Any) -> None:
    last = {"float": "", "half": "", "float4": ".w", "bfloat4": ".w", "uint2": ".y", "ulong4": ".w"}
    body = f"{I} uint lane = thread_index_in_simdgroup; "
    for k, (type, member) in enumerate(last.items()):
        body += (
            f"{{ {type} x = {type}(float(i)), y = {call}; out[{k * 32} + i] = float(y{member}); }}"
        )
    ours = out_of(body, outputs={"out": ((len(last), 32), mx.float32)})
    assert ours.tolist() == [[source(lane) for lane in range(32)]] * len(last)


def matrix_launch(body: str, dtype: mx.Dtype, **inputs: mx.array) -> np.ndarray[Any, Any]:
    return out_of(body, inputs, outputs={"out": ((8, 8), dtype)}, template=[("T", dtype)])


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_matrix_product_is_that_of_numpy(dtype: mx.Dtype) -> None:
    a, b, c = (mx.array(normal(seed)[:64].reshape(8, 8)).astype(dtype) for seed in (1, 2, 3))
    body = (
        "simdgroup_matrix<T, 8, 8> A, B, C, D; simdgroup_load(A, a); simdgroup_load(B, b, 8);"
        "simdgroup_load(C, c, 8, ulong2(0, 0), false);"
        "simdgroup_multiply_accumulate(D, A, B, C); simdgroup_store(D, out, 8);"
    )
    ours = matrix_launch(body, dtype, a=a, b=b, c=c)
    exact = np.array(a.astype(mx.float32) @ b.astype(mx.float32) + c.astype(mx.float32))
    tolerance = {mx.float32: 1e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}[dtype]
    np.testing.assert_allclose(ours, exact, rtol=tolerance, atol=tolerance * 4)


def test_a_matrix_is_loaded_with_pitch_origin_and_transposed() -> None:
    a = mx.arange(16 * 20, dtype=mx.float32).reshape(16, 20)
    body = (
        "simdgroup_float8x8 A; simdgroup_load(A, a, 20, ulong2(5, 3), {});"
        "simdgroup_store(A, out, 8, ulong2(0, 0), false);"
    )
    tile = np.array(a)[3:11, 5:13]
    np.testing.assert_array_equal(matrix_launch(body.format("false"), mx.float32, a=a), tile)
    expected = np.array(a)[3:11, 5:13].T
    ours = matrix_launch(
        body.format("true").replace("ulong2(5, 3)", "ulong2(5, 3)"), mx.float32, a=a
    )
    np.testing.assert_array_equal(ours, expected)


def test_a_matrix_in_threadgroup_memory_is_loaded_and_stored() -> None:
    body = (
        "uint t = thread_index_in_threadgroup; threadgroup T tile[64];"
        "tile[t] = a[t]; tile[t + 32] = a[t + 32];"
        "simdgroup_barrier(mem_flags::mem_threadgroup);"
        "simdgroup_matrix<T, 8, 8> A; simdgroup_load(A, tile, 8, ulong2(0, 0), true);"
        "simdgroup_store(A, out, 8);"
    )
    a = mx.arange(64, dtype=mx.float16).reshape(8, 8)
    np.testing.assert_array_equal(matrix_launch(body, mx.float16, a=a), np.array(a).T)


def test_thread_elements_are_two_neighbours_of_a_row() -> None:
    body = (
        "uint lane = thread_index_in_simdgroup; simdgroup_float8x8 A; simdgroup_load(A, a, 8);"
        "out[lane * 2] = A.thread_elements()[0]; out[lane * 2 + 1] = A.thread_elements()[1];"
    )
    a = mx.arange(64, dtype=mx.float32).reshape(8, 8)
    elements = matrix_launch(body, mx.float32, a=a).reshape(32, 2)
    lanes = np.arange(32)
    rows, columns = (lanes // 4 & 4) + lanes // 2 % 4, (lanes // 4 & 2) * 2 + lanes % 2 * 2
    np.testing.assert_array_equal(elements[:, 0], rows * 8 + columns)
    np.testing.assert_array_equal(elements[:, 1], rows * 8 + columns + 1)


def test_a_matrix_made_of_one_number_is_diagonal_and_a_filled_one_is_full() -> None:
    store = "simdgroup_store(A, out, 8);"
    body = "simdgroup_float8x8 A = simdgroup_float8x8(2.0f);" + store
    np.testing.assert_array_equal(matrix_launch(body, mx.float32), 2 * np.eye(8))
    body = "simdgroup_float8x8 A = make_filled_simdgroup_matrix<float, 8, 8>(2.0f);" + store
    np.testing.assert_array_equal(matrix_launch(body, mx.float32), np.full((8, 8), 2))


def test_atomics_add_up_over_all_threads() -> None:
    body = f"{I} atomic_fetch_add_explicit(&out[i % 3], 1u, memory_order_relaxed);"
    launch: dict[str, Any] = {"grid": 100, "init_value": 0, "atomic_outputs": True}
    ours = out_of(body, outputs={"out": ((3,), mx.uint32)}, **launch)
    assert ours.tolist() == [34, 33, 33]
    largest = body.replace("fetch_add", "fetch_max").replace("1u", "i")
    assert out_of(largest, outputs={"out": ((3,), mx.uint32)}, **launch).tolist() == [99, 97, 98]


def test_atomics_in_threadgroup_memory_need_initial_values_and_barriers() -> None:
    body = (
        f"{I} threadgroup atomic_int sum; {{}}"
        "atomic_fetch_add_explicit(&sum, int(i), memory_order_relaxed);"
        "threadgroup_barrier(mem_flags::mem_threadgroup);"
        "out[i] = atomic_load_explicit(&sum, memory_order_relaxed);"
    )
    zero = "if (i == 0) atomic_store_explicit(&sum, 0, memory_order_relaxed);"
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    launch: dict[str, Any] = {"outputs": {"out": ((64,), mx.float32)}, "threads": 64}
    assert out_of(body.format(zero + barrier), **launch).tolist() == [2016.0] * 64
    assert fault_of(body.format(""), **launch).kind == "uninitialised"


def test_a_table_of_constants_in_the_header_is_read() -> None:
    header = "constant float table[4] = {1.5, 2.5, 3.5, 4.5};\nconstant constexpr int FOUR = 4;\n"
    ours = out_of(f"{I} out[i] = table[i % FOUR];", header=header)
    assert ours[:5].tolist() == [1.5, 2.5, 3.5, 4.5, 1.5]
    assert fault_of(f"{I} out[i] = 0; table[0] = 1;", header=header).kind == "compile"

"""The second reading, and what the lint refuses: each with a neighbour that must pass."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from msl import KernelFault
from msl.snippets import OUT, fault_of, make, out_of

I = "uint i = thread_position_in_grid.x;"  # noqa: E741
LARGE = {"a": mx.arange(32, dtype=mx.float32)}
SMALL = {"a": mx.arange(4, dtype=mx.float32)}

ROW = f"{I}\nconst device float* row = a + i % 2;\nout[i] = row[i % 2];"


def test_a_small_input_is_constant_and_no_device_pointer_takes_it() -> None:
    out_of(ROW, LARGE)
    fault = fault_of(ROW, SMALL)
    assert (fault.kind, fault.line) == ("address space", 2)
    auto = ROW.replace("const device float*", "const auto")
    out_of(auto, SMALL)
    out_of(auto, LARGE)


def test_small_inputs_are_checked_without_being_launched() -> None:
    call: dict[str, Any] = {
        "inputs": list(LARGE.values()), "output_shapes": [(32,)], "output_dtypes": [mx.float32],
        "grid": (32, 1, 1), "threadgroup": (32, 1, 1),
    }  # fmt: skip
    kernel = make(ROW, LARGE, OUT)
    kernel.check_small((), **call)
    with pytest.raises(KernelFault, match="address space"):
        kernel.check_small(("a",), **call)
    assert kernel.report is None


def test_a_0_dimensional_input_is_a_reference() -> None:
    assert out_of(f"{I} out[i] = s * 2;", {"s": mx.array(1.5)})[0] == 3
    assert out_of(f"{I} out[i] = s;", {"s": 2.5})[0] == 2.5
    assert fault_of(f"{I} out[i] = s[0];", {"s": 2.5}).kind == "compile"


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        ("const threadgroup float* p = a;", "const device float* p = a;"),
        ("const constant float* p = a;", "const device float* p = a;"),
        (
            "threadgroup float t[4]; device float* p = t;",
            "threadgroup float t[4]; threadgroup float* p = t;",
        ),
        ("float t[4]; threadgroup float* p = t;", "float t[4]; thread float* p = t;"),
        ("thread float* p = out;", "device float* p = out;"),
        ("get(a);", "get(a + 0.0f);"),
        (
            "auto p = (const device float*)(threadgroup float*)0; p = (threadgroup float*)0;",
            "auto p = (const device float*)0; p = a;",
        ),
    ],
)  # fmt: skip
def test_a_pointer_stays_in_its_address_space(bad: str, good: str) -> None:
    header = "float get(const threadgroup float* p) { return p[0]; }\n"
    fault = fault_of(f"{I} out[i] = 0;\n{bad}", LARGE, header=header)
    assert fault.kind == "address space"
    assert fault.line == 2
    if "get" not in good:
        out_of(f"{I} out[i] = 0;\n{good}", LARGE, header=header)


@pytest.mark.parametrize(
    "statement",
    [
        "const float* p = a;",
        "auto p = (const float4*)(a);",
        "out[i] = *(float*)(&a[i]);",
        "float x = 0; float& y = x;",
        "vec<float, 4> v; vec<float, 4>* p = &v;",
        "T x = 0; T* p = &x;",
        "Pair pair; Pair* p = &pair;",
        "Four v; const Four* p = &v;",
        "get(a);",
    ],
)
def test_a_pointer_without_an_address_space_is_refused(statement: str) -> None:
    header = "struct Pair { float x; };\nusing Four = float4;\n"
    if "get" in statement:
        header += "float get(const float* p);\n"
    body = f"{I} out[i] = 0; {statement}"
    fault = fault_of(body, LARGE, header=header, template=[("T", mx.float32)])
    assert fault.kind == "not in Metal"
    assert "address space" in str(fault)


def test_products_and_bit_masks_are_no_pointers() -> None:
    body = (
        "const float x = 2, y = 3; const uint m = i & 3; const float2 v = float2(x) * y;"
        "const device float4* q = (const device float4*)a;"
        "float device* z = out; auto both = float(m) * x + int(x) * y; // float* in a comment\n"
        "out[i] = x * y + v.x * (both - both) + (i & m) * 0 + q[0].x + (z - out);"
    )
    assert out_of(I + body, LARGE)[0] == 6


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("double x = 1;", "`double`"),
        ("long long x = 1;", "64 bits"),
        ("thread float* x = new float[4];", "allocation"),
        ("goto end; end: ;", "goto"),
        ("auto f = [&](int x) { return x; };", "lambdas"),
        ("auto f = [] { return 1; };", "lambdas"),
        ("try { } catch (...) { }", "exceptions"),
        ("std::max(1, 2);", "standard library"),
        ('printf("%d", 1);', "printf"),
        ("int (*f)(int) = nullptr;", "function pointers"),
    ],
)
def test_what_metal_lacks_is_refused_by_name_and_line(statement: str, message: str) -> None:
    fault = fault_of(f"{I} out[i] = 0;\n{statement}")
    assert (fault.kind, fault.line) == ("not in Metal", 2)
    assert message in str(fault)


@pytest.mark.parametrize("header", ["#include <vector>\n", '#include "own.h"\n'])
def test_only_metals_headers_are_included(header: str) -> None:
    assert "only Metal's own headers" in str(fault_of(f"{I} out[i] = 0;", header=header))
    metals = "#include <metal_stdlib>\n#include <metal_simdgroup>\nusing namespace metal;\n"
    out_of(f"{I} out[i] = 0;", header=metals)


def test_words_in_comments_and_strings_and_names_are_not_refused() -> None:
    body = (
        f"{I} /* double\nnew */ float doubled = 1; // goto\n"
        "int renewed = 2;\nout[i] = doubled * renewed;"
    )
    assert out_of(body)[0] == 2
    assert fault_of(body + "\ndouble x = 0;").line == 5


def test_recursion_is_refused() -> None:
    header = (
        "int odd(int n);\n"
        "int even(int n) { return n == 0 ? 1 : odd(n - 1); }\n"
        "int odd(int n) { return n == 0 ? 0 : even(n - 1); }\n"
    )
    fault = fault_of(f"{I} out[i] = even(3);", header=header)
    assert fault.kind == "not in Metal"
    assert "`even` calls itself" in str(fault)


def test_an_overload_that_calls_another_is_no_recursion() -> None:
    header = (
        "float twice(float x) { return 2 * x; }\n"
        "float2 twice(float2 v) { return float2(twice(v.x), twice(v.y)); }\n"
        "float four(float x) { return twice(twice(x)); }\n"
    )
    assert out_of(f"{I} out[i] = four(1) + twice(float2(1, 2)).y;", header=header)[0] == 8


def test_functions_over_any_address_space_are_templates() -> None:
    header = "template <typename P> float first(P p) { return p[0]; }\n"
    body = f"{I} threadgroup float t[32]; t[i] = 5; out[i] = first(a) + first(t + i);"
    assert out_of(body, {"a": LARGE["a"] + 1}, header=header)[0] == 6
    assert out_of(body, {"a": SMALL["a"] + 1}, header=header)[0] == 6


@pytest.mark.parametrize(
    "declaration",
    [
        "const float x = 1;",
        "constexpr int x = 2;",
        "static const int x[2] = {1, 2};",
        "float x;",
        "#define A 1\nstatic constexpr float x = 1;",
        "float f() { return 1; }\nconst metal::vec<float, 4> x = 1;",
    ],
)
def test_a_variable_outside_functions_is_constant(declaration: str) -> None:
    fault = fault_of(f"{I} out[i] = 0;", header=f"{declaration}\n")
    assert fault.kind == "not in Metal"
    assert "needs `constant`" in str(fault)
    assert fault.place is not None
    assert (fault.place.part, fault.line) == ("header", 1 + declaration.count("\n"))


def test_other_declarations_outside_functions_pass() -> None:
    header = (
        "constant float a = 1; static constant constexpr int B[2] = {1, 2}; using F = float4;\n"
        "template <typename T> struct Pair { T first = 1; static constexpr int size = 2; };\n"
        "template <int N = 4> float get(const device float* p) { const int j = N; return p[j]; }\n"
        "enum { ONE = 1 }; enum class Kind : int { none = 0 }; typedef float Number;\n"
        "namespace own { constant int C = 5; struct S { float x; }; }\n"
        "float declared(float x, float y);\n"
    )
    body = f"{I} Pair<float> p; out[i] = a + B[0] + ONE + own::C + p.first + get<3>(numbers);"
    assert out_of(body, {"numbers": LARGE["a"]}, header=header)[0] == 12


@pytest.mark.parametrize(
    ("body", "header"),
    [
        ("out[i] = f();", "float f() { threadgroup float t[4]; t[0] = 1; return t[0]; }\n"),
        ("threadgroup float t[2] = {1, 2}; out[i] = t[0];", ""),
        ("threadgroup struct S { float x; } s; out[i] = s.x;", ""),
    ],
)
def test_threadgroup_storage_is_declared_plainly_in_the_kernel(body: str, header: str) -> None:
    fault = fault_of(f"{I} {body}", header=header)
    assert fault.kind == "not in Metal"
    assert "threadgroup storage" in str(fault)


def test_a_comment_declares_nothing() -> None:
    body = (
        f"{I} // one float in threadgroup\nfloat x; x = i; // threadgroup float x[3];\nout[i] = x;"
    )
    assert out_of(body)[5] == 5


def test_several_threadgroup_variables_in_one_declaration() -> None:
    body = (
        f"{I} threadgroup float a[32],\n  b[4][8], c; a[i] = i; b[i / 8][i % 8] = 2 * i;"
        "if (i == 0) c = 7; threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "out[i] = a[31] + b[3][7] + c;"
    )
    assert out_of(body)[0] == 31 + 62 + 7
    assert fault_of(body + "\nout[32] = 0;").line == 4

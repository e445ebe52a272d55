"""The decode kernel over K and V in 8 and 4 bits, held to float64 over the dequantised rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from greedy import ours_of, paged_greedy
from kernel_cases import (
    EXECUTOR,
    MAX_ERROR,
    SMALL_SPLITS,
    Case,
    Recording,
    bits,
    require_compiler,
)
from kernel_checks import Check
from quantized_checks import QUANTIZED_CHECKS, bytes_loaded, packed_bytes
from tiny_engine import run
from tiny_models import tiny_config, tiny_model

from mlx_paged.cache import KVPool
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.options import EngineOptions
from mlx_paged.engine.params import SamplingParams
from mlx_paged.kernels import metal
from mlx_paged.kernels.decode import DECODE
from mlx_paged.kernels.defaults import REGISTER_BUDGET, default_launch
from mlx_paged.kernels.launch import DTYPES, HEAD_DIMS, DecodeLaunch, DecodeShape

require_compiler()

FORMATS = ((8, 32), (4, 32), (8, 64), (4, 64))
BLOCK_SIZES = (1, 3, 16, 64, 256)


@pytest.fixture(autouse=True)
def recording() -> Iterator[Recording]:
    recording = Recording(EXECUTOR.metal_kernel)
    with metal.using(recording):
        yield recording


def with_small_splits(case: Case) -> Case:
    launch = default_launch(case.shape, cores=10)
    return replace(case, launch=replace(launch, splits=SMALL_SPLITS))


def covering_cases() -> list[Case]:
    """Each head dim with each format that divides it, all else going round beside them."""
    cases = []
    pairs = itertools.product(enumerate(HEAD_DIMS), enumerate(FORMATS))
    for (i, head_dim), (j, (kv_bits, group_size)) in pairs:
        if head_dim % group_size == 0:
            case = Case(
                head_dim=head_dim,
                block_size=BLOCK_SIZES[(i + j) % 5],
                dtype=DTYPES[(i + j) % 3],
                group_size=(1, 3, 6, 8)[(i + 2 * j) % 4],
                num_kv_heads=1 + (i + j) % 2,
                lens=(0, 1, 7, 45),
                kv_bits=kv_bits,
                kv_group_size=group_size,
            )
            cases.append(with_small_splits(case))
    return cases


@pytest.mark.parametrize("check", QUANTIZED_CHECKS, ids=lambda check: check.__name__)
def test_the_kernel_passes_what_its_mutants_must_not(check: Check) -> None:
    assert check(EXECUTOR.metal_kernel) is None


def test_the_cases_cover_every_format_dtype_and_head_dim_that_goes_with_it() -> None:
    cases = covering_cases()
    dims = {(case.head_dim, case.kv_group_size) for case in cases}
    assert dims == {(d, g) for d in HEAD_DIMS for g in (32, 64) if d % g == 0}
    dtypes = {(case.dtype, case.kv_bits) for case in cases}
    assert dtypes == set(itertools.product(DTYPES, (8, 4)))


@pytest.mark.parametrize("case", covering_cases(), ids=str)
def test_error_stays_within_the_outputs_rounding(case: Case) -> None:
    assert case.error() <= MAX_ERROR[case.dtype]


@pytest.mark.parametrize("lanes", [4, 8, 16, 32])
@pytest.mark.parametrize(("heads", "keys", "slices"), [(6, 1, 1), (4, 2, 3), (1, 4, 2)])
@pytest.mark.parametrize("kv_bits", [8, 4])
def test_every_launch_choice_gives_the_result(
    lanes: int, heads: int, keys: int, slices: int, kv_bits: int
) -> None:
    launch = DecodeLaunch(heads, lanes, keys, slices, SMALL_SPLITS)
    case = Case(head_dim=96, block_size=4, lens=(70, 9, 0), launch=launch, kv_bits=kv_bits)
    assert case.error() <= MAX_ERROR[case.dtype]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("kv_bits", "group_size"), FORMATS)
def test_bytes_loaded_are_the_packed_rows_and_no_more(
    head_dim: int, kv_bits: int, group_size: int, recording: Recording
) -> None:
    case = Case(
        head_dim=head_dim,
        block_size=7,
        lens=(300, 0, 17),
        kv_bits=kv_bits,
        kv_group_size=group_size,
    )
    launch = DecodeLaunch(case.group_size, 16, 2, slices=4, splits=SMALL_SPLITS)
    replace(case, launch=launch).attend()
    loaded = bytes_loaded(recording.reports["decode_paged_quantized_partial"])
    assert set(loaded.values()) == {packed_bytes(case)}
    plain = sum(case.lens) * case.num_kv_heads * head_dim * 2
    assert packed_bytes(case) / plain == (kv_bits + 32 / group_size) / 16


def test_a_pool_of_a_few_rows_lies_in_constant_memory() -> None:
    """MLX passes arrays of fewer than 8 elements, here scales, in another address space."""
    for head_dim, group_size in ((64, 64), (64, 32)):
        case = Case(
            head_dim=head_dim,
            num_kv_heads=1,
            block_size=1,
            lens=(1,),
            dtype=mx.float32,
            kv_bits=8,
            kv_group_size=group_size,
        )
        assert case.pool(case.keys).scales.size < 9
        case = with_small_splits(case)
        assert case.error() <= MAX_ERROR[case.dtype]
    few = with_small_splits(replace(case, kv_group_size=64))
    assert few.pool(few.keys).scales.size < 8
    assert few.error() <= MAX_ERROR[few.dtype]


def test_no_bit_hangs_on_the_order_in_which_threads_run() -> None:
    case = with_small_splits(Case(lens=(50, 0, 17), kv_bits=4))
    in_order = bits(case.attend())
    with metal.using(replace(EXECUTOR, schedule=1).metal_kernel):
        assert np.array_equal(bits(case.attend()), in_order)


@pytest.mark.parametrize(("kv_bits", "group_size"), FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_default_launches_keep_to_the_register_budget(
    kv_bits: int, group_size: int, dtype: mx.Dtype
) -> None:
    for head_dim, group in itertools.product(HEAD_DIMS, (1, 3, 6, 8, 16)):
        if head_dim % group_size == 0:
            shape = DecodeShape(2 * group, 2, head_dim, dtype, kv_bits, group_size)
            launch = default_launch(shape, cores=10)
            launch.check(head_dim, shape.num_quant_groups)
            floats = launch.live_floats(head_dim, dtype.size, is_quantized=True)
            assert floats <= REGISTER_BUDGET


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 6, 7])
def test_default_launches_load_a_row_once_where_plain_ones_do(head_dim: int, group: int) -> None:
    for kv_format in ((), *FORMATS):
        shape = DecodeShape(2 * group, 2, head_dim, mx.float16, *kv_format)
        loads = 2 if (head_dim, group) == (128, 7) else 1
        assert default_launch(shape, cores=16).row_loads(group) == loads, shape


def test_partial_results_stay_small_beside_the_packed_rows() -> None:
    plain = default_launch(DecodeShape(12, 2, 128, mx.float16), cores=16).splits
    packed = default_launch(DecodeShape(12, 2, 128, mx.float16, 4), cores=16).splits
    assert packed.smallest > plain.smallest


def test_launches_are_kept_by_format() -> None:
    shapes = [DecodeShape(12, 2, 128, mx.float16, *kv_format) for kv_format in ((), *FORMATS)]
    assert len(set(map(str, shapes))) == len(shapes)
    assert DecodeShape(12, 2, 128, mx.float16, 8).row_nbytes == 144


def test_the_quantised_kernel_needs_fewer_buffers_than_metal_has() -> None:
    assert max(kernel.num_buffers for kernel in DECODE.values()) < metal.MAX_BUFFERS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"launch": DecodeLaunch(1, 4, 1, 1, SMALL_SPLITS)}, r"shared by \[8, 16, 32\] lanes"),
        ({"value_pool": mx.zeros((4, 2, 16, 256), mx.float16)}, "one format"),
    ],
    ids=["lanes", "formats"],
)
def test_what_the_kernel_does_not_take_is_refused(changes: dict[str, Any], message: str) -> None:
    case = Case(head_dim=256, lens=(5,), kv_bits=8)
    with pytest.raises(ValueError, match=message):
        case.attend(**changes)


@pytest.mark.parametrize("kv_bits", [8, 4])
def test_a_model_that_decodes_by_the_kernel_answers_as_by_gathering(
    kv_bits: int, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ours_of(tiny_model(tiny_config(num_attention_heads=4, num_key_value_heads=1)))
    make = KVPool.for_model
    monkeypatch.setattr(KVPool, "for_model", lambda *a, **k: make(*a, **k, kv_bits=kv_bits))
    random = np.random.default_rng(0)
    texts = [random.integers(0, 256, length).tolist() for length in (5, 18, 1)]
    by_path = {
        path: paged_greedy(model, texts, 6, 4, chunk=7, attention=path)
        for path in ("metal", "gather")
    }
    assert "decode_paged_quantized" in recording.reports
    for by_kernel, by_gather in zip(by_path["metal"], by_path["gather"], strict=True):
        assert by_kernel[0] == by_gather[0]
        assert np.abs(by_kernel[1] - by_gather[1]).max() < 1e-3


def test_an_engine_on_the_kernels_alone_answers_as_one_that_gathers(recording: Recording) -> None:
    """Chunks, decodes beside them, forks that copy blocks, and a prefix that is found again."""
    model = ours_of(tiny_model(tiny_config(num_attention_heads=4, num_key_value_heads=1)))
    prompts = [list(range(40, 51)), [*range(40, 49), 7], [3]]
    params = SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=4)
    answers = {}
    for path in ("metal", "gather"):
        options = EngineOptions(
            block_size=4,
            num_blocks=40,
            max_num_batched_tokens=9,
            max_num_seqs=9,
            attention=path,  # type: ignore[arg-type]
            kv_bits=8,
        )
        engine = Engine(model, None, options)
        answers[path] = run(engine, prompts[:1], params) + run(engine, prompts, params)
        assert engine.stats().prefix.num_saved_tokens > 0 and engine.stats().counts.num_copies > 0
    assert answers["metal"] == answers["gather"]
    assert any("prefill" in name and "quantized" in name for name in recording.reports)

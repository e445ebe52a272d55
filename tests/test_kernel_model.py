"""A whole model that prefills and decodes with the Metal kernels' own text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from greedy import ours_of, paged_greedy
from kernel_cases import EXECUTOR, Recording, require_compiler
from tiny_engine import run
from tiny_models import VOCAB_SIZE, tiny_config, tiny_model

from mlx_paged.blocks import Sequence
from mlx_paged.cache import KVPool, attention, step
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.options import EngineOptions
from mlx_paged.engine.params import SamplingParams
from mlx_paged.kernels import metal

require_compiler()


@pytest.fixture(scope="module")
def qwen2():
    config = tiny_config(num_attention_heads=4, num_key_value_heads=1)
    return ours_of(tiny_model(config))


@pytest.fixture(scope="module")
def sliding():
    """One layer with a window, and one without."""
    config = tiny_config(
        "llama",
        num_attention_heads=4,
        num_key_value_heads=1,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=20,
    )
    return ours_of(tiny_model(config))


@pytest.fixture
def recording() -> Iterator[Recording]:
    recording = Recording(EXECUTOR.metal_kernel)
    with metal.using(recording):
        yield recording


@pytest.fixture
def forbid_gathering(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Calling it forbids the gather path from then on."""

    def refuse(*_: Any) -> None:
        raise AssertionError("gathered on the Metal path")

    def forbid() -> None:
        for what in ("decode", "prefill"):
            monkeypatch.setattr(attention, f"gather_{what}_attention", refuse)

    return forbid


def prompts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, VOCAB_SIZE, length).tolist() for length in lengths]


@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
def test_kernels_and_gathering_generate_the_same_tokens(
    block_size: int, qwen2, recording: Recording
) -> None:
    by_path = {
        path: paged_greedy(qwen2, prompts(5, 18, 1), 6, block_size, attention=path)
        for path in ("metal", "gather")
    }
    assert "decode_paged" in recording.reports
    for by_kernel, by_gather in zip(by_path["metal"], by_path["gather"], strict=True):
        assert by_kernel[0] == by_gather[0]
        assert np.abs(by_kernel[1] - by_gather[1]).max() < 1e-4


@pytest.mark.parametrize("chunk", [1, 7, 33])
def test_chunks_of_prompts_prefilled_by_the_kernel_answer_as_gathered_ones(
    chunk: int, qwen2, recording: Recording, forbid_gathering: Callable[[], None]
) -> None:
    texts = prompts(40, 5)
    gathered = paged_greedy(qwen2, texts, 3, 16, attention="gather")
    forbid_gathering()
    for ours, theirs in zip(
        paged_greedy(qwen2, texts, 3, 16, chunk=chunk, attention="metal"), gathered, strict=True
    ):
        assert ours[0] == theirs[0]
        assert np.abs(ours[1] - theirs[1]).max() < 1e-4
    assert ("prefill" in recording.reports) == (chunk > 1)
    assert "decode_paged" in recording.reports


@pytest.mark.parametrize("chunk", [1, 7, 33])
def test_layers_with_windows_prefilled_and_decoded_by_the_kernels(
    chunk: int, sliding, recording: Recording, forbid_gathering: Callable[[], None]
) -> None:
    texts = prompts(50, 5)
    gathered = paged_greedy(sliding, texts, 3, 8, attention="gather")
    forbid_gathering()
    for ours, theirs in zip(
        paged_greedy(sliding, texts, 3, 8, chunk=chunk, attention="metal"), gathered, strict=True
    ):
        assert ours[0] == theirs[0]
        assert np.abs(ours[1] - theirs[1]).max() < 1e-4


def test_an_engine_prefills_chunks_behind_prefix_hits_by_the_kernel(
    qwen2, recording: Recording, forbid_gathering: Callable[[], None]
) -> None:
    shared = prompts(37)[0]
    rounds = [[shared], [[*shared, 5, 6, 7], [*shared[:30], 9, 9], *prompts(50)]]
    params = SamplingParams(temperature=0, max_tokens=4)
    answers = {}
    for path in ("gather", "metal"):
        if path == "metal":
            forbid_gathering()
        options = EngineOptions(
            block_size=8, num_blocks=64, max_num_seqs=8, max_num_batched_tokens=23, attention=path
        )
        engine = Engine(qwen2, None, options)
        answers[path] = [run(engine, texts, params) for texts in rounds]
        assert engine.stats().prefix.num_saved_tokens == 32 + 24 + 32
    assert {"prefill", "decode_paged"} <= set(recording.reports)
    assert answers["metal"] == answers["gather"]


@pytest.mark.parametrize("name", ["qwen2", "sliding"])
def test_one_batch_decodes_some_sequences_and_prefills_others(
    name: str, request: pytest.FixtureRequest, recording: Recording
) -> None:
    model, logits = request.getfixturevalue(name), {}
    for path in ("metal", "gather"):
        pool = KVPool.for_model(model, num_blocks=60, block_size=4)
        sequences = [Sequence(pool.blocks, prompt) for prompt in prompts(9, 140, 30)]
        step(model, pool, sequences[:2], [8, 139], attention="gather")
        logits[path] = step(model, pool, sequences, [1, 1, 30], attention=path)
    assert "merge" in recording.reports, "140 tokens take two splits"
    assert mx.allclose(logits["metal"], logits["gather"], atol=1e-4)


def test_an_engine_that_shares_forks_and_preempts_answers_alike(qwen2, recording) -> None:
    shared = prompts(9)[0]
    texts = [shared, [*shared, 3, 4], *prompts(21, 2, 30)]
    params = SamplingParams(temperature=0.8, n=2, max_tokens=8, seed=5)
    answers = {}
    for path in ("metal", "gather"):
        options = EngineOptions(block_size=4, num_blocks=32, attention=path)
        engine = Engine(qwen2, None, options)
        answers[path] = run(engine, texts, params)
        assert engine.stats().num_preemptions > 0
    assert "decode_paged" in recording.reports
    assert answers["metal"] == answers["gather"]

"""Layers that attend over windows, against mlx-lm's llama and its rotating cache."""

import mlx.core as mx
import numpy as np
import pytest
from greedy import contiguous_greedy, ours_of, paged_greedy
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from tiny_engine import make_prompts, run
from tiny_models import tiny_config, tiny_model

from mlx_paged.blocks import Sequence
from mlx_paged.cache import KVPool, step
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.options import EngineOptions
from mlx_paged.engine.params import SamplingParams
from mlx_paged.models import llama, qwen2
from mlx_paged.weights.config import read_config
from mlx_paged.weights.errors import ModelError

WINDOW = 16
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]


def sliding_config(**changes):
    defaults = {"layer_types": LAYER_TYPES, "sliding_window": WINDOW}
    return tiny_config("llama", num_hidden_layers=3, **{**defaults, **changes})


@pytest.fixture(scope="module")
def reference():
    return tiny_model(sliding_config())


@pytest.fixture(scope="module")
def ours(reference):
    return ours_of(reference)


def prompt_of(length, seed=0):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def assert_same(paged, contiguous):
    assert paged[0] == contiguous[0]
    assert np.abs(paged[1] - contiguous[1]).max() < 1e-4


def test_the_window_shows_in_the_logits(reference):
    """Or else nothing here would test it."""
    changed = tiny_model(sliding_config(sliding_window=WINDOW + 1))
    prompt = prompt_of(40)
    logits = [contiguous_greedy(model, prompt, 1)[1] for model in (reference, changed)]
    assert np.abs(logits[0] - logits[1]).max() > 0.01


@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
@pytest.mark.parametrize("length", [2, WINDOW - 1, WINDOW, WINDOW + 1, 70])
def test_prompts_around_and_beyond_the_window(length, block_size, reference, ours):
    prompt = prompt_of(length)
    expected = contiguous_greedy(reference, prompt, 20)
    assert_same(paged_greedy(ours, [prompt], 20, block_size)[0], expected)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_a_prompt_in_chunks(chunk, reference, ours):
    prompt = prompt_of(70)
    expected = contiguous_greedy(reference, prompt, 4)
    assert_same(paged_greedy(ours, [prompt], 4, 8, chunk)[0], expected)


def test_rows_of_a_batch_have_windows_of_their_own(reference, ours):
    prompts = [prompt_of(length, seed=length) for length in (5, 18, 300, 40, 33)]
    pool = KVPool.for_model(ours, num_blocks=120, block_size=4)
    sequences = [Sequence(pool.blocks, prompt) for prompt in prompts]
    step(ours, pool, sequences[:3], [4, 17, 299])
    logits = np.array(step(ours, pool, sequences, [1, 1, 1, 40, 33]))
    for row, prompt in zip(logits, prompts, strict=True):
        assert np.abs(row - contiguous_greedy(reference, prompt, 1)[1][0]).max() < 1e-4


@pytest.mark.parametrize("prefix_caching", ["hash", "radix"])
def test_an_engine_with_prefix_hits_and_chunks_answers_as_mlx_lm(prefix_caching, reference, ours):
    """A hit longer than the window: its blocks have been kept for who comes after."""
    shared = prompt_of(45)
    rounds = [[shared], [[*shared, 1, 2], [*shared[:37], 9], *make_prompts(6, max_length=60)]]
    options = EngineOptions(
        block_size=4,
        num_blocks=200,
        max_num_seqs=8,
        max_num_batched_tokens=29,
        prefix_caching=prefix_caching,
    )
    engine = Engine(ours, None, options)
    params = SamplingParams(temperature=0, max_tokens=12)
    for prompts in rounds:
        answers = run(engine, prompts, params)
        for prompt, (answer,) in zip(prompts, answers, strict=True):
            steps = generate_step(mx.array(prompt), reference, max_tokens=12)
            assert answer == [int(token_id) for token_id, _ in steps]
    assert engine.stats().prefix.num_saved_tokens >= 44 + 36


def test_qwen2_slides_in_the_layers_after_its_first_ones():
    """As a llama of mlx-lm with the same weights, whose biases of the output are zero."""
    config = sliding_config(
        attention_bias=True, layer_types=["full_attention", *["sliding_attention"] * 2]
    )
    reference = tiny_model(config)
    for layer in reference.layers:
        layer.self_attn.o_proj.bias = mx.zeros_like(layer.self_attn.o_proj.bias)
    args = {**config, "use_sliding_window": True, "max_window_layers": 1, "layer_types": None}
    model = qwen2.Model(qwen2.ModelArgs.from_dict(args))
    weights = dict(tree_flatten(reference.parameters()))
    model.load_weights([(n, a) for n, a in weights.items() if "o_proj.bias" not in n])
    prompt = prompt_of(70)
    assert_same(paged_greedy(model, [prompt], 4, 8)[0], contiguous_greedy(reference, prompt, 4))


@pytest.mark.parametrize(
    ("args_class", "changes", "windows"),
    [
        (llama, {}, [None] * 3),
        (llama, {"layer_types": LAYER_TYPES}, [8, None, 8]),
        (llama, {"layer_types": ["full_attention"] * 3}, [None] * 3),
        (qwen2, {"max_window_layers": 1}, [None] * 3),
        (qwen2, {"layer_types": LAYER_TYPES}, [None] * 3),
        (qwen2, {"use_sliding_window": True, "max_window_layers": 1}, [None, 8, 8]),
        (qwen2, {"use_sliding_window": True}, [None] * 3),
        (
            qwen2,
            {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None},
            [None] * 3,
        ),
        (qwen2, {"use_sliding_window": True, "layer_types": LAYER_TYPES}, [8, None, 8]),
    ],
    ids=str,
)
def test_which_layers_slide(args_class, changes, windows):
    config = tiny_config(num_hidden_layers=3, **{"sliding_window": 8, **changes})
    assert args_class.ModelArgs.from_dict(config).windows == windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": None}, "need a sliding_window of at least 1 token, and it is None"),
        ({"sliding_window": 0}, "need a sliding_window of at least 1 token, and it is 0"),
        ({"layer_types": LAYER_TYPES[:2]}, "layer_types has 2 entries for 3 layers"),
        ({"layer_types": ["chunked_attention"] * 3}, "or sliding_attention, and not chunked"),
        ({"layer_types": "sliding_attention"}, "layer_types is 'sliding_attention'; expected is"),
    ],
    ids=str,
)
def test_windows_that_make_no_sense_are_refused_before_weights_are_read(tmp_path, changes, message):
    from mlx_lm.utils import save_config

    save_config({**sliding_config(), **changes}, tmp_path / "config.json")
    with pytest.raises(ModelError, match=message):
        read_config(tmp_path)

"""mlx-lm's own models and loops on a paged pool."""

import mlx.core as mx
import pytest
from greedy import mlx_lms_of
from mlx_lm.generate import generate_step, stream_generate
from mlx_lm.models.cache import (
    KVCache,
    make_prompt_cache,
    trim_prompt_cache,
)
from tiny_models import tiny_config, tiny_model

from mlx_paged.blocks import OutOfBlocks
from mlx_paged.cache import KVPool, make_paged_prompt_cache

PROMPT = mx.arange(70)


def tokens(model, prompt_cache, prompt=PROMPT, **options):
    steps = generate_step(prompt, model, max_tokens=20, prompt_cache=prompt_cache, **options)
    return [token for token, _ in steps]


@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("model_type", ["qwen2", "llama", "qwen3", "phi3"])
def test_unmodified_models_say_the_same(model_type, block_size):
    changes = {"head_dim": 32} if model_type == "qwen3" else {}
    model = tiny_model(tiny_config(model_type, max_position_embeddings=512, **changes))
    pool = KVPool.for_model(model, -(-100 // block_size), block_size)
    cache = make_paged_prompt_cache(model, pool)
    assert tokens(model, cache, prefill_step_size=32) == tokens(model, make_prompt_cache(model))


def test_blocks_go_back_when_the_caches_are_dropped():
    model = tiny_model(tiny_config())
    pool = KVPool.for_model(model, 12)
    cache = make_paged_prompt_cache(model, pool)
    tokens(model, cache)
    # mlx-lm computes one token more than it returns.
    assert pool.blocks.num_free_blocks == 12 - 6
    assert cache[0].nbytes == 6 * pool.block_nbytes // 2
    del cache
    assert pool.blocks.num_free_blocks == 12


def test_trim_gives_blocks_back_and_the_next_tokens_are_right():
    model = tiny_model(tiny_config())
    pool = KVPool.for_model(model, 12)
    paged, contiguous = make_paged_prompt_cache(model, pool), make_prompt_cache(model)
    for cache in (paged, contiguous):
        tokens(model, cache)
        assert trim_prompt_cache(cache, 60) == 60
        assert cache[0].offset == cache[1].offset == 30
    assert pool.blocks.num_free_blocks == 10
    more = mx.array([5, 9, 200])
    assert tokens(model, paged, more) == tokens(model, contiguous, more)
    assert trim_prompt_cache(paged, 10_000) == 30 + 3 + 20
    assert pool.blocks.num_free_blocks == 12
    assert paged[0].empty()


def test_two_prompts_take_turns_in_one_pool():
    model = tiny_model(tiny_config())
    pool = KVPool.for_model(model, 12)
    prompts = [mx.arange(40), mx.arange(100, 160)]
    steps = [
        generate_step(
            prompt, model, max_tokens=20, prompt_cache=make_paged_prompt_cache(model, pool)
        )
        for prompt in prompts
    ]
    taken = list(zip(*steps, strict=True))
    for i, prompt in enumerate(prompts):
        assert [pair[i][0] for pair in taken] == tokens(model, None, prompt)


def test_state_is_saved_and_loaded_as_mlx_lms(tmp_path):
    model = tiny_model(tiny_config())
    pool = KVPool.for_model(model, 20)
    cache = make_paged_prompt_cache(model, pool)
    tokens(model, cache)
    saved = [c.state for c in cache]
    other = make_paged_prompt_cache(model, pool)
    for target, state in zip(other, saved, strict=True):
        target.state = state
    contiguous = make_prompt_cache(model)
    for target, state in zip(contiguous, saved, strict=True):
        target.state = state
    more = mx.array([5, 9, 200])
    expected = tokens(model, contiguous, more)
    assert tokens(model, other, more) == tokens(model, cache, more) == expected
    assert other[0].state[0].shape == (1, 2, 90 + 3 + 20 + 1 - 1, 32)


def test_a_full_pool_raises_and_says_how_many():
    model = tiny_model(tiny_config())
    cache = make_paged_prompt_cache(model, KVPool.for_model(model, 3))
    with pytest.raises(OutOfBlocks, match="5 more blocks are needed, and 3 of the pool's 3"):
        tokens(model, cache)


def test_models_with_other_caches_are_refused():
    config = tiny_config(
        "llama", layer_types=["sliding_attention", "full_attention"], sliding_window=16
    )
    model = tiny_model(config)
    with pytest.raises(ValueError, match="keeps its state in RotatingKVCache"):
        make_paged_prompt_cache(model, KVPool.for_model(model, 3))


def test_a_batch_is_refused():
    model = tiny_model(tiny_config())
    cache = make_paged_prompt_cache(model, KVPool.for_model(model, 3))
    with pytest.raises(ValueError, match="not a batch of 2"):
        model(mx.zeros((2, 4), mx.int32), cache=cache)


def test_a_pool_of_another_depth_is_refused():
    model = tiny_model(tiny_config())
    with pytest.raises(ValueError, match="2 layers and the pool 3"):
        make_paged_prompt_cache(model, KVPool(3, 2, 32, 4))


def test_the_interface_is_that_of_mlx_lms_cache():
    model = tiny_model(tiny_config())
    cache = make_paged_prompt_cache(model, KVPool.for_model(model, 3))[0]
    left_out = {"to_quantized", "merge", "from_state", "step", "keys", "values"}
    public = {name for name in (*dir(KVCache), *vars(KVCache())) if not name.startswith("_")}
    assert public - left_out <= set(dir(cache))


def test_stream_generate_on_the_demo_model(smollm2):
    model = mlx_lms_of(smollm2)
    caches = [make_prompt_cache(model), make_paged_prompt_cache(model, KVPool.for_model(model, 4))]
    texts = []
    for cache in caches:
        parts = stream_generate(
            model, smollm2.tokenizer, "The KV cache", max_tokens=12, prompt_cache=cache
        )
        texts.append("".join(part.text for part in parts))
    assert texts[0] == texts[1] != ""

"""Paging changes where K and V are stored, and not what the model says."""

import mlx.core as mx
import numpy as np
import pytest
from greedy import contiguous_greedy, mlx_lms_of, ours_of, paged_greedy
from tiny_models import tiny_config, tiny_model

BLOCK_SIZES = [1, 3, 16, 256]
PROMPTS = ["The KV cache stores", "Paged attention borrows an idea from operating systems:"]

# Half precision: our attention is computed in float32 and mlx-lm's is not, so logits differ by
# rounding. A token may differ only where mlx-lm's own two best logits are closer than this.
HALF_MARGIN = {mx.float16: 0.02, mx.bfloat16: 0.16}


def prompt_of(num_tokens, vocab_size, seed=0):
    return np.random.default_rng(seed).integers(0, vocab_size, num_tokens).tolist()


def assert_same(paged, contiguous, bound=1e-4):
    assert paged[0] == contiguous[0]
    assert np.abs(paged[1] - contiguous[1]).max() < bound


@pytest.fixture(scope="module")
def demo_pair(smollm2):
    """The demo model's prompts and mlx-lm's answers to them."""
    reference = mlx_lms_of(smollm2)
    prompts = [smollm2.tokenizer.encode(text) for text in PROMPTS]
    return prompts, [contiguous_greedy(reference, prompt, 16) for prompt in prompts]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_the_texts_prompts_on_the_demo_model(smollm2, demo_pair, block_size):
    prompts, expected = demo_pair
    for answer, reference in zip(
        paged_greedy(smollm2.model, prompts, 16, block_size), expected, strict=True
    ):
        assert_same(answer, reference, bound=1e-3)


def test_the_demo_weights_as_qwen2_say_the_same(smollm2_qwen2_path, demo_pair):
    from mlx_paged.loader import load

    prompts, expected = demo_pair
    model = load(smollm2_qwen2_path).model
    for answer, reference in zip(paged_greedy(model, prompts, 8, 16), expected, strict=True):
        assert answer[0] == reference[0][:8]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("num_tokens", ["short", "exact", "long"])
def test_prompts_around_a_block_border(block_size, num_tokens):
    """k * block - 1, k * block and k * block + 1 tokens, generated across the border."""
    reference = tiny_model(tiny_config("qwen2"))
    length = max(2, 2 * block_size) + {"short": -1, "exact": 0, "long": 1}[num_tokens]
    prompt = prompt_of(length, reference.args.vocab_size)
    expected = contiguous_greedy(reference, prompt, 6)
    assert_same(paged_greedy(ours_of(reference), [prompt], 6, block_size)[0], expected)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_a_prompt_in_chunks(chunk):
    reference = tiny_model(tiny_config("qwen2"))
    prompt = prompt_of(70, reference.args.vocab_size)
    expected = contiguous_greedy(reference, prompt, 4)
    assert_same(paged_greedy(ours_of(reference), [prompt], 4, 16, chunk)[0], expected)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (6, 2), (6, 1), (8, 1)])
def test_head_dims_and_grouped_heads(head_dim, num_heads, num_kv_heads):
    config = tiny_config(
        "qwen2",
        hidden_size=num_heads * head_dim,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        rope_theta=1000000.0,
    )
    reference = tiny_model(config)
    assert np.abs(np.array(reference.layers[0].self_attn.q_proj.bias)).max() > 0
    prompt = prompt_of(37, reference.args.vocab_size)
    expected = contiguous_greedy(reference, prompt, 5)
    assert_same(paged_greedy(ours_of(reference), [prompt], 5, 16)[0], expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        {"rope_traditional": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
def test_variants_of_the_architecture(model_type, changes):
    reference = tiny_model(tiny_config(model_type, **changes))
    prompt = prompt_of(50, reference.args.vocab_size)
    expected = contiguous_greedy(reference, prompt, 5)
    assert_same(paged_greedy(ours_of(reference), [prompt], 5, 16)[0], expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 80, "num_key_value_heads": 4},
        {"attention_bias": True, "mlp_bias": True},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 32,
            }
        },
    ],
    ids=str,
)
def test_variants_of_llama(changes):
    reference = tiny_model(tiny_config("llama", **changes))
    prompt = prompt_of(50, reference.args.vocab_size)
    expected = contiguous_greedy(reference, prompt, 5)
    assert_same(paged_greedy(ours_of(reference), [prompt], 5, 16)[0], expected)


@pytest.mark.parametrize("dtype", HALF_MARGIN, ids=str)
def test_half_precision_differs_only_at_near_ties(dtype, record_property):
    """mlx-lm's tokens are fed to both, so that one near-tie doesn't end the comparison."""
    from mlx_lm.models.cache import KVCache

    from mlx_paged.blocks import Sequence
    from mlx_paged.cache import KVPool, step

    reference = tiny_model(tiny_config("qwen2"), dtype)
    model = ours_of(reference)
    token_ids = prompt_of(150, reference.args.vocab_size)
    cache = [KVCache() for _ in reference.layers]
    pool = KVPool.for_model(model, 12)
    sequence = Sequence(pool.blocks, token_ids)
    num_different = 0
    for token_id in token_ids:
        theirs = np.array(reference(mx.array([[token_id]]), cache=cache)[0, 0].astype(mx.float32))
        ours = np.array(step(model, pool, [sequence], [1])[0].astype(mx.float32))
        second, first = np.sort(theirs)[-2:]
        if ours.argmax() != theirs.argmax():
            num_different += 1
            assert first - second < HALF_MARGIN[dtype]
    record_property("different_tokens", num_different)
    print(f"{dtype}: {num_different} of {len(token_ids)} tokens differ, all at near-ties")
    assert num_different <= len(token_ids) * 0.05


def test_rows_with_their_own_offsets_get_their_own_rope():
    """One token in each of three rows: MLX before 0.32.1 turned all but the first wrongly."""
    from mlx_paged.blocks import Sequence
    from mlx_paged.cache import KVPool, step

    reference = tiny_model(tiny_config("qwen2"))
    model = ours_of(reference)
    prompts = [prompt_of(n, reference.args.vocab_size, seed=n) for n in (3, 20, 41)]
    pool = KVPool.for_model(model, 12)
    sequences = [Sequence(pool.blocks, prompt) for prompt in prompts]
    step(model, pool, sequences, [2, 19, 40])
    logits = np.array(step(model, pool, sequences, [1, 1, 1]))
    for row, prompt in zip(logits, prompts, strict=True):
        assert np.abs(row - contiguous_greedy(reference, prompt, 1)[1][0]).max() < 1e-4

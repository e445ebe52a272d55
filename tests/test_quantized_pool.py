"""K and V in 8 or 4 bits: stored as MLX quantises, shared like any block."""

import mlx.core as mx
import numpy as np
import pytest
from greedy import ours_of
from tiny_engine import make_prompts, run
from tiny_models import tiny_config, tiny_model

from mlx_paged.blocks import Sequence
from mlx_paged.cache import (
    Batch,
    KVPool,
    SlotMapping,
    kv_format,
    make_paged_prompt_cache,
    paged_attention,
    step,
)
from mlx_paged.cli import arguments
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.options import EngineOptions
from mlx_paged.engine.params import SamplingParams
from mlx_paged.kernels.quantized import QuantizedArray

FORMATS = [(8, 32), (8, 64), (4, 32), (4, 64)]
BLOCK_SIZE = 4
HEAD_DIM = 64
# Values of up to 4, rounded when they are dequantised and when they come out.
BOUNDS = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3.2e-2}


def make_pool(bits, group_size, num_blocks=6, dtype=mx.float32):
    return KVPool(2, 3, HEAD_DIM, num_blocks, BLOCK_SIZE, dtype, bits, group_size)


def poison(pool):
    """Codes of any value, and NaN for scales and biases, in every slot."""
    for array in pool.arrays:
        is_codes = array.dtype == mx.uint32
        array[:] = mx.full(array.shape, 2**32 - 1 if is_codes else mx.nan, array.dtype)
    mx.eval(pool.arrays)


def dequantized(codes, scales, biases, bits):
    """By hand, in float64: the first element of a word is in its lowest bits."""
    codes = np.array(codes)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    values = (codes[..., None] >> shifts & (2**bits - 1)).reshape(*codes.shape[:-1], -1)
    scales, biases = (np.array(a.astype(mx.float32)).astype(np.float64) for a in (scales, biases))
    group = values.shape[-1] // scales.shape[-1]
    return np.repeat(scales, group, -1) * values + np.repeat(biases, group, -1)


def contents(pool):
    return [np.array(array) for array in pool.arrays]


@pytest.mark.parametrize(("bits", "group_size"), FORMATS)
@pytest.mark.parametrize("slots", [[13], [5, 22, 0, 23]])
def test_a_row_is_stored_as_mlx_quantises_it_and_no_other_slot_changes(bits, group_size, slots):
    pool = make_pool(bits, group_size)
    poison(pool)
    expected = contents(pool)
    keys, values = (mx.random.normal((len(slots), 3, HEAD_DIM)) for _ in range(2))
    pool.write(1, keys, values, SlotMapping(slots, BLOCK_SIZE))
    for first, rows in ((3, keys), (9, values)):  # after 3 arrays a layer, and 2 layers of K
        for part, new in enumerate(mx.quantize(rows, group_size=group_size, bits=bits)):
            for i, slot in enumerate(slots):
                expected[first + part][slot // 4, :, slot % 4] = np.array(new)[i]
    for array, wanted in zip(contents(pool), expected, strict=True):
        np.testing.assert_array_equal(array, wanted)


@pytest.mark.parametrize(("bits", "group_size"), FORMATS)
def test_reading_blocks_dequantises_them(bits, group_size):
    pool = make_pool(bits, group_size)
    rows = mx.random.normal((24, 3, HEAD_DIM))
    pool.write(0, rows, rows, SlotMapping(range(24), BLOCK_SIZE))
    keys = pool.keys[0]
    assert isinstance(keys, QuantizedArray)
    assert (keys.shape, keys.dtype, keys.group_size) == ((6, 3, 4, 64), mx.float32, group_size)
    read = np.array(keys[mx.array([4, 1])])
    by_hand = dequantized(*keys.parts, bits)
    np.testing.assert_allclose(read, by_hand[[4, 1]], rtol=0, atol=1e-6)
    wanted = np.array(rows).reshape(6, 4, 3, HEAD_DIM).swapaxes(1, 2)
    half_a_step = 0.5 * np.ptp(wanted.reshape(6, 3, 4, -1, group_size), axis=-1) / (2**bits - 1)
    error = np.abs(by_hand - wanted).reshape(6, 3, 4, -1, group_size).max(axis=-1)
    # MLX moves a group's range so that 0 is among its values, at most by half a step.
    assert (error <= 2.1 * half_a_step).all()


def test_copied_blocks_equal_their_sources_even_where_a_source_is_overwritten():
    pool = make_pool(4, 32)
    rows = mx.random.normal((24, 3, HEAD_DIM))
    for layer in range(2):
        pool.write(layer, rows + layer, rows - layer, SlotMapping(range(24), BLOCK_SIZE))
    expected = contents(pool)
    for array in expected:
        array[[1, 4, 5]] = array[[0, 1, 0]]
    pool.copy_blocks([(0, 1), (1, 4), (0, 5)])
    for array, wanted in zip(contents(pool), expected, strict=True):
        np.testing.assert_array_equal(array, wanted)


def test_rolling_back_forgets_writes_that_were_never_evaluated():
    pool = make_pool(8, 32)
    expected = contents(pool)
    before = pool.checkpoint()
    for slots in ([1, 2], [7]):
        rows = mx.ones((len(slots), 3, HEAD_DIM))
        pool.write(1, rows, rows, SlotMapping(slots, BLOCK_SIZE))
    pool.roll_back(before)
    for array, wanted in zip(contents(pool), expected, strict=True):
        np.testing.assert_array_equal(array, wanted)


@pytest.mark.parametrize(
    ("bits", "group_size", "share"),
    [(8, 32, 0.5625), (8, 64, 0.53125), (4, 32, 0.3125), (4, 64, 0.28125)],
)
def test_bytes_against_float16_at_head_dim_128(bits, group_size, share):
    shape = (28, 2, 128, 3, 16, mx.float16)
    pool, plain = KVPool(*shape, bits, group_size), KVPool(*shape)
    assert pool.nbytes == share * plain.nbytes == sum(array.nbytes for array in pool.arrays)


@pytest.mark.parametrize(
    ("head_dim", "bits", "group_size", "message"),
    [
        (80, 8, 32, "heads of 80 elements don't divide into groups of 32; use no kv_bits"),
        (96, 4, 64, "heads of 96 elements don't divide into groups of 64; use kv_group_size 32"),
        (64, 3, 32, "kv_bits is 8 or 4, or None for the model's own precision, not 3"),
        (64, 8, 16, "kv_group_size is 32 or 64, not 16"),
    ],
)
def test_what_cannot_be_quantised_is_refused(head_dim, bits, group_size, message):
    with pytest.raises(ValueError, match=message):
        KVPool(1, 1, head_dim, 2, 16, mx.float16, bits, group_size)


def test_the_command_line_offers_what_there_is():
    assert arguments.KV_BITS == kv_format.KV_BITS
    assert arguments.KV_GROUP_SIZES == kv_format.KV_GROUP_SIZES


def test_the_engines_options_are_checked_before_a_model_is_loaded():
    with pytest.raises(ValueError, match="kv_bits is 8 or 4"):
        EngineOptions(kv_bits=2)


@pytest.mark.parametrize(("bits", "group_size"), FORMATS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 21])
def test_gathered_attention_is_that_over_the_dequantised_rows(bits, group_size, window, dtype):
    """Decode rows and prefill rows, in shuffled blocks of a pool that is NaN elsewhere."""
    rows = [(0, 1), (3, 1), (299, 1), (130, 1), (0, 30), (20, 7)]
    rng = np.random.default_rng(0)
    num_blocks = sum(-(-(cached + new) // BLOCK_SIZE) for cached, new in rows) + 2
    pool = make_pool(bits, group_size, num_blocks, dtype)
    poison(pool)
    free, specs, expected, queries = list(rng.permutation(num_blocks)), [], [], []
    for cached, new in rows:
        count = cached + new
        table = [int(free.pop()) for _ in range(-(-count // BLOCK_SIZE))]
        slots = [table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(count)]
        keys, values = (mx.random.normal((count, 3, HEAD_DIM)).astype(dtype) for _ in range(2))
        pool.write(0, keys, values, SlotMapping(slots, BLOCK_SIZE))
        stored = [
            dequantized(*mx.quantize(a, group_size=group_size, bits=bits), bits)
            for a in (keys, values)
        ]
        queries.append(mx.random.normal((new, 6, HEAD_DIM)).astype(dtype))
        expected.append(attention(queries[-1], *stored, cached, window))
        specs.append((table, cached, new))
    batch = Batch.of(specs, BLOCK_SIZE)
    pools = pool.keys[0], pool.values[0]
    queries = mx.concatenate(queries)
    output = paged_attention(queries, *pools, batch, HEAD_DIM**-0.5, "gather", window)
    error = np.abs(np.array(output.astype(mx.float32)) - np.concatenate(expected))
    assert error.max() < BOUNDS[dtype]


def attention(queries, keys, values, num_cached, window):
    """Causal, in float64."""
    queries = np.array(queries.astype(mx.float32)).astype(np.float64)
    output = np.empty_like(queries)
    for i, head in np.ndindex(queries.shape[:2]):
        stop, kv_head = num_cached + i + 1, head // (queries.shape[1] // keys.shape[1])
        seen = slice(max(0, stop - (window or stop)), stop)
        scores = keys[seen, kv_head] @ queries[i, head] / np.sqrt(HEAD_DIM)
        weights = np.exp(scores - scores.max())
        output[i, head] = weights @ values[seen, kv_head] / weights.sum()
    return output


@pytest.fixture(scope="module")
def model():
    return ours_of(tiny_model(tiny_config()))


def make_engine(model, **options):
    defaults = {"block_size": BLOCK_SIZE, "num_blocks": 400, "max_num_batched_tokens": 64}
    return Engine(model, None, EngineOptions(**{**defaults, "max_num_seqs": 32, **options}))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_caching": "radix"},
        {"num_blocks": 50, "preemption": "recompute"},
        {"num_blocks": 50, "preemption": "swap", "prefix_caching": "radix"},
    ],
    ids=str,
)
def test_sixteen_prompts_answer_as_each_alone_in_the_same_pool(model, bits, options):
    """With prefix hits, forks that copy blocks and, in a small pool, preemption."""
    prompts = make_prompts(12, max_length=20)
    prompts += [[*range(30, 43), i] for i in range(4)]  # alike for three blocks
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=10, n=2 if i % 3 == 0 else 1)
        for i in range(16)
    ]
    alone = make_engine(model, kv_bits=bits)
    expected = [run(alone, [p], [s])[0] for p, s in zip(prompts, params, strict=True)]
    engine = make_engine(model, kv_bits=bits, **options)
    assert run(engine, prompts[12:13], params[12:13]) == expected[12:13]
    assert run(engine, prompts, params) == expected
    stats = engine.stats()
    assert stats.prefix.num_saved_tokens > 0 and stats.counts.num_copies > 0
    assert (stats.num_preemptions > 0) == ("num_blocks" in options)


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_in_batches_of_as_many_rows_no_bit_of_a_row_depends_on_the_others(model, bits):
    """Batches of other sizes may give other last bits: BLAS chooses its kernels by the shape."""
    prompts = [prompt * 3 for prompt in make_prompts(6, max_length=60, seed=7)]
    num_rows = len(prompts)

    def logits(rows):
        """A decode step's, of those prompts; the other rows hold one token."""
        pool = KVPool.for_model(model, 200, BLOCK_SIZE, kv_bits=bits)
        sequences = [
            Sequence(pool.blocks, prompts[i] if i in rows else [0]) for i in range(num_rows)
        ]
        for i in rows:
            step(model, pool, [sequences[i]], [len(prompts[i]) - 1])
        return np.array(step(model, pool, sequences, [1] * num_rows))

    together = logits(range(num_rows))
    for row in range(num_rows):
        np.testing.assert_array_equal(logits([row])[row], together[row])


def test_eight_bits_change_logits_little_and_four_bits_more(model):
    prompt = make_prompts(1, max_length=200, seed=3)[0]

    def logits(**options):
        pool = KVPool.for_model(model, 60, BLOCK_SIZE, **options)
        sequence = Sequence(pool.blocks, prompt)
        while sequence.num_cached_tokens < len(prompt) - 1:
            left = len(prompt) - 1 - sequence.num_cached_tokens
            step(model, pool, [sequence], [min(7, left)])
        return np.array(step(model, pool, [sequence], [1])[0])

    plain = logits()
    errors = [np.abs(logits(kv_bits=bits) - plain).max() / plain.std() for bits in (8, 4)]
    assert 0 < 5 * errors[0] < errors[1]
    assert errors[0] < 0.1


def test_prefixes_are_found_only_by_prompts_of_one_format(model):
    formats = [{}, {"kv_bits": 8}, {"kv_bits": 4}, {"kv_bits": 4, "kv_group_size": 64}]
    formats = [EngineOptions(**options).kv_format(mx.float32) for options in formats]
    assert len(set(map(str, formats))) == 4
    roots = {
        make_engine(model, kv_bits=bits).prefix_cache.index.chain().root for bits in (None, 8, 4)
    }
    assert len(roots) == 3


def test_mlx_lms_own_model_runs_on_a_quantised_pool():
    """mlx-lm's quantised cache holds the same codes: its logits differ by rounding alone."""
    from mlx_lm.models.cache import QuantizedKVCache

    reference = tiny_model(tiny_config(head_dim=32))
    pool = KVPool.for_model(reference, 20, 16, kv_bits=8, kv_group_size=32)
    ours = make_paged_prompt_cache(reference, pool)
    theirs = [QuantizedKVCache(group_size=32, bits=8) for _ in reference.layers]
    prompt = mx.array([make_prompts(1, max_length=99, seed=5)[0]])
    logits = [np.array(reference(prompt, cache=cache)) for cache in (ours, theirs)]
    np.testing.assert_allclose(*logits, atol=2e-4 * np.abs(logits[1]).max())

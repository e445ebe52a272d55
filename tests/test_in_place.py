"""Writing to the pool does not copy it: extra peak memory stays below a tenth of a pool."""

import mlx.core as mx
import pytest
from greedy import ours_of
from mlx_lm.generate import generate_step
from tiny_models import tiny_config, tiny_model

from mlx_paged.blocks import Sequence
from mlx_paged.cache import KVPool, make_paged_prompt_cache, step

NUM_BLOCKS = 4096  # 32 MiB, so that a tenth is far more than a step's activations


def extra_peak_pools(pool, run):
    """Peak memory of a run above what was in use before it, in pools."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    mx.synchronize()
    return (mx.get_peak_memory() - before) / pool.nbytes


@pytest.mark.parametrize("kv_bits", [None, 8, 4])
def test_fifty_steps_with_prefill_chunks_and_copies_on_write(kv_bits):
    model = ours_of(tiny_model(tiny_config("qwen2")))
    pool = KVPool.for_model(model, NUM_BLOCKS * 16 // (kv_bits or 16), kv_bits=kv_bits)

    def run():
        sequences = [Sequence(pool.blocks, range(100))]
        step(model, pool, sequences, [25])
        num_copies = 0
        for index in range(50):
            if index % 10 == 3:
                sequences.append(sequences[0].fork())
            chunks = [1] * len(sequences)
            if index % 10 == 5:  # a chunk of another prompt in the same pass
                sequences.append(Sequence(pool.blocks, range(20)))
                chunks.append(20)
            num_copies += sum(s.pool.is_shared(s.block_table[-1]) for s in sequences[:-1])
            step(model, pool, sequences, chunks)
            for sequence, chunk in zip(sequences, chunks, strict=True):
                sequence.token_ids.append(chunk)
        assert num_copies >= 5

    assert extra_peak_pools(pool, run) < 0.1


@pytest.mark.parametrize("kv_bits", [None, 4])
def test_copying_blocks_takes_memory_for_the_blocks_alone(kv_bits):
    pool = KVPool(2, 2, 32, NUM_BLOCKS, 16, mx.float32, kv_bits)
    assert extra_peak_pools(pool, lambda: pool.copy_blocks([(0, 1), (2, 3)])) < 0.1


def test_mlx_lms_loop_one_step_ahead():
    """Its loop dispatches a step before the last one ended, which the drop-in waits for."""
    model = tiny_model(tiny_config("qwen2"))
    pool = KVPool.for_model(model, NUM_BLOCKS)
    cache = make_paged_prompt_cache(model, pool)

    def run():
        for _ in generate_step(
            mx.arange(90), model, max_tokens=50, prompt_cache=cache, prefill_step_size=32
        ):
            pass

    assert extra_peak_pools(pool, run) < 0.1


def test_a_held_slice_is_what_these_tests_would_notice():
    pool = KVPool(2, 2, 32, NUM_BLOCKS, 16, mx.float32)

    def run():
        held = [array[:] for array in pool.keys]
        pool.copy_blocks([(0, 1)])
        mx.eval(pool.keys, held)

    assert extra_peak_pools(pool, run) > 0.4

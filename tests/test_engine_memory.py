"""The pool's size follows from memory, and writes to it stay in place."""

import gc

import mlx.core as mx
import pytest
from greedy import ours_of
from tiny_engine import CONFIG, make_prompts, paged_model, run
from tiny_models import tiny_config, tiny_model

from mlx_paged.cache.kv_format import BlockShape
from mlx_paged.engine import pool_size
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.options import EngineOptions
from mlx_paged.engine.params import SamplingParams
from mlx_paged.engine.pool_size import GIB, MIB, num_pool_blocks
from mlx_paged.memory import MemoryLimit

BLOCK = BlockShape(num_elements=2 * 16 * 64, nbytes=MIB)


@pytest.mark.parametrize("kv_bits", [None, 8])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_mixed_steps_write_the_pool_in_place(preemption, kv_bits):
    """Prefill chunks, decodes, forks with copies, a preemption, graphs built ahead and dropped."""
    options = EngineOptions(
        block_size=16,
        num_blocks=24_000,
        max_num_seqs=16,
        max_num_batched_tokens=32,
        preemption=preemption,
        prefix_caching="radix",
        kv_bits=kv_bits,
    )
    model = ours_of(tiny_model(tiny_config())) if kv_bits else paged_model()  # heads of 32, of 16
    engine = Engine(model, None, options)
    engine.pool.blocks.allocate(24_000 - 30)
    assert engine.pool.nbytes > 110 * MIB
    prompts = make_prompts(6, max_length=90)
    prompts.append([*prompts[0][:70], 1, 2, 3])
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    params = SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=40, stop_token_ids=[17, 99])
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    while engine.has_work():
        engine.step()
    counts = engine.stats().counts
    assert counts.num_steps > 50
    assert counts.num_graphs_dropped > 0 and engine.stats().num_preemptions > 0
    assert mx.get_peak_memory() - before < 0.1 * engine.pool.nbytes


def test_memory_does_not_grow_with_the_steps():
    """Nothing lazy is carried from step to step, where it would pile up unevaluated."""
    engine = Engine(paged_model(), None, EngineOptions(block_size=16, num_blocks=64))
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=60, logprobs=1)
    active = []
    for _ in range(4):
        run(engine, make_prompts(3), params)
        gc.collect()
        active.append(mx.get_active_memory())
    assert active[3] <= active[0] + 1024


def test_a_dropped_graph_leaves_the_pool_as_it_was():
    engine = Engine(paged_model(), None, EngineOptions(block_size=4, num_blocks=32))
    engine.add_request("0", [1, 2, 3], SamplingParams(temperature=0, max_tokens=9))
    engine.step()
    mx.eval(engine.pool.keys)
    before = [mx.array(array) for array in engine.pool.keys]
    mx.eval(before)
    step = engine._in_flight
    engine._in_flight = None
    ahead = engine._build_ahead(step)
    assert ahead is not None
    engine.runner.drop()
    after = engine.pool.keys
    assert all(mx.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_gpus_pool_is_what_weights_and_activations_leave_of_its_working_set():
    limit = MemoryLimit(16 * GIB, "a test")
    options = EngineOptions(memory_fraction=0.75)
    found = num_pool_blocks(options, BLOCK, 4 * GIB, lambda: GIB, limit)
    assert found == 7 * 1024


def test_no_room_is_an_error_with_the_numbers():
    limit = MemoryLimit(8 * GIB, "a test")
    with pytest.raises(ValueError, match=r"90% of 8.00 GiB .* 7.00 GiB of weights .* 0.50 GiB"):
        num_pool_blocks(EngineOptions(), BLOCK, 7 * GIB, lambda: GIB // 2, limit)


def test_a_cpu_gets_the_stated_default(monkeypatch):
    monkeypatch.setattr(pool_size, "CPU_KV_MEMORY", 3 * MIB)

    def unwanted():
        raise AssertionError("activations are not measured for a fixed size")

    assert num_pool_blocks(EngineOptions(), BLOCK, GIB, unwanted) == 3


def test_blocks_or_bytes_can_be_given_instead():
    def blocks(**options):
        return num_pool_blocks(EngineOptions(**options), BLOCK, GIB, lambda: 0)

    assert blocks(num_blocks=7) == 7
    assert blocks(kv_memory=5 * MIB + 1) == 5
    with pytest.raises(ValueError, match=r"0.5 MiB has no room for a block of 1.0 MiB"):
        blocks(kv_memory=MIB // 2)
    with pytest.raises(ValueError, match="at least 1 block, not 0"):
        blocks(num_blocks=0)
    with pytest.raises(ValueError, match="not both"):
        blocks(num_blocks=1, kv_memory=MIB)


def test_one_layers_array_stays_below_two_to_the_31_elements():
    huge = BlockShape(num_elements=2**20, nbytes=2**22)
    found = num_pool_blocks(EngineOptions(kv_memory=2**40), huge, 0, lambda: 0)
    assert found * huge.num_elements < 2**31


def test_activations_are_measured_with_the_largest_step(monkeypatch):
    """On a machine that says how much it has, the pool follows from a trial step."""
    limit = MemoryLimit(64 * MIB, "a test")
    monkeypatch.setattr(pool_size, "memory_limit", lambda: limit)
    monkeypatch.setattr(pool_size, "has_gpu", lambda: True)
    small = pool_size.make_pool(paged_model(), EngineOptions(max_num_batched_tokens=256))
    large = pool_size.make_pool(paged_model(), EngineOptions(max_num_batched_tokens=1024))
    assert 0 < large.num_blocks < small.num_blocks
    assert small.nbytes < 0.9 * limit.nbytes


def test_the_whole_recommended_working_set_is_wired(monkeypatch):
    seen = []
    info = {"max_recommended_working_set_size": 12 * GIB}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "set_wired_limit", seen.append)
    pool_size.set_wired_limit()
    assert seen == [12 * GIB]


def test_stats_tell_blocks_and_slots():
    engine = Engine(paged_model(), None, EngineOptions(block_size=16, num_blocks=64))
    engine.add_request("0", list(range(20)), SamplingParams(temperature=0, max_tokens=30, n=2))
    engine.step()
    engine.step()
    stats = engine.stats()
    # A full block for both, and each its own second one with 5 or 6 tokens.
    assert stats.num_blocks_used == 3
    assert 0.5 < stats.slot_share < 0.65
    assert stats.pool_nbytes == 64 * 16 * 2 * 2 * 2 * (CONFIG["hidden_size"] // 4) * 4
    run(engine, [])
    assert engine.stats().num_blocks_used == 0
    assert engine.stats().num_blocks_cached > 0

"""What the engine costs on the host: one step, one sequence's blocks, one prompt's admission.

No model runs: a stand-in returns logits at once, and the time that MLX takes to dispatch and
wait is taken off. What is left is scheduling, the batch's arrays, the sampler's, and what is
done with the drawn tokens. Every figure is a median.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_paged.blocks import BlockPool, Sequence
from mlx_paged.blocks.prefix import HashIndex
from mlx_paged.blocks.prefix_cache import PrefixCache
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.options import EngineOptions
from mlx_paged.engine.params import SamplingParams
from mlx_paged.models import qwen2

BLOCK_SIZE = 16
VOCAB_SIZE = 1000


class StandIn(nn.Module):
    """Reads of a batch what a model reads, and returns logits of zeros."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.args = model.args

    def __call__(self, tokens: mx.array, cache: Any, rows: mx.array) -> mx.array:
        _ = cache.positions, cache.batch.slot_mapping.rows(1), cache.batch.block_tables
        _ = cache.batch.context_lens
        return mx.zeros((rows.size, VOCAB_SIZE))


class Stopwatch:
    """Adds up the time spent in a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.seconds = 0.0

    def __call__(self, *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return self.function(*args)
        finally:
            self.seconds += time.perf_counter() - start


def make_engine(num_seqs: int, num_blocks: int) -> Engine:
    args = qwen2.ModelArgs(
        model_type="qwen2",
        hidden_size=16,
        num_hidden_layers=1,
        intermediate_size=16,
        num_attention_heads=1,
        num_key_value_heads=1,
        rms_norm_eps=1e-6,
        vocab_size=VOCAB_SIZE,
    )
    options = EngineOptions(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=2**20,
    )
    engine = Engine(qwen2.Model(args), None, options)
    engine.runner.model = StandIn(engine.model)
    return engine


def make_prompts(num_prompts: int, num_tokens: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)] for _ in range(num_prompts)]


def step_ms(num_seqs: int, num_tokens: int, num_steps: int, temperature: float) -> float:
    """Host time of a step that decodes `num_seqs` sequences of about `num_tokens` tokens."""
    num_blocks = num_seqs * (-(-(num_tokens + num_steps) // BLOCK_SIZE) + 2)
    engine = make_engine(num_seqs, num_blocks)
    # Lengths that differ, so that about as many sequences need a block in every step.
    for i, prompt in enumerate(make_prompts(num_seqs, num_tokens)):
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=num_steps + 10)
        engine.add_request(str(i), prompt[: num_tokens - i % BLOCK_SIZE], params)
    engine.step()
    engine.step()
    waits = [Stopwatch(engine.runner.wait), Stopwatch(engine.runner.dispatch)]
    engine.runner.wait, engine.runner.dispatch = waits
    times = []
    for _ in range(num_steps):
        before = sum(watch.seconds for watch in waits)
        start = time.perf_counter()
        engine.step()
        elapsed = time.perf_counter() - start
        times.append(elapsed - sum(watch.seconds for watch in waits) + before)
    return statistics.median(times) * 1e3


def allocator_us(num_seqs: int, num_tokens: int, num_steps: int) -> float:
    """Reserve a slot, count a token and name a block when it is full, per sequence and step."""
    pool = BlockPool(num_seqs * ((num_tokens + num_steps) // BLOCK_SIZE + 2), BLOCK_SIZE)
    cache = PrefixCache(pool, HashIndex(BLOCK_SIZE))
    rows = []
    for i, prompt in enumerate(make_prompts(num_seqs, num_tokens)):
        sequence, chain = Sequence(pool, prompt[: num_tokens - i % BLOCK_SIZE]), cache.index.chain()
        sequence.reserve(sequence.num_tokens)
        sequence.num_cached_tokens = sequence.num_tokens
        cache.publish(sequence, chain)
        rows.append((sequence, chain))
    times = []
    for _ in range(num_steps):
        for sequence, _ in rows:
            sequence.token_ids.append(1)
        start = time.perf_counter()
        for sequence, chain in rows:
            sequence.reserve(1)
            sequence.num_cached_tokens += 1
            if sequence.num_cached_tokens >= (chain.num_published + 1) * BLOCK_SIZE:
                cache.publish(sequence, chain)
        times.append(time.perf_counter() - start)
    return statistics.median(times) / num_seqs * 1e6


def admit_mtokens_per_s(num_prompts: int, num_tokens: int) -> float:
    """Look up, reserve and, as if computed, name every block of new prompts."""
    pool = BlockPool(num_prompts * (num_tokens // BLOCK_SIZE + 1), BLOCK_SIZE)
    cache = PrefixCache(pool, HashIndex(BLOCK_SIZE))
    times = []
    for prompt in make_prompts(num_prompts, num_tokens):
        start = time.perf_counter()
        sequence, chain = Sequence(pool, prompt), cache.index.chain()
        cache.attach(sequence, chain, cache.lookup(sequence, chain))
        sequence.reserve(sequence.num_tokens - sequence.num_cached_tokens)
        sequence.num_cached_tokens = sequence.num_tokens
        cache.publish(sequence, chain)
        times.append(time.perf_counter() - start)
    return num_tokens / statistics.median(times) / 1e6


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqs", type=int, default=256, help="running sequences")
    parser.add_argument("--tokens", type=int, default=1024, help="of each sequence")
    parser.add_argument("--steps", type=int, default=200, help="to take the median of")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    result = {
        "num_seqs": args.seqs,
        "step_ms": step_ms(args.seqs, args.tokens, args.steps, temperature=0),
        "random_step_ms": step_ms(args.seqs, args.tokens, args.steps, temperature=1),
        "allocator_us_per_sequence": allocator_us(args.seqs, args.tokens, args.steps),
        "admit_mtokens_per_s": admit_mtokens_per_s(args.steps, args.tokens),
    }
    if args.json:
        print(json.dumps(result))
        return
    print(f"{args.seqs} running sequences of {args.tokens} tokens, blocks of {BLOCK_SIZE}")
    print(f"a step on the host: {result['step_ms']:.2f} ms taking the likeliest tokens, ")
    print(f"  {result['random_step_ms']:.2f} ms drawing each with its own seed")
    print(f"blocks of one sequence in a step: {result['allocator_us_per_sequence']:.2f} us")
    print(f"admission with hashing: {result['admit_mtokens_per_s']:.1f} M tokens/s")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, RuntimeError) as error:
        sys.exit(f"overhead.py: {error}")

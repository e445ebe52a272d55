"""This engine and mlx-lm side by side: the same weights, prompts and numbers of tokens.

Runs alternate. Times leave out loading and making the pool; memory is what a run takes beyond
the weights, the whole pool included. `ratio` is mlx-lm's time over ours, so more is better.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx_lm.generate import batch_generate, generate_step
from same import mlx_lm_model

from mlx_paged.engine.engine import Engine
from mlx_paged.engine.options import EngineOptions
from mlx_paged.engine.params import SamplingParams
from mlx_paged.loader import DTYPES, Loaded, load

DATA = Path(__file__).resolve().parents[2] / "shared/data"
MIB = 2**20

# Tokens of 16 short prompts, as chats begin with.
SHORT_LENGTHS = [21, 32, 48, 26, 49, 25, 60, 90, 120, 35, 75, 150, 28, 40, 200, 110]
LONG_LENGTH = 4000
SHARED_LENGTH = 1500


def random_tokens(loaded: Loaded, num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(loaded.model.args.vocab_size) for _ in range(num_tokens)]


def short_prompts(loaded: Loaded) -> list[list[int]]:
    """Sixteen real prompts where the data folder is, else random tokens of such lengths."""
    file = DATA / "prompts/sharegpt_prompts_100.jsonl"
    if not file.exists():
        return [random_tokens(loaded, n, seed) for seed, n in enumerate(SHORT_LENGTHS)]
    texts = [json.loads(line)["prompt"] for line in file.read_text().splitlines()[:16]]
    return [list(loaded.tokenizer.encode(text)) for text in texts]


def long_prompt(loaded: Loaded, num_tokens: int) -> list[int]:
    file = DATA / "longdocs/sherlock_scandal_8k.txt"
    if not file.exists():
        return random_tokens(loaded, num_tokens, seed=99)
    return list(loaded.tokenizer.encode(file.read_text()[: 6 * num_tokens]))[:num_tokens]


def workload(name: str, loaded: Loaded, long_length: int) -> list[list[int]]:
    short = short_prompts(loaded)
    if name == "single":
        return [short[0]]
    if name == "batch":
        return short
    if name == "long":
        return [long_prompt(loaded, long_length)]
    if name == "mixed":
        return [long_prompt(loaded, long_length), *short[1:]]
    shared = long_prompt(loaded, SHARED_LENGTH)
    return [shared + prompt[:24] for prompt in short]


def run_mlx_lm(model: Any, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy: mlx-lm's stream for one prompt, its batches for several. No end token ends it."""
    if len(prompts) == 1:
        steps = generate_step(mx.array(prompts[0]), model, max_tokens=num_tokens)
        return [[int(token_id) for token_id, _ in steps]]
    tokenizer = SimpleNamespace(eos_token_ids=set(), decode=lambda token_ids: "")
    response = batch_generate(
        model, tokenizer, prompts, max_tokens=num_tokens, return_token_ids=True
    )
    return response.token_ids


def make_engine(
    loaded: Loaded, prompts: list[list[int]], num_tokens: int, block_size: int
) -> Engine:
    """An engine whose pool just holds all prompts and answers, nothing shared.

    For a single prompt it holds 4,096 tokens, so that a copy of it would be noticed.
    """
    num_blocks = sum(-(-(len(prompt) + num_tokens) // block_size) + 1 for prompt in prompts)
    if len(prompts) == 1:
        num_blocks = max(num_blocks, 4096 // block_size)
    options = EngineOptions(block_size=block_size, num_blocks=num_blocks)
    return Engine(loaded.model, None, options, loaded.dtype)


def run_ours(engine: Engine, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    requests = [engine.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    while engine.has_work():
        engine.step()
    return [request.samples[0].output_token_ids for request in requests]


def measure(run: Callable[[], list[list[int]]], nbytes_before: int) -> dict[str, Any]:
    """Seconds, tokens, and peak bytes beyond `nbytes_before`."""
    gc.collect()
    mx.clear_cache()
    mx.synchronize()
    mx.reset_peak_memory()
    active = mx.get_active_memory()
    start = time.perf_counter()
    tokens = run()
    seconds = time.perf_counter() - start
    peak = mx.get_peak_memory()
    return {
        "seconds": seconds,
        "tokens": tokens,
        "peak_bytes": peak - nbytes_before,
        "extra_bytes": peak - active,
    }


def compare(loaded: Loaded, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    reference = mlx_lm_model(loaded)
    mx.synchronize()
    weights = mx.get_active_memory()
    ours, theirs = [], []
    for _ in range(args.rounds):
        if not args.skip_mlx_lm:
            theirs.append(measure(lambda: run_mlx_lm(reference, prompts, args.tokens), weights))
        engine = make_engine(loaded, prompts, args.tokens, args.block_size)
        ours.append(measure(lambda engine=engine: run_ours(engine, prompts, args.tokens), weights))
        pool_nbytes, stats = engine.pool.nbytes, engine.stats()
        del engine
    result = {
        "num_prompts": len(prompts),
        "num_prompt_tokens": sum(len(prompt) for prompt in prompts),
        "seconds": statistics.median(run["seconds"] for run in ours),
        "tokens_per_s": len(prompts) * args.tokens / statistics.median(r["seconds"] for r in ours),
        "peak_bytes": max(run["peak_bytes"] for run in ours),
        "pool_bytes": pool_nbytes,
        "extra_peak_pools": max(run["extra_bytes"] for run in ours) / pool_nbytes,
        "num_saved_tokens": stats.prefix.num_saved_tokens,
    }
    if theirs:
        same = [a == b for a, b in zip(ours[0]["tokens"], theirs[0]["tokens"], strict=True)]
        result |= {
            "mlx_lm_seconds": statistics.median(run["seconds"] for run in theirs),
            "mlx_lm_peak_bytes": max(run["peak_bytes"] for run in theirs),
            "ratio": statistics.median(
                b["seconds"] / a["seconds"] for a, b in zip(ours, theirs, strict=True)
            ),
            "num_same": sum(same),
        }
    return result


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workload",
        choices=("single", "long", "batch", "mixed", "shared-prefix"),
        default="batch",
        help="one prompt, one long prompt, 16 prompts, a long one among 15 short ones, or 16 that "
        f"share {SHARED_LENGTH} tokens",
    )
    parser.add_argument("--model", default="smollm2", help="smollm2, a folder or a hub id")
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and cache")
    parser.add_argument("--block-size", type=int, default=16, metavar="TOKENS", help="1 to 256")
    parser.add_argument("--tokens", type=int, help="of each answer; 64, or 32 with a long prompt")
    parser.add_argument("--long", type=int, default=LONG_LENGTH, help="tokens of the long prompt")
    parser.add_argument("--rounds", type=int, default=1, help="of each side, alternating")
    parser.add_argument("--skip-mlx-lm", action="store_true", help="our side only")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    args.tokens = args.tokens or (64 if args.workload in ("single", "batch") else 32)
    return args


def main() -> None:
    args = parse_arguments()
    loaded = load(args.model, args.dtype)
    prompts = workload(args.workload, loaded, args.long)
    result = {"model": loaded.description, "workload": args.workload, "num_tokens": args.tokens}
    result |= compare(loaded, prompts, args)
    print(json.dumps(result)) if args.json else print_report(result)


def print_report(result: dict[str, Any]) -> None:
    print(
        f"{result['workload']}: {result['num_prompts']} prompts of {result['num_prompt_tokens']} "
        f"tokens in all, {result['num_tokens']} new ones each"
    )
    print(
        f"mlx-paged {result['seconds']:8.2f} s, peak {result['peak_bytes'] / MIB:7.0f} MiB beyond "
        f"the weights, of which the pool is {result['pool_bytes'] / MIB:.0f}"
    )
    if "ratio" in result:
        print(
            f"mlx-lm    {result['mlx_lm_seconds']:8.2f} s, peak "
            f"{result['mlx_lm_peak_bytes'] / MIB:7.0f} MiB beyond the weights"
        )
        print(
            f"ratio {result['ratio']:.2f}; the same tokens for {result['num_same']} of "
            f"{result['num_prompts']} prompts"
        )


if __name__ == "__main__":
    try:
        main()
    except (ValueError, RuntimeError) as error:
        sys.exit(f"speed.py: {error}")

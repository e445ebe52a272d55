"""Samples of one prompt share its blocks, and copy a block when they first write into it.

Several samples of a prompt are drawn on the engine, then each again over a contiguous cache of
mlx-lm's of its own, with the same weights and the same random numbers. Exit status 1 if a
token differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache
from same import mlx_lm_model

from mlx_paged.engine.engine import Engine
from mlx_paged.engine.params import SamplingParams
from mlx_paged.engine.sampler import Draw, Draws, draw_key, sample
from mlx_paged.llm import LLM
from mlx_paged.loader import DTYPES

QUESTION = "Why does a KV cache need its own memory manager at all?"


def sample_shared(
    engine: Engine, prompt: list[int], params: SamplingParams
) -> tuple[list[list[int]], list[list[int]]]:
    """All samples' tokens, and their block tables at the end."""
    request = engine.add_request("shared", prompt, params)
    tables: list[list[int]] = []
    while engine.has_work():
        if all(sample.is_running for sample in request.samples):
            tables = [list(sample.sequence.block_table) for sample in request.samples]
        engine.step()
    return [sample.output_token_ids for sample in request.samples], tables


def sample_alone(
    model: Any, prompt: list[int], params: SamplingParams, index: int, seed: int
) -> list[int]:
    """One sample over a contiguous cache, drawn with the same parameters and keys."""
    cache = [KVCache() for _ in model.layers]
    draws = Draws([Draw(params, draw_key(seed, index), len(prompt))])
    token_ids = list(prompt)
    new = prompt
    for _ in range(params.max_tokens or 0):
        logits = model(mx.array([new]), cache=cache)[0, -1:]
        drawn = sample(logits, draws, np.array([len(token_ids)]))
        new = [int(drawn.token_ids.item())]
        token_ids += new
    return token_ids[len(prompt) :]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, a folder or a hub id")
    parser.add_argument("--prompt", default=QUESTION, help="a question for the chat template")
    parser.add_argument("-n", type=int, default=4, help="samples")
    parser.add_argument("--tokens", type=int, default=64, help="of each sample")
    parser.add_argument("--block-size", type=int, default=16, metavar="TOKENS", help="1 to 256")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and cache")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    num_blocks = args.n * (2048 // args.block_size + 1)
    llm = LLM(args.model, args.dtype, block_size=args.block_size, num_blocks=num_blocks)
    prompt = llm.encode([{"role": "user", "content": args.prompt}])
    params = SamplingParams(
        n=args.n,
        temperature=args.temperature,
        seed=args.seed,
        max_tokens=args.tokens,
        ignore_eos=True,
    )
    shared, tables = sample_shared(llm.engine, prompt, params)
    reference = mlx_lm_model(llm.loaded)
    same = [
        sample_alone(reference, prompt, params, i, args.seed) == shared[i] for i in range(args.n)
    ]
    result = {
        "model": llm.loaded.description,
        "num_prompt_tokens": len(prompt),
        "num_blocks": len({block_id for table in tables for block_id in table}),
        "num_blocks_alone": sum(len(table) for table in tables),
        "num_copies": llm.stats().counts.num_copies,
        "tables": tables,
        "same": same,
        "texts": [llm.tokenizer.decode(token_ids) for token_ids in shared],
    }
    print(json.dumps(result)) if args.json else print_report(args, result)
    return int(not all(same))


def print_report(args: argparse.Namespace, result: dict[str, Any]) -> None:
    size, num_tokens = args.block_size, result["num_prompt_tokens"]
    in_last = (num_tokens - 1) % size + 1
    used, alone = result["num_blocks"], result["num_blocks_alone"]
    print(
        f"prompt: {num_tokens} tokens in {-(-num_tokens // size)} blocks, the last one "
        f"{in_last} of {size} full"
    )
    print(
        f"{args.n} samples of {args.tokens} tokens: {used} blocks in use, against {alone} without "
        f"sharing ({1 - used / alone:.0%} fewer); {result['num_copies']} copy-on-write copies"
    )
    print("tables:")
    for table in result["tables"]:
        print(f"  {table}")
    print(f"each sample the same as without sharing: {result['same']}")
    for text in result["texts"]:
        print(f"  {text[:90]!r}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, RuntimeError) as error:
        sys.exit(f"share.py: {error}")

"""Many requests through a pool that holds a quarter of them: all finish, as each would alone.

The requests have the lengths of chats and arrive at once. Admission goes by what they hold,
so the pool runs out as answers grow, and the youngest are preempted and come back. Every
answer is compared with mlx-lm's over a contiguous cache, one at a time, on the same weights.
Exit status 1 if a token differs or a block is lost.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from same import mlx_lm_model

from mlx_paged.engine.engine import Engine
from mlx_paged.engine.options import EngineOptions
from mlx_paged.engine.params import SamplingParams
from mlx_paged.loader import load
from mlx_paged.models import qwen2

# Prompt and answer tokens of 64 ShareGPT conversations.
LENGTHS = [
    (348, 4),
    (51, 546),
    (234, 340),
    (799, 8),
    (7, 643),
    (15, 25),
    (786, 309),
    (13, 200),
    (66, 105),
    (11, 142),
    (407, 16),
    (266, 13),
    (741, 7),
    (35, 37),
    (247, 18),
    (33, 192),
    (11, 79),
    (13, 268),
    (277, 13),
    (36, 31),
    (114, 249),
    (18, 614),
    (19, 443),
    (46, 20),
    (8, 220),
    (109, 193),
    (112, 252),
    (9, 296),
    (15, 219),
    (34, 547),
    (53, 129),
    (7, 145),
    (504, 38),
    (66, 511),
    (12, 93),
    (126, 4),
    (29, 332),
    (373, 33),
    (16, 64),
    (15, 145),
    (53, 630),
    (91, 209),
    (12, 98),
    (32, 105),
    (589, 27),
    (111, 416),
    (266, 4),
    (25, 327),
    (66, 696),
    (354, 43),
    (530, 158),
    (111, 194),
    (11, 25),
    (286, 17),
    (14, 107),
    (304, 11),
    (21, 16),
    (737, 10),
    (502, 438),
    (395, 7),
    (208, 18),
    (625, 4),
    (174, 5),
    (774, 46),
]
TINY = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 512,
}


def load_model(name: str) -> Any:
    """A loaded model with its config, or a tiny one with random weights in float32."""
    if name != "tiny":
        return load(name)
    model = qwen2.Model(qwen2.ModelArgs.from_dict(TINY))
    mx.random.seed(0)
    model.update(tree_map(lambda a: mx.random.normal(a.shape) * 0.2, model.parameters()))
    mx.eval(model.parameters())
    return SimpleNamespace(model=model, config=TINY, description="tiny: random qwen2, float32")


def make_requests(vocab_size: int, args: argparse.Namespace) -> list[tuple[list[int], int]]:
    """Random prompts and answer lengths."""
    rng = random.Random(args.seed)
    lengths = [
        (max(1, round(prompt * args.scale)), max(1, round(answer * args.scale)))
        for prompt, answer in LENGTHS[: args.requests]
    ]
    return [
        ([rng.randrange(vocab_size) for _ in range(prompt)], answer) for prompt, answer in lengths
    ]


def run(engine: Engine, requests: list[tuple[list[int], int]]) -> tuple[list[list[int]], float]:
    """All answers, and how many sequences ran at once on average."""
    added = []
    for i, (prompt, num_tokens) in enumerate(requests):
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        added.append(engine.add_request(str(i), prompt, params))
    num_running = []
    while engine.has_work():
        engine.step()
        engine.check_integrity()
        num_running.append(len(engine.scheduler.running))
    return [r.samples[0].output_token_ids for r in added], statistics.mean(num_running)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="tiny, smollm2, a folder or a hub id")
    parser.add_argument("--requests", type=int, default=64, help="at most 64")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    parser.add_argument("--share", type=float, default=0.25, help="of all blocks in the pool")
    parser.add_argument("--block-size", type=int, default=16, metavar="TOKENS", help="1 to 256")
    parser.add_argument("--preemption", default="recompute", help="recompute or swap")
    parser.add_argument("--prefix-caching", default="hash", help="hash, radix or off")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    loaded = load_model(args.model)
    requests = make_requests(loaded.model.args.vocab_size, args)
    blocks = [-(-(len(prompt) + n) // args.block_size) for prompt, n in requests]
    num_blocks = max(round(args.share * sum(blocks)), *blocks)
    options = EngineOptions(
        block_size=args.block_size,
        num_blocks=num_blocks,
        preemption=args.preemption,
        prefix_caching=args.prefix_caching,
    )
    engine = Engine(loaded.model, None, options)
    answers, num_running = run(engine, requests)
    reference = mlx_lm_model(loaded)
    num_same = 0
    for (prompt, n), answer in zip(requests, answers, strict=True):
        alone = [t for t, _ in generate_step(mx.array(prompt), reference, max_tokens=n)]
        num_same += answer == alone
    stats = engine.stats()
    result = {
        "model": loaded.description,
        "num_requests": len(requests),
        "num_tokens": sum(len(prompt) + n for prompt, n in requests),
        "num_blocks": num_blocks,
        "num_blocks_wanted": sum(blocks),
        "num_finished": sum(len(a) == n for a, (_, n) in zip(answers, requests, strict=True)),
        "num_same": num_same,
        "num_preemptions": stats.num_preemptions,
        "num_lost_blocks": stats.num_blocks_used,
        "num_steps": stats.counts.num_steps,
        "mean_running": num_running,
    }
    print(json.dumps(result)) if args.json else print_report(result)
    return int(num_same < len(requests) or stats.num_blocks_used > 0)


def print_report(result: dict[str, Any]) -> None:
    print(
        f"{result['num_requests']} requests of {result['num_tokens']} tokens in all need "
        f"{result['num_blocks_wanted']} blocks; the pool has {result['num_blocks']}"
    )
    print(
        f"{result['num_finished']} finished in {result['num_steps']} steps, "
        f"{result['mean_running']:.1f} running at once; {result['num_preemptions']} preemptions; "
        f"{result['num_lost_blocks']} blocks lost"
    )
    print(f"the same tokens as alone: {result['num_same']} of {result['num_requests']}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, RuntimeError) as error:
        sys.exit(f"crowded.py: {error}")

"""Requests that begin alike: how much of a prompt is found in the cache, and not computed.

    python scripts/prefix.py                   # three requests, then conversations, on the model
    python scripts/prefix.py --lengths         # simulated: hit rate by pool size, index, eviction
    python scripts/prefix.py --trace mooncake_conversation.jsonl.gz --plot prefix.png

Three requests to one assistant: B asks another question than A, C has the date in front. Then
conversations, turn by turn, each turn holding all before it. Each index is asked for the same
answers, which must be those without a cache. Exit status 1 if a token differs.

With --lengths or --trace no model runs. Requests are served one after the other by this library's
block pool and prefix cache, of many sizes, beside a cache that knows which block comes back last.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from measurements import prefix_sweep

from mlx_paged.engine.engine import Engine
from mlx_paged.engine.options import EngineOptions
from mlx_paged.engine.params import SamplingParams
from mlx_paged.llm import LLM
from mlx_paged.loader import DTYPES

INDEXES = ("hash", "radix", "off")
SYSTEM = (
    "You are the Notebook Assistant. You answer questions about a shared notebook of notes on "
    "machine learning systems. Use only what the notebook says, name the page that you took it "
    "from, and say so when the notebook does not have the answer. Keep your answers short and "
    "plain: two or three full sentences at most, and no lists or tables ever."
)
DATE = "It is Monday, 14 July 2025. "
REQUESTS = {
    "A": (SYSTEM, "Which page explains how a block table maps to slots?"),
    "B": (SYSTEM, "Which page explains how a block is shared by samples?"),
    "C": (DATE + SYSTEM, "Which page explains how a block table maps to slots?"),
}
CONVERSATION = [
    {"role": "user", "content": "What does a KV cache hold?"},
    {
        "role": "assistant",
        "content": "For every token that a model has read, a key and a value in each layer. "
        "The next token attends to them, so they need not be computed again.",
    },
    {"role": "user", "content": "And why is it cut into blocks?"},
    {
        "role": "assistant",
        "content": "Nobody knows how long an answer will be. Blocks of a few tokens are taken "
        "as it grows, so that nothing is reserved in advance and little is left empty.",
    },
    {"role": "user", "content": "Can two answers use the same block?"},
]
DATA = Path(__file__).resolve().parents[2] / "shared/data/prompts/sharegpt_multiturn_10.jsonl"


def read_conversations(path: Path | None) -> list[list[dict[str, str]]]:
    """Conversations of a JSONL file with `messages`; the one above if there is none."""
    if path is None:
        path = DATA if DATA.exists() else None
    if path is None:
        return [CONVERSATION]
    lines = path.read_text().splitlines()
    return [
        [{"role": m["role"], "content": m["content"]} for m in json.loads(line)["messages"]]
        for line in lines
    ]


def turns(conversations: list[list[dict[str, str]]]) -> list[list[dict[str, str]]]:
    """What is sent at each of the user's turns, one conversation's first turn after another's."""
    longest = max(len(messages) for messages in conversations)
    return [
        messages[: i + 1]
        for i in range(longest)
        for messages in conversations
        if i < len(messages) and messages[i]["role"] == "user"
    ]


def num_common(a: list[int], b: list[int]) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def serve(
    engine: Engine, prompts: list[list[int]], params: SamplingParams
) -> tuple[list[list[int]], list[int]]:
    """Answer one prompt after the other. Returns answers and tokens found in the cache."""
    answers, found = [], []
    for prompt in prompts:
        request = engine.add_request("turn", prompt, params)
        while engine.has_work():
            engine.step()
        answers.append(request.samples[0].output_token_ids)
        found.append(request.metrics.num_cached_tokens)
    return answers, found


def compare(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, num_blocks: int
) -> dict[str, Any]:
    """The same prompts with each index, each on an engine of its own."""
    results: dict[str, Any] = {}
    for index in INDEXES:
        options = EngineOptions(
            block_size=llm.block_size, num_blocks=num_blocks, prefix_caching=index
        )
        engine = Engine(llm.loaded.model, llm.tokenizer, options, llm.loaded.dtype)
        answers, found = serve(engine, prompts, params)
        results[index] = {"answers": answers, "num_reused": found}
    expected = results["off"]["answers"]
    for result in results.values():
        result["same"] = result.pop("answers") == expected
    return results


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="smollm2, a folder or a hub id")
    parser.add_argument("--block-size", type=int, default=16, metavar="TOKENS", help="1 to 256")
    parser.add_argument("--num-blocks", type=int, default=1024, help="of each pool")
    parser.add_argument("--tokens", type=int, default=8, help="of each answer")
    parser.add_argument(
        "--conversations", type=int, default=3, help="how many to replay; 0 for none"
    )
    parser.add_argument(
        "--file", type=Path, help="JSONL of conversations, each with messages of role and content"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and cache")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    prefix_sweep.add_arguments(parser)
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    if args.lengths or args.trace:
        return prefix_sweep.run(args)
    llm = LLM(args.model, args.dtype, block_size=args.block_size, num_blocks=1)
    params = SamplingParams(temperature=0, max_tokens=args.tokens)
    result: dict[str, Any] = {"model": llm.loaded.description, "block_size": args.block_size}

    prompts = {
        name: llm.encode(
            [{"role": "system", "content": system}, {"role": "user", "content": question}]
        )
        for name, (system, question) in REQUESTS.items()
    }
    result["requests"] = {
        "num_tokens": [len(prompt) for prompt in prompts.values()],
        "num_shared": [num_common(prompts["A"], prompt) for prompt in prompts.values()],
        **compare(llm, list(prompts.values()), params, args.num_blocks),
    }
    if args.conversations:
        conversations = read_conversations(args.file)[: args.conversations]
        sent = [llm.encode(messages) for messages in turns(conversations)]
        sent = [prompt for prompt in sent if len(prompt) + args.tokens <= 4096]
        result["conversations"] = {
            "num_conversations": len(conversations),
            "num_turns": len(sent),
            "num_tokens": sum(len(prompt) for prompt in sent),
            **compare(llm, sent, params, args.num_blocks),
        }
    print(json.dumps(result)) if args.json else print_report(result)
    parts = [result[part] for part in ("requests", "conversations") if part in result]
    return int(not all(part[index]["same"] for part in parts for index in INDEXES))


def print_report(result: dict[str, Any]) -> None:
    size, requests = result["block_size"], result["requests"]
    for i, name in enumerate(REQUESTS):
        num_tokens, shared = requests["num_tokens"][i], requests["num_shared"][i]
        by_hash = requests["hash"]["num_reused"][i]
        print(
            f"{name}: {num_tokens} tokens, {num_tokens // size} full blocks; tokens shared with "
            f"A from the start: {shared:3d}; blocks found in the cache: {by_hash // size}, "
            f"prompt tokens not recomputed: {by_hash}, "
            f"token-exact: {requests['radix']['num_reused'][i]}"
        )
    print(
        f"same tokens as without a cache: {requests['hash']['same'] and requests['radix']['same']}"
    )
    if "conversations" not in result:
        return
    c = result["conversations"]
    print(
        f"{c['num_conversations']} conversations, {c['num_turns']} turns, "
        f"{c['num_tokens']} prompt tokens"
    )
    for index in ("hash", "radix"):
        saved = sum(c[index]["num_reused"])
        hits = sum(found > 0 for found in c[index]["num_reused"])
        print(
            f"  {index:5s} {hits} of {c['num_turns']} turns found a prefix; {saved} tokens saved "
            f"({saved / c['num_tokens']:.1%}); same tokens as without a cache: {c[index]['same']}"
        )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, RuntimeError) as error:
        sys.exit(f"prefix.py: {error}")

"""Paging changes where K and V are stored, and not what the model says.

Prompts are decoded greedily, taking turns so that their blocks interleave in one pool, then
again with mlx-lm's model and its contiguous cache, on the same weights. Exit status 1 if a
token differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import _get_classes
from rich.console import Console
from rich.progress import Progress

from mlx_paged.blocks import Sequence
from mlx_paged.cache import KVPool, step
from mlx_paged.cli.prompts import read_prompts_file
from mlx_paged.loader import DTYPES, Loaded, load

PROMPTS = ["The KV cache stores", "Paged attention borrows an idea from operating systems:"]
DEFAULT_POOL_TOKENS = 1024


class Answer(NamedTuple):
    """One prompt's tokens from both caches, and mlx-lm's lead of its best token over the next."""

    sequence: Sequence
    paged: list[int]
    contiguous: list[int]
    margins: list[float]

    @property
    def first_difference(self) -> int | None:
        pairs = zip(self.paged, self.contiguous, strict=True)
        return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)


def decode_paged(
    loaded: Loaded, pool: KVPool, prompts: list[list[int]], args: argparse.Namespace, advance: Any
) -> list[Sequence]:
    """Greedy answers from one pool: a step each in turn, or with --batch one pass for all."""
    sequences = [Sequence(pool.blocks, prompt) for prompt in prompts]
    turns = [sequences] if args.batch else [[sequence] for sequence in sequences]
    for _ in range(args.tokens):
        for turn in turns:
            num_new = [s.num_tokens - s.num_cached_tokens for s in turn]
            logits = step(loaded.model, pool, turn, num_new)
            for sequence, token_id in zip(turn, logits.argmax(axis=-1).tolist(), strict=True):
                sequence.token_ids.append(token_id)
                advance()
    return sequences


def decode_contiguous(
    model: Any, prompt: list[int], num_tokens: int, advance: Any
) -> tuple[list[int], list[float]]:
    """Greedy tokens from mlx-lm's model and KVCache, and how clearly each was chosen."""
    cache = [KVCache() for _ in model.layers]
    token_ids: list[int] = []
    margins = []
    new = prompt
    for _ in range(num_tokens):
        logits = model(mx.array([new]), cache=cache)[0, -1].astype(mx.float32)
        second, first = mx.topk(logits, 2).tolist()
        margins.append(abs(first - second))
        new = [int(logits.argmax())]
        token_ids += new
        advance()
    return token_ids, margins


def mlx_lm_model(loaded: Loaded) -> Any:
    """mlx-lm's own model, with the very arrays that ours holds."""
    model_class, args_class = _get_classes(loaded.config)
    model = model_class(args_class.from_dict(loaded.config))
    model.update(loaded.model.parameters())
    return model


def compare(
    loaded: Loaded, pool: KVPool, prompts: list[list[int]], args: argparse.Namespace
) -> list[Answer]:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        total = 2 * len(prompts) * args.tokens
        task = progress.add_task(f"{loaded.name}: {len(prompts)} prompts, twice", total=total)
        sequences = decode_paged(loaded, pool, prompts, args, lambda: progress.advance(task))
        reference = mlx_lm_model(loaded)
        answers = []
        for prompt, sequence in zip(prompts, sequences, strict=True):
            tokens, margins = decode_contiguous(
                reference, prompt, args.tokens, lambda: progress.advance(task)
            )
            answers.append(Answer(sequence, sequence.token_ids[len(prompt) :], tokens, margins))
    return answers


def shown(sequence: Sequence) -> str:
    """The block table, with the middle of a long one left out."""
    table = sequence.block_table
    if len(table) <= 24:
        return str(table)
    first, last = (", ".join(map(str, part)) for part in (table[:12], table[-4:]))
    return f"[{first}, ... {len(table) - 16} more ..., {last}]"


def print_report(loaded: Loaded, pool: KVPool, answers: list[Answer]) -> None:
    print(
        f"one block: {pool.block_size} tokens x {pool.num_layers} layers x K and V x "
        f"{pool.num_kv_heads} heads x {pool.head_dim} dimensions x {pool.dtype.size} bytes = "
        f"{pool.block_nbytes:,} bytes"
    )
    for i, answer in enumerate(answers):
        sequence, at = answer.sequence, answer.first_difference
        print(
            f"prompt {i}: {sequence.num_cached_tokens} tokens in blocks {shown(sequence)}; "
            f"same {len(answer.paged)} tokens as the contiguous cache: {at is None}"
        )
        if at is not None:
            print(
                f"  token {at} differs; mlx-lm's two best logits there are "
                f"{answer.margins[at]:.2g} apart"
            )
    print(
        f"block size {pool.block_size}; {pool.blocks.num_free_blocks} of {pool.num_blocks} "
        "blocks free"
    )
    for answer in answers[:2]:
        print(repr(loaded.tokenizer.decode(answer.paged)))


def report(loaded: Loaded, pool: KVPool, answers: list[Answer]) -> dict[str, Any]:
    return {
        "model": loaded.description,
        "block_size": pool.block_size,
        "block_bytes": pool.block_nbytes,
        "num_blocks": pool.num_blocks,
        "num_free_blocks": pool.blocks.num_free_blocks,
        "same": all(answer.first_difference is None for answer in answers),
        "prompts": [
            {
                "num_cached_tokens": answer.sequence.num_cached_tokens,
                "block_table": answer.sequence.block_table,
                "first_difference": answer.first_difference,
                "token_ids": answer.paged,
            }
            for answer in answers
        ],
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default="smollm2", help="smollm2, smollm2-qwen2, a folder or a hub id"
    )
    parser.add_argument("--block-size", type=int, default=16, metavar="TOKENS", help="1 to 256")
    parser.add_argument("--num-blocks", type=int, help="of the pool; enough for all by default")
    parser.add_argument(
        "--prompts", metavar="FILE", help='one a line, plain or JSON with a "prompt"'
    )
    parser.add_argument("--tokens", type=int, default=100, help="to decode for each prompt")
    parser.add_argument("--batch", action="store_true", help="all prompts in one pass a step")
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and cache")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    texts = read_prompts_file(args.prompts) if args.prompts else PROMPTS
    loaded = load(args.model, args.dtype)
    prompts = [loaded.tokenizer.encode(text) for text in texts]
    num_blocks = args.num_blocks or max(
        DEFAULT_POOL_TOKENS // args.block_size,
        sum(-(-(len(prompt) + args.tokens) // args.block_size) for prompt in prompts),
    )
    pool = KVPool.for_model(loaded.model, num_blocks, args.block_size)
    answers = compare(loaded, pool, prompts, args)
    if args.json:
        print(json.dumps(report(loaded, pool, answers)))
    else:
        print_report(loaded, pool, answers)
    return int(any(answer.first_difference is not None for answer in answers))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, RuntimeError) as error:
        sys.exit(f"same.py: {error}")

"""`mlx-paged generate`: one answer, streamed, or many, together in one batch."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_paged.cli.arguments import pool_options
from mlx_paged.cli.manners import UsageError
from mlx_paged.cli.progress import PrefillBar, waiting
from mlx_paged.cli.prompts import read_prompts, to_token_ids
from mlx_paged.cli.stats import BatchStats, Stats

if TYPE_CHECKING:
    from mlx_paged.llm import LLM, RequestOutput, SamplingParams


def run(args: argparse.Namespace) -> int:
    prompts = read_prompts(args)
    if args.n > 1 and args.temp == 0:
        raise UsageError("-n asks for several answers, but --temp 0 makes them all the same")
    with waiting(f"Loading {args.model}"):
        llm = make_llm(args)
    tokens = [to_token_ids(prompt, llm.tokenizer, args.system, args.raw) for prompt in prompts]
    stats = (
        _answer_one(llm, tokens[0], args)
        if len(tokens) == 1 and args.n == 1
        else _answer_many(llm, prompts, tokens, args)
    )
    if args.stats:
        stats.print()
    return 0


def make_llm(args: argparse.Namespace) -> LLM:
    """The model and pool that the options ask for."""
    from mlx_paged.llm import LLM

    return LLM(model=args.model, dtype=args.dtype, **pool_options(args))


def _params(args: argparse.Namespace) -> SamplingParams:
    from mlx_paged.llm import SamplingParams

    return SamplingParams(
        n=args.n,
        temperature=args.temp,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        max_tokens=args.max_tokens,
    )


def _answer_one(llm: LLM, token_ids: list[int], args: argparse.Namespace) -> Stats:
    """Writes text to stdout as it comes, or one JSON object at the end."""
    texts: list[str] = []
    finish_reason = None
    mx.reset_peak_memory()
    start = first = time.perf_counter()
    with PrefillBar(len(token_ids)) as bar:
        for output in llm.stream(token_ids, _params(args), progress=bar.update):
            if not texts:
                first = time.perf_counter()
                bar.close()
            texts.append(output.text)
            finish_reason = output.finish_reason
            if not args.json:
                sys.stdout.write(output.text)
                sys.stdout.flush()
    end = time.perf_counter()
    text = "".join(texts)
    stats = Stats(
        prompt_seconds=first - start,
        generation_seconds=end - first,
        **_pool_stats(llm, len(token_ids), len(texts)),
    )
    if args.json:
        _print_json(text=text, finish_reason=finish_reason, stats=stats.as_dict())
    elif not text.endswith("\n"):
        print(flush=True)
    return stats


def _answer_many(
    llm: LLM, prompts: list[str], tokens: list[list[int]], args: argparse.Namespace
) -> BatchStats:
    """Writes all answers at the end, in the order of the prompts."""
    mx.reset_peak_memory()
    start = time.perf_counter()
    outputs = llm.generate(tokens, _params(args), progress=sys.stderr.isatty())
    seconds = time.perf_counter() - start
    for prompt, output in zip(prompts, outputs, strict=True):
        _print_answers(prompt, output, args.json)
    answers = [answer for output in outputs for answer in output.outputs]
    num_generated = sum(len(answer.token_ids) for answer in answers)
    return BatchStats(
        num_answers=len(answers),
        seconds=seconds,
        **_pool_stats(llm, sum(map(len, tokens)), num_generated),
    )


def _print_answers(prompt: str, output: RequestOutput, as_json: bool) -> None:
    """JSON lines, or texts with a heading each on stderr, which leaves stdout the text alone."""
    for answer in output.outputs:
        if as_json:
            _print_json(
                prompt=prompt,
                index=answer.index,
                text=answer.text,
                finish_reason=answer.finish_reason,
                num_prompt_tokens=len(output.prompt_token_ids),
                num_generated_tokens=len(answer.token_ids),
            )
        else:
            heading = prompt.split("\n", 1)[0][:60]
            print(f"--- {heading}", file=sys.stderr, flush=True)
            print(answer.text, flush=True)


def _pool_stats(llm: LLM, num_prompt_tokens: int, num_generated_tokens: int) -> dict[str, Any]:
    """What both kinds of statistics have."""
    return {
        "model": llm.loaded.description,
        "attention": llm.attention,
        "block_size": llm.block_size,
        "num_blocks": llm.num_blocks,
        "num_used_blocks": llm.stats().counts.max_blocks_used,
        "peak_memory_bytes": mx.get_peak_memory(),
        "num_prompt_tokens": num_prompt_tokens,
        "num_generated_tokens": num_generated_tokens,
    }


def _print_json(**fields: Any) -> None:
    print(json.dumps(fields, ensure_ascii=False), flush=True)

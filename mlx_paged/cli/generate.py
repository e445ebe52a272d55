"""`mlx-paged generate`: one answer, streamed."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_paged.cli.arguments import to_bytes
from mlx_paged.cli.progress import PrefillBar, waiting
from mlx_paged.cli.prompts import read_prompts, to_token_ids
from mlx_paged.cli.stats import Stats

if TYPE_CHECKING:
    from mlx_paged.llm import LLM, SamplingParams


def run(args: argparse.Namespace) -> int:
    prompts = read_prompts(args)
    with waiting(f"Loading {args.model}"):
        llm = make_llm(args)
    for prompt in prompts:
        token_ids = to_token_ids(prompt, llm.tokenizer, args.system, args.raw)
        text, finish_reason, stats = _answer(llm, token_ids, _params(args), show=not args.json)
        if args.json:
            answer = {"text": text, "finish_reason": finish_reason, **stats.as_dict()}
            print(json.dumps(answer, ensure_ascii=False))
        elif args.stats:
            stats.print()
    return 0


def make_llm(args: argparse.Namespace) -> LLM:
    from mlx_paged.llm import LLM

    return LLM(
        model=args.model,
        dtype=args.dtype,
        block_size=args.block_size,
        num_blocks=args.num_blocks,
        kv_memory=to_bytes(args.kv_memory),
        attention=args.attention,
    )


def _params(args: argparse.Namespace) -> SamplingParams:
    from mlx_paged.llm import SamplingParams

    return SamplingParams(
        temperature=args.temp,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        max_tokens=args.max_tokens,
    )


def _answer(
    llm: LLM, token_ids: list[int], params: SamplingParams, show: bool
) -> tuple[str, str | None, Stats]:
    """Generates, and writes text to stdout as it comes if `show`."""
    texts, num_generated, finish_reason = [], 0, None
    mx.reset_peak_memory()
    start = first = time.perf_counter()
    with PrefillBar(len(token_ids)) as bar:
        for delta in llm.stream(token_ids, params, progress=bar.update):
            if not num_generated:
                first = time.perf_counter()
                bar.close()
            num_generated += len(delta.token_ids)
            texts.append(delta.text)
            finish_reason = delta.finish_reason
            if show:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
    end = time.perf_counter()
    if show and not "".join(texts).endswith("\n"):
        print(flush=True)
    stats = Stats(
        model=llm.loaded.description,
        attention=llm.attention,
        num_prompt_tokens=len(token_ids),
        num_generated_tokens=num_generated,
        prompt_seconds=first - start,
        generation_seconds=end - first,
        block_size=llm.block_size,
        num_blocks=llm.num_blocks,
        peak_memory_bytes=mx.get_peak_memory(),
    )
    return "".join(texts), finish_reason, stats

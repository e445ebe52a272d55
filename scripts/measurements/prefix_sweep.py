"""Hit rate of prefix caches over the size of the pool: simulated, with no model."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from measurements import lengths, report, visits
from measurements.prefix_caches import INDEXES, library_tokens_found, tokens_found
from measurements.visits import Workload

NAMES = {
    "oracle": "oracle: evicts what comes back last",
    "radix": "radix tree, least recently used",
    "hash": "hash chain, least recently used",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("simulation over pool sizes, without a model")
    group.add_argument(
        "--lengths",
        type=Path,
        nargs="?",
        const=lengths.DATA / "sharegpt_multiturn.json",
        metavar="FILE",
        help="conversations of these lengths, [[prompt, answer, prompt, ...], ...]; ShareGPT's "
        "without FILE (half a minute)",
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="JSON lines of input_length, output_length, hash_ids (Mooncake's traces)",
    )
    group.add_argument("--first", type=int, metavar="N", help="conversations or requests to take")
    group.add_argument("--all", action="store_true", help="take all (default: 400 and 12,000)")
    group.add_argument(
        "--active", type=float, default=50, help="conversations under way at once (default 50)"
    )
    group.add_argument(
        "--system-tokens", type=int, default=85, help="that all begin with (default 85)"
    )
    group.add_argument(
        "--context", type=int, default=8192, help="cut conversations there (default 8192)"
    )
    group.add_argument(
        "--pool-tokens", type=int, nargs="+", metavar="N", help="sizes of the pool to try"
    )
    group.add_argument("--seed", type=int, default=0, help="of the order of turns")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Share of prompt tokens found, by pool size, index and eviction."""
    if args.trace:
        workload = visits.read_trace_visits(args.trace, _first(args, 12_000))
        exact = None
        name = args.trace.name.split(".")[0]
    else:
        conversations = lengths.read_conversations(args.lengths)[: _first(args, 400)]
        conversations = visits.within(conversations, args.context)
        workload = visits.conversation_visits(
            conversations, args.block_size, args.system_tokens, args.active, args.seed
        )
        exact = visits.num_exactly_reused(conversations, args.system_tokens)
        name = f"{len(conversations)} conversations"
    total = workload.num_prompt_tokens
    return {
        "name": name,
        "num_requests": len(workload.visits),
        "num_prompt_tokens": total,
        "block_tokens": workload.block_tokens,
        "longest_tokens": workload.most_blocks * workload.block_tokens,
        "distinct_tokens": workload.num_names * workload.block_tokens,
        "token_exact_without_limit": None if exact is None else exact / total,
        "rows": _sweep(
            workload, args.pool_tokens or _pool_sizes(workload), has_tokens=not args.trace
        ),
    }


def _sweep(workload: Workload, pool_tokens: list[int], has_tokens: bool) -> list[dict[str, Any]]:
    # A radix tree over block names finds what a hash chain finds.
    indexes = list(INDEXES) if has_tokens else ["hash"]
    total, rows = workload.num_prompt_tokens, []
    with report.progress() as bar:
        num_runs = len(pool_tokens) * (1 + len(indexes))
        task = bar.add_task("requests", total=num_runs * len(workload.visits))
        tick = partial(bar.advance, task)
        for num_tokens in pool_tokens:
            num_blocks = num_tokens // workload.block_tokens
            row: dict[str, Any] = {"pool_tokens": num_tokens}
            row["oracle"] = tokens_found(workload, num_blocks, "oracle", tick) / total
            for index in indexes:
                found = library_tokens_found(workload, num_blocks, index, tick)
                row[index] = found / total
            rows.append(row)
    return rows


def _first(args: argparse.Namespace, default: int) -> int | None:
    return None if args.all else args.first or default


def _pool_sizes(workload: Workload) -> list[int]:
    """Powers of two from what the longest request needs to what holds all of them."""
    smallest = workload.block_tokens * (workload.most_blocks + 1)
    largest = workload.block_tokens * (workload.num_names + workload.most_blocks)
    return [2**k for k in range(smallest.bit_length(), largest.bit_length() + 1)]


def print_report(result: dict[str, Any]) -> None:
    names = [name for name in NAMES if name in result["rows"][0]]
    rows = [
        [f"{row['pool_tokens']:,}", *(f"{row[name]:.2%}" for name in names)]
        for row in result["rows"]
    ]
    title = (
        f"{result['name']}: {result['num_requests']:,} requests, {result['num_prompt_tokens']:,} "
        f"prompt tokens, blocks of {result['block_tokens']}; share of prompt tokens found"
    )
    columns = ["tokens in the pool", *(NAMES[name] for name in names)]
    report.show(report.make_table(title, columns, rows))
    report.show(
        f"the longest request holds {result['longest_tokens']:,} tokens, all together "
        f"{result['distinct_tokens']:,} different ones"
    )
    if result["token_exact_without_limit"] is not None:
        report.show(
            f"reuse up to the exact token, of answers' last blocks too, would find "
            f"{result['token_exact_without_limit']:.2%} without a limit"
        )


def plot(result: dict[str, Any], file: Path) -> None:
    figure, axes = report.figure(1, 1, 6.5, 4)
    axis, rows = axes[0, 0], result["rows"]
    sizes = [row["pool_tokens"] for row in rows]
    for style, name in zip(report.LINES, NAMES, strict=False):
        if name in rows[0]:
            axis.plot(sizes, [100 * row[name] for row in rows], label=NAMES[name], **style)
    if result["token_exact_without_limit"] is not None:
        exact = 100 * result["token_exact_without_limit"]
        axis.axhline(exact, color="0.6", linewidth=0.8)
        axis.text(sizes[0], exact + 1, "to the exact token, without a limit", fontsize=9)
    axis.set(
        title=f"{result['name']}, {result['num_requests']:,} requests",
        xlabel="pool (tokens)",
        ylabel="prompt tokens found (%)",
        ylim=(0, 1.1 * max(100 * row["oracle"] for row in rows)),
    )
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes)
    axis.xaxis.set_major_formatter(lambda size, _: _short(size))
    axis.minorticks_off()
    axis.legend(loc="lower right")
    report.save(figure, file)


def _short(size: float) -> str:
    return f"{size / 2**20:g}M" if size >= 2**20 else f"{size / 2**10:g}k"


def run(args: argparse.Namespace) -> int:
    result = measure(args)
    if args.plot:
        plot(result, args.plot)
    if args.json:
        report.print_json(result)
    else:
        print_report(result)
    return 0

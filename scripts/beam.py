"""Memory that sharing blocks saves: parallel samples, and beams of a beam search.

    python scripts/beam.py                         # simulated on both length lists
    python scripts/beam.py --engine 2              # and on the demo model, with 2 prompts
    python scripts/beam.py --all --plot beam.png   # all 5,000 requests of each list

Blocks saved over blocks without sharing, added up over all steps. Samples of a prompt are all as
long as the list's answer. Which beam each beam continues was recorded in beam searches on the demo
model (--record does it anew), and is played back for the lists' lengths through this library's
Sequence and BlockPool. The engine's part counts the blocks of real searches.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from measurements import lengths, report, sharing
from measurements.sharing import Count, Parents

WIDTHS = (2, 4, 6)
KINDS = ("samples", "beams")

# Least and most saved in per cent, for 2 and for 6 of each.
PUBLISHED = {
    "ShareGPT": {"samples": (16.2, 30.5), "beams": (44.3, 66.3)},
    "Alpaca": {"samples": (6.1, 9.8), "beams": (37.6, 55.2)},
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    lengths.add_arguments(parser)
    parser.add_argument(
        "--all", action="store_true", help="all requests, in some minutes (default: 300 a list)"
    )
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, metavar="N")
    parser.add_argument("--block-size", type=int, default=16, metavar="TOKENS")
    parser.add_argument(
        "--engine", type=int, default=0, metavar="PROMPTS", help="also count on the demo model"
    )
    parser.add_argument("--model", default="smollm2", help="of the engine's part")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer there (default 64)")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="search on the model and write who continued whom",
    )
    report.add_arguments(parser)
    args = parser.parse_args(argv)
    if not args.all and args.requests is None:
        args.requests = 300
    return args


def simulate(
    pairs: list[lengths.Pair],
    searches: dict[int, list[Parents]],
    args: argparse.Namespace,
    tick: Any,
) -> dict[str, dict[int, float]]:
    """Share of blocks saved, by samples or beams and how many of them."""
    saved: dict[str, dict[int, float]] = {kind: {} for kind in KINDS}
    for width in args.widths:
        samples, beams = Count(), Count()
        for i, (prompt, answer) in enumerate(pairs):
            sharing.sample(samples, prompt, answer, width, args.block_size)
            parents = sharing.genealogy(searches[width], i)
            sharing.search(beams, prompt, answer, parents, args.block_size)
            tick()
        saved["samples"][width], saved["beams"][width] = samples.saved, beams.saved
    return saved


def on_engine(
    args: argparse.Namespace, searches: dict[int, list[Parents]] | None
) -> dict[str, Any]:
    """The same on the model. Who continued whom is added to `searches`, if given."""
    from measurements import searches as real

    from mlx_paged.llm import LLM

    blocks = (max(args.widths) + 1) * (-(-(args.tokens + 256) // args.block_size) + 1)
    llm = LLM(args.model, block_size=args.block_size, num_blocks=blocks, prefix_caching="off")
    prompts = [
        llm.encode([{"role": "user", "content": text}])
        for text in real.PROMPTS[: args.engine or None]
    ]
    saved: dict[str, dict[int, float]] = {kind: {} for kind in KINDS}
    with report.progress() as bar:
        task = bar.add_task(llm.loaded.name, total=2 * len(args.widths) * len(prompts))
        for width in args.widths:
            samples, beams = Count(), Count()
            for prompt in prompts:
                count = Count()
                if searches is None:
                    count = real.sample(llm.engine, prompt, width, args.tokens)
                search = real.search(llm.engine, prompt, width, args.tokens)
                for total, part in ((samples, count), (beams, search.count)):
                    total.shared += part.shared
                    total.alone += part.alone
                if searches is not None:
                    searches.setdefault(width, []).append(search.parents)
                bar.advance(task, 2)
            saved["samples"][width], saved["beams"][width] = samples.saved, beams.saved
    return {
        "model": llm.loaded.description,
        "num_prompt_tokens": [len(prompt) for prompt in prompts],
        "num_tokens": args.tokens,
        "saved": saved,
    }


def write_recorded(file: Path, model: str, searches: dict[int, list[Parents]]) -> None:
    runs = {
        width: [" ".join("".join(map(str, step)) for step in run) for run in parents]
        for width, parents in searches.items()
    }
    file.write_text(json.dumps({"model": model, "parents": runs}, indent=0) + "\n")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from measurements.searches import read_recorded

    searches = read_recorded()
    if absent := set(args.widths) - set(searches):
        raise ValueError(
            f"no searches of width {min(absent)} are recorded, only of {sorted(searches)}"
        )
    lists = lengths.load(args)
    result: dict[str, Any] = {}
    with report.progress() as bar:
        total = len(args.widths) * sum(map(len, lists.values()))
        task = bar.add_task("requests", total=total)
        for name, pairs in lists.items():
            saved = simulate(pairs, searches, args, partial(bar.advance, task))
            result[name] = {"num_requests": len(pairs), "saved": saved}
    return result


def rows(result: dict[str, Any], widths: list[int]) -> list[list[str]]:
    table = []
    for name, figures in result.items():
        for kind in KINDS:
            saved = figures["saved"][kind]
            least, most = PUBLISHED.get(name, {}).get(kind, (None, None))
            published = f"{least} to {most}%" if least else ""
            table.append([f"{name}, {kind}", *(f"{saved[w]:.1%}" for w in widths), published])
    return table


def plot(result: dict[str, Any], widths: list[int], file: Path) -> None:
    """Share saved over the number of samples or beams, with the published ends."""
    figure, axes = report.figure(1, len(result), 4.5 * len(result), 3.8)
    for axis, (name, figures) in zip(axes[0], result.items(), strict=True):
        for style, kind in zip(report.LINES, KINDS, strict=False):
            saved = [100 * figures["saved"][kind][width] for width in widths]
            axis.plot(widths, saved, label=kind, **style)
            ends = PUBLISHED.get(name, {}).get(kind)
            if ends and {2, 6} <= set(widths):
                label = "published, 2 and 6" if kind == KINDS[0] else None
                axis.plot((2, 6), ends, "x", color="black", markersize=9, label=label)
        axis.set(title=name, xlabel="samples or beams", ylabel="blocks saved (%)", ylim=(0, 100))
        axis.set_xticks(widths)
        axis.legend(loc="upper left")
    report.save(figure, file)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    if args.record:
        searches: dict[int, list[Parents]] = {}
        return write_recorded(args.record, on_engine(args, searches)["model"], searches)
    result = measure(args)
    if args.plot:
        plot(result, args.widths, args.plot)
    engine = on_engine(args, None) if args.engine else None
    if args.json:
        return report.print_json({"lists": result, "engine": engine})
    count = ", ".join(f"{figures['num_requests']:,} of {name}" for name, figures in result.items())
    columns = ["requests", *map(str, args.widths), "published, 2 to 6"]
    title = f"Blocks saved by sharing, simulated: {count}"
    report.show(report.make_table(title, columns, rows(result, args.widths)))
    if engine:
        prompts = ", ".join(map(str, engine["num_prompt_tokens"]))
        title = (
            f"On the engine: {engine['model']}; prompts of {prompts} tokens, answers of "
            f"{engine['num_tokens']}"
        )
        table = [
            [kind, *(f"{engine['saved'][kind][width]:.1%}" for width in args.widths)]
            for kind in KINDS
        ]
        report.show(report.make_table(title, columns[:-1], table))


if __name__ == "__main__":
    report.run(main)

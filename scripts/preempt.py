"""When memory runs out: what preemption costs, and how often each policy resorts to it.

    python scripts/preempt.py                       # both parts, on the demo model
    python scripts/preempt.py --block-sizes 16 --tokens 128 1024 --repeats 5
    python scripts/preempt.py --no-model --plot preempt.png

A preempted sequence's K and V are either copied out of the pool and back in, or computed again.
The times are this machine's: on a CPU both copies stay in one memory, and computing is slow.

Then requests of ShareGPT's lengths arrive at a growing load, in this library's scheduler with a
model that costs nothing. Load is a share of the requests that memory would hold on average, if no
block were half empty and none shared. Every request begins with one of some common prompts, which
the prefix cache shares, and has one of three priorities.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from measurements import lengths, report, traces
from measurements.meter import Meter
from measurements.serving import Arrival, serve_paged

from mlx_paged.engine.scheduler import Policy

POLICIES = get_args(Policy)
SLOTS = 15_700
SPACE = 2**12


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw a picture (pip install -e '.[plots]')"
    )
    costs = parser.add_argument_group("cost of a preemption")
    costs.add_argument("--no-model", action="store_true", help="leave this part out")
    costs.add_argument("--model", default="smollm2", help="smollm2, a folder or a hub id")
    costs.add_argument(
        "--block-sizes", type=int, nargs="+", default=[1, 4, 16, 64, 256], metavar="TOKENS"
    )
    costs.add_argument("--tokens", type=int, nargs="+", default=[64, 256], help="of the sequence")
    costs.add_argument("--repeats", type=int, default=3, help="of each measurement (default 3)")
    counts = parser.add_argument_group("number of preemptions")
    lengths.add_arguments(parser, dataset="sharegpt")
    counts.add_argument(
        "--slots", type=int, default=SLOTS, help="of the pool (default %(default)s)"
    )
    counts.add_argument("--block-size", type=int, default=16, metavar="TOKENS")
    counts.add_argument("--groups", type=int, default=50, help="common prompts (default 50)")
    counts.add_argument("--group-tokens", type=int, default=128, help="of each (default 128)")
    counts.add_argument(
        "--loads", type=float, nargs="*", default=[0.8, 1.0, 1.1, 1.2, 1.4], metavar="SHARE"
    )
    counts.add_argument("--seed", type=int, default=0, help="of the arrivals")
    args = parser.parse_args(argv)
    args.requests = args.requests or 1500
    return args


@dataclass(frozen=True)
class Groups:
    """Requests that begin with one of some common prompts, in turn; one in three is urgent."""

    num_groups: int
    num_tokens: int

    def prompt(self, i: int, arrival: Arrival) -> list[int]:
        group, own = i % self.num_groups, (self.num_groups + i) * SPACE
        common = range(group * SPACE, group * SPACE + self.num_tokens)
        return [*common, *range(own, own + arrival.prompt - self.num_tokens)]

    def priority(self, i: int) -> int:
        # Neighbours in time and of one group differ.
        return (i // self.num_groups + i) % 3


def measure_costs(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds by block size and length."""
    from measurements.preemption import cost

    from mlx_paged.loader import load

    loaded = load(args.model)
    rows = []
    with report.progress() as bar:
        task = bar.add_task(loaded.name, total=len(args.tokens) * len(args.block_sizes))
        for num_tokens in args.tokens:
            for block_size in args.block_sizes:
                measured = cost(loaded, block_size, num_tokens, args.repeats)
                seconds = {**vars(measured), "swap": measured.swap}
                rows.append({"num_tokens": num_tokens, "block_size": block_size, **seconds})
                bar.advance(task)
    return {"model": loaded.description, "rows": rows}


def measure_counts(pairs: list[lengths.Pair], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Preemptions by load and policy."""
    longer = [(prompt + args.group_tokens, answer) for prompt, answer in pairs]
    steps = sum(answer for _, answer in longer)
    held = sum(a * p + a * (a + 1) // 2 for p, a in longer)
    most = args.slots * steps / held
    traits = Groups(args.groups, args.group_tokens)
    rows = []
    with report.progress() as bar:
        total = len(args.loads) * len(POLICIES) * len(longer)
        tick = partial(bar.advance, bar.add_task("requests", total=total))
        for load in args.loads:
            arrivals = traces.poisson(longer, load * most, args.seed)
            row: dict[str, Any] = {"load": load, "in_flight_asked_for": load * most}
            for policy in POLICIES:
                num_blocks = args.slots // args.block_size
                meter = serve_paged(arrivals, num_blocks, args.block_size, tick, policy, traits)
                row[policy] = _counts(meter)
            rows.append(row)
    return rows


def _counts(meter: Meter) -> dict[str, Any]:
    return {
        "preemptions_per_100": 100 * meter.num_preemptions / meter.num_requests,
        "given_up_share": meter.num_preempted_tokens / meter.num_computed,
        "in_flight": meter.in_flight,
        "mean_delay_steps": meter.mean_delay,
        "num_computed": meter.num_computed,
    }


def print_costs(costs: dict[str, Any]) -> None:
    columns = ["tokens", "block size", "out ms", "in ms", "both ms", "recompute ms", "ratio"]
    rows: list[list[str]] = []
    for row in costs["rows"]:
        if rows and rows[-1][0] != str(row["num_tokens"]):
            rows.append([])
        out, back, recompute = (1000 * row[key] for key in ("swap_out", "swap_in", "recompute"))
        cells = [f"{ms:.1f}" for ms in (out, back, out + back, recompute)]
        ratio = f"{row['recompute'] / row['swap']:.1f}"
        rows.append([str(row["num_tokens"]), str(row["block_size"]), *cells, ratio])
    title = f"{costs['model']}: swapping a sequence, or computing it again"
    report.show(report.make_table(title, columns, rows), "")


def print_counts(name: str, rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    columns = ["load", "requests", *(f"{policy}: per 100, waiting" for policy in POLICIES)]
    table = []
    for row in rows:
        cells = [f"{row['load']:.0%}", f"{row['in_flight_asked_for']:.0f}"]
        for policy in POLICIES:
            counts = row[policy]
            per_100, delay = counts["preemptions_per_100"], counts["mean_delay_steps"]
            cells.append(f"{per_100:.1f}, {delay:.0f}")
        table.append(cells)
    title = (
        f"{name}: preemptions per 100 requests, mean steps of waiting; {args.requests:,} requests, "
        f"{args.slots:,} slots"
    )
    report.show(report.make_table(title, columns, table))


def plot(result: dict[str, Any], file: Path) -> None:
    parts = [part for part in ("costs", "counts") if result[part]]
    figure, axes = report.figure(1, len(parts), 6 * len(parts), 3.8)
    for axis, part in zip(axes[0], parts, strict=True):
        (_plot_costs if part == "costs" else _plot_counts)(axis, result[part])
    report.save(figure, file)


def _plot_costs(axis: Any, costs: dict[str, Any]) -> None:
    lines = [
        (n, key)
        for n in dict.fromkeys(r["num_tokens"] for r in costs["rows"])
        for key in ("recompute", "swap")
    ]
    for style, (num_tokens, key) in zip(report.LINES, lines, strict=False):
        chosen = [row for row in costs["rows"] if row["num_tokens"] == num_tokens]
        sizes, ms = [row["block_size"] for row in chosen], [1000 * row[key] for row in chosen]
        axis.plot(sizes, ms, label=f"{key}, {num_tokens} tokens", **style)
    axis.set(title="cost of a preemption", xlabel="block size (tokens)", ylabel="ms", yscale="log")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes)
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.legend(fontsize=9)


def _plot_counts(axis: Any, rows: list[dict[str, Any]]) -> None:
    loads = [100 * row["load"] for row in rows]
    for style, policy in zip(report.LINES, POLICIES, strict=False):
        counts = [row[policy]["preemptions_per_100"] for row in rows]
        axis.plot(loads, counts, label=policy, **style)
    axis.set(title="preemptions", xlabel="load (% of what memory holds)", ylabel="per 100 requests")
    axis.legend(fontsize=9)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    name, pairs = next(iter(lengths.load(args).items()))
    result: dict[str, Any] = {
        "costs": None if args.no_model else measure_costs(args),
        "counts": measure_counts(pairs, args),
    }
    if args.plot:
        plot(result, args.plot)
    if args.json:
        return report.print_json(result)
    if result["costs"]:
        print_costs(result["costs"])
    if result["counts"]:
        print_counts(name, result["counts"], args)


if __name__ == "__main__":
    report.run(main)

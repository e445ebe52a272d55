"""What the averages of waste.py leave out: real allocators that serve requests as they come.

    python scripts/fragmentation.py                            # ShareGPT's lengths; half a minute
    python scripts/fragmentation.py --dataset alpaca --plot fragmentation.png
    python scripts/fragmentation.py --trace azure_2023_conv.csv.gz

First all requests wait from the start, so that memory is full all the time: what it holds then,
and how many requests run at once. Then they arrive one by one, at a growing load: how many run,
and how long one waits. Load is the requests that would run at once if memory had no end. Time is
counted in steps, one token of every running request; a prompt takes one step.

Contiguous reservations (max, pow2, oracle, as in waste.py) are placed by first-fit, best-fit or
buddy allocation, the last being what the paper assumed. "paged" is this library's own BlockPool
and Scheduler. "virtual" is paging by virtual memory as in vAttention: pages of 64 KiB or 2 MiB for
each layer's K and V, under the same scheduling rules; how many tokens a page holds depends on the
model's heads.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from measurements import lengths, report, traces
from measurements.allocators import ALLOCATORS
from measurements.meter import Meter
from measurements.reservations import BLOCK_SIZE, WINDOW, contiguous
from measurements.serving import Arrival, serve_contiguous, serve_paged
from measurements.virtual_memory import serve_pages

SLOTS = 15_700
PAGES = {"virtual 64 KiB": 2**16, "virtual 2 MiB": 2**21}

# The paper's Figure 2: tokens' share of KV memory in per cent; and from its Figure 13, vLLM's
# requests in flight over this one's, both of ShareGPT.
PUBLISHED: dict[str, tuple[float, float | None]] = {
    "max, buddy": (20.4, 4.3),
    "pow2, buddy": (26.8, None),
    "oracle, buddy": (38.2, 2.2),
    "paged": (96.3, None),
}
SWEPT = ("max, buddy", "pow2, buddy", "oracle, buddy", "oracle, first-fit", "paged", *PAGES)
KINDS = {
    "stored": "holds a token",
    "to_come": "reserved, used later",
    "never_used": "reserved, never used",
    "gaps": "free, in gaps too short",
    "too_few": "free, less than the next needs",
}

Server = Callable[..., Meter]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    lengths.add_arguments(parser, dataset="sharegpt")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="CSV of arrival_s, prompt_tokens, output_tokens"
    )
    parser.add_argument(
        "--slots", type=int, help=f"of the cache (default {SLOTS:,}; 8 windows for a trace)"
    )
    parser.add_argument(
        "--window",
        type=int,
        help=f"that max reserves (default {WINDOW:,}; for a trace what its longest needs)",
    )
    parser.add_argument("--block-size", type=int, default=BLOCK_SIZE, metavar="TOKENS")
    parser.add_argument("--kv-heads", type=int, default=40, help="default 40, OPT-13B's")
    parser.add_argument("--head-dim", type=int, default=128, help="default 128")
    parser.add_argument(
        "--loads", type=float, nargs="*", metavar="REQUESTS", help="none to leave this part out"
    )
    parser.add_argument(
        "--sweep-requests", type=int, default=1500, metavar="N", help="at each load (default 1500)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    report.add_arguments(parser)
    return parser.parse_args(argv)


def servers(slots: int, window: int, args: argparse.Namespace) -> dict[str, Server]:
    """Every way to serve, by its name; called with arrivals and what to call at each one's end."""
    ways: dict[str, Server] = {}
    for policy, reserve in contiguous(window).items():
        for name, allocator in ALLOCATORS.items():
            # An allocator serves once.
            ways[f"{policy}, {name}"] = lambda arrivals, tick, r=reserve, a=allocator: (
                serve_contiguous(arrivals, r, a(slots), tick)
            )
    num_blocks = slots // args.block_size
    ways["paged"] = lambda arrivals, tick: serve_paged(arrivals, num_blocks, args.block_size, tick)
    token_nbytes = 2 * args.kv_heads * args.head_dim
    for name, page_nbytes in PAGES.items():
        num_pages = slots * token_nbytes // page_nbytes
        ways[name] = lambda arrivals, tick, n=num_pages, size=page_nbytes: serve_pages(
            arrivals, n, size, token_nbytes, tick
        )
    return ways


def measure(name: str, arrivals: list[Arrival], args: argparse.Namespace) -> dict[str, Any]:
    """Both parts for one list of requests. Times of `arrivals` count only for a trace."""
    longest = max(arrival.prompt + arrival.answer for arrival in arrivals)
    window = args.window or (2 ** (longest - 1).bit_length() if args.trace else WINDOW)
    slots = args.slots or (8 * window if args.trace else SLOTS)
    pairs = [(arrival.prompt, arrival.answer) for arrival in arrivals]
    ways = servers(slots, window, args)
    swept = pairs[: args.sweep_requests]
    loads = _loads(pairs, slots) if args.loads is None else args.loads
    with report.progress() as bar:
        total = len(ways) * len(pairs) + len(SWEPT) * len(loads) * len(swept)
        task = bar.add_task(name, total=total)
        tick = partial(bar.advance, task)
        full = {way: _full(serve(traces.at_once(pairs), tick)) for way, serve in ways.items()}
        sweep: dict[str, list[dict[str, Any]]] = {way: [] for way in SWEPT}
        for load in loads:
            if args.trace:
                coming = traces.at_load(arrivals[: args.sweep_requests], load)
            else:
                coming = traces.poisson(swept, load, args.seed)
            for way in SWEPT:
                sweep[way].append(_at_load(load, ways[way](coming, tick)))
    return {
        "num_requests": len(pairs),
        "slots": slots,
        "window": window,
        "page_tokens": {n: size / (2 * args.kv_heads * args.head_dim) for n, size in PAGES.items()},
        "full": full,
        "by_load": sweep,
    }


def _loads(pairs: list[lengths.Pair], slots: int) -> list[float]:
    """Five loads, up to what a perfect cache would just hold."""
    steps = sum(answer for _, answer in pairs)
    held = sum(a * p + a * (a + 1) // 2 for p, a in pairs)
    most = slots * steps / held
    return [float(f"{share * most:.2g}") for share in (0.1, 0.25, 0.4, 0.6, 0.9)]


def _full(meter: Meter) -> dict[str, Any]:
    if not meter.num_full_steps:
        raise ValueError(
            f"{meter.num_requests} requests don't fill the memory for long enough to measure it; "
            "take more of them, or fewer --slots"
        )
    memory = meter.full
    return {
        "in_flight": meter.in_flight_full,
        "num_steps": meter.last_step,
        "num_preemptions": meter.num_preemptions,
        "share_of_reserved": memory.share_of_reserved,
        "share_of_taken": memory.share_of_taken,
        "share_of_all": memory.share_of_all,
        "memory": memory.shares(),
    }


def _at_load(load: float, meter: Meter) -> dict[str, Any]:
    return {
        "load": load,
        "in_flight": meter.in_flight,
        "mean_delay_steps": meter.mean_delay,
        "num_preemptions": meter.num_preemptions,
        "is_saturated": meter.is_saturated,
    }


def full_rows(name: str, result: dict[str, Any]) -> Iterator[list[str]]:
    policy = None
    best = result["full"]["paged"]["in_flight"]
    for way, figures in result["full"].items():
        if policy not in (None, way.split(",")[0].split()[0]):
            yield []
        policy = way.split(",")[0].split()[0]
        share, ratio = PUBLISHED.get(way, (None, None)) if name == "ShareGPT" else (None, None)
        yield [
            way,
            f"{figures['share_of_reserved']:.1%}",
            f"{figures['share_of_taken']:.1%}",
            f"{figures['share_of_all']:.1%}",
            f"{share}%" if share else "",
            f"{figures['in_flight']:.1f}",
            f"{best / figures['in_flight']:.1f}",
            f"{ratio}" if ratio else "",
            f"{1000 * result['num_requests'] / figures['num_steps']:.0f}",
            str(figures["num_preemptions"] or ""),
        ]


def load_rows(result: dict[str, Any]) -> Iterator[list[str]]:
    for way, points in result["by_load"].items():
        cells = [way]
        for point in points:
            mark = " +" if point["is_saturated"] else ""
            cells.append(f"{point['in_flight']:.1f}, {point['mean_delay_steps']:.0f}{mark}")
        yield cells


def plot(name: str, result: dict[str, Any], file: Path) -> None:
    """What full memory holds; requests in flight and delays over the load."""
    figure, axes = report.figure(1, 3, 15, 5)
    _plot_memory(axes[0, 0], result)
    for way, points in result["by_load"].items():
        style = report.LINES[SWEPT.index(way)]
        loads = [point["load"] for point in points]
        axes[0, 1].plot(loads, [p["in_flight"] for p in points], label=way, **style)
        # One step at least, as zero has no place on a logarithmic axis.
        axes[0, 2].plot(loads, [max(1, p["mean_delay_steps"]) for p in points], **style)
    xlabel = "load (requests at once, if memory had no end)"
    axes[0, 1].set(title="requests that run at once", xlabel=xlabel, ylabel="requests", ylim=0)
    axes[0, 2].set(title="waiting", xlabel=xlabel, ylabel="mean steps before the first")
    axes[0, 2].set_yscale("log")
    axes[0, 1].legend(fontsize=9)
    figure.suptitle(f"{name}: {result['slots']:,} slots, window {result['window']:,}")
    report.save(figure, file)


def _plot_memory(axis: Any, result: dict[str, Any]) -> None:
    ways = list(result["full"])
    left = [0.0] * len(ways)
    for style, (kind, label) in zip(report.FILLS, KINDS.items(), strict=True):
        shares = [100 * result["full"][way]["memory"][kind] for way in ways]
        axis.barh(ways, shares, left=left, label=label, edgecolor="black", **style)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axis.invert_yaxis()
    axis.grid(visible=False)
    axis.set(title="memory while requests wait", xlabel="slots (%)", xlim=(0, 100))
    axis.legend(loc="upper center", bbox_to_anchor=(0.4, -0.12), ncols=2, fontsize=8)


def requests(args: argparse.Namespace) -> dict[str, list[Arrival]]:
    if args.trace:
        arrivals = traces.read_trace(args.trace)[: args.requests]
        return {args.trace.name.split(".")[0]: arrivals}
    return {name: traces.at_once(pairs) for name, pairs in lengths.load(args).items()}


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    result = {name: measure(name, arrivals, args) for name, arrivals in requests(args).items()}
    if args.plot:
        name = next(iter(result))
        plot(name, result[name], args.plot)
    if args.json:
        return report.print_json(result)
    for name, figures in result.items():
        print_report(name, figures)


def print_report(name: str, result: dict[str, Any]) -> None:
    columns = [
        "reservation",
        "tokens / reserved",
        "/ reserved and gaps",
        "/ all slots",
        "paper",
        "at once",
        "paged / this",
        "paper",
        "finished per 1,000 steps",
        "preemptions",
    ]
    title = (
        f"{name}: {result['num_requests']:,} requests wait from the start; {result['slots']:,} "
        f"slots, window {result['window']:,}"
    )
    report.show(report.make_table(title, columns, full_rows(name, result)))
    tokens = ", ".join(f"{way} {n:g}" for way, n in result["page_tokens"].items())
    report.show(f"tokens in a page: {tokens}", "")
    loads = [f"load {p['load']:g}" for p in result["by_load"]["paged"]]
    if loads:
        title = "requests at once, mean steps of waiting; + where the queue only grows"
        report.show(report.make_table(title, ["reservation", *loads], load_rows(result)))


if __name__ == "__main__":
    report.run(main)

"""Two servers' answers to the same loads: numbers, table, picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measurements import report

from serving.load import Phase, Target, summarize
from serving.processes import MemoryMeter

MIB = 2**20

# What is shown of a load: its key, the factor to the unit, decimals.
ROWS = {
    "output tokens/s": ("output_tokens_per_s", 1, 1),
    "requests/s": ("requests_per_s", 1, 2),
    "first token p50 ms": ("ttft_p50_s", 1000, 0),
    "first token p90 ms": ("ttft_p90_s", 1000, 0),
    "first token p99 ms": ("ttft_p99_s", 1000, 0),
    "between tokens p50 ms": ("itl_p50_s", 1000, 1),
    "between tokens p99 ms": ("itl_p99_s", 1000, 1),
    "whole answer p50 ms": ("e2e_p50_s", 1000, 0),
    "whole answer p90 ms": ("e2e_p90_s", 1000, 0),
    "errors": ("num_errors", 1, 0),
}
THROUGHPUTS = ("output_tokens_per_s", "requests_per_s")


@dataclass
class Side:
    """One of the servers, with what it did in each load."""

    name: str
    target: Target
    meter: MemoryMeter | None = None
    phases: dict[int, list[Phase]] = field(default_factory=dict)


def compare(sides: Sequence[Side]) -> list[dict[str, Any]]:
    """Both sides' numbers in each load, and how they compare."""
    loads = []
    for concurrency in sides[0].phases:
        load: dict[str, Any] = {"concurrency": concurrency}
        for side in sides:
            load[side.name] = summarize(side.phases[concurrency])
        if len(sides) == 2:
            ours, theirs = sides
            load["ratios"] = ratios(load[ours.name], load[theirs.name])
            load["round_ratios"] = round_ratios(ours, theirs, concurrency)
            load["num_same_answers"] = num_same(ours, theirs, concurrency)
        loads.append(load)
    return loads


def ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """How many times better ours is."""
    found = {}
    for key, _, _ in ROWS.values():
        better, worse = (ours, theirs) if key in THROUGHPUTS else (theirs, ours)
        if key != "num_errors":
            found[key] = better[key] / worse[key] if worse[key] else float("nan")
    return found


def round_ratios(ours: Side, theirs: Side, concurrency: int) -> list[float]:
    """Output tokens a second, ours over theirs, of each round."""
    pairs = zip(ours.phases[concurrency], theirs.phases[concurrency], strict=True)
    key = "output_tokens_per_s"
    return [summarize([a])[key] / max(1e-9, summarize([b])[key]) for a, b in pairs]


def num_same(ours: Side, theirs: Side, concurrency: int) -> int:
    """Requests that both gave the same text to."""
    replies = [
        [reply for phase in side.phases[concurrency] for reply in phase.replies]
        for side in (ours, theirs)
    ]
    pairs = zip(*replies, strict=True)
    return sum(a.error is None and b.error is None and a.text == b.text for a, b in pairs)


def print_report(result: dict[str, Any], names: list[str]) -> None:
    for load in result["loads"]:
        both = [load[name] for name in names]
        rows = []
        for label, (key, factor, digits) in ROWS.items():
            row = [label, *(f"{side[key] * factor:,.{digits}f}" for side in both)]
            if "ratios" in load:
                row.append(f"{load['ratios'][key]:.2f}" if key in load["ratios"] else "")
            rows.append(row)
        title = f"{load['concurrency']} at once: {both[0]['num_requests']} requests"
        title += f", {both[0]['num_prompt_tokens']:,} prompt tokens"
        lines = [error for side in both for error in side["errors"]]
        if "ratios" in load:
            same = f"the same answer from both to {load['num_same_answers']} of "
            each = ", ".join(f"{ratio:.2f}" for ratio in load["round_ratios"])
            lines.append(f"{same}{both[0]['num_requests']}; tokens/s in each round: {each}")
        columns = ["", *names, "ratio"] if "ratios" in load else ["", *names]
        report.show(report.make_table(title, columns, rows), *lines)
    peaks = result["peak_memory_bytes"].items()
    for name, nbytes in peaks:
        print(f"{name}: at most {nbytes / MIB:,.0f} MiB resident")


def plot(result: dict[str, Any], names: list[str], file: Path) -> None:
    """Throughput and the first token's median time over the number of clients."""
    figure, axes = report.figure(1, 2, 9, 3.4)
    for axis, key, label in zip(
        axes.flat,
        ("output_tokens_per_s", "ttft_p50_s"),
        ("output tokens/s", "first token, median, s"),
        strict=True,
    ):
        clients = [load["concurrency"] for load in result["loads"]]
        for name, style in zip(names, report.LINES, strict=False):
            axis.plot(clients, [load[name][key] for load in result["loads"]], label=name, **style)
        axis.set_xlabel("clients at once")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.legend()
    report.save(figure, file)

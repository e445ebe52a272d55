"""Where KV memory goes: the share of reserved slots that hold a token, by reservation policy.

    python scripts/waste.py                        # ShareGPT and Alpaca, beside the published
    python scripts/waste.py --lengths mine.json --window 8192 --slots 100000
    python scripts/waste.py --plot waste.png

A contiguous cache must be reserved before the answer's length is known: "max" reserves the whole
window, "pow2" knows the answer's length up to the next power of two, "oracle" knows it. "paged"
takes a block when the last one is full. Sums over all requests and decode steps; placed without
gaps (fragmentation.py has the gaps). "apart" is how far ours is from the published figure, in
standard errors of the difference of two samples.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measurements import lengths, report
from measurements.reservations import BLOCK_SIZE, WINDOW, Use, mean, uses

# 12 GiB of KV cache at 800 KiB per token, OPT-13B's.
SLOTS = 15_700

# Share in per cent, slots per running request, requests at once.
PUBLISHED = {
    "ShareGPT": {
        "max": (17.6, 2048, 7),
        "pow2": (47.7, 757, 20),
        "oracle": (63.0, 573, 27),
        "paged": (98.0, 369, 42),
    },
    "Alpaca": {
        "max": (3.4, 2048, 7),
        "pow2": (41.9, 168, 93),
        "oracle": (57.0, 124, 127),
        "paged": (90.4, 78, 201),
    },
}
COLUMNS = (
    "reservation",
    "slots with a token",
    "std. error",
    "published",
    "apart",
    "slots per request",
    "published",
    "at once",
    "published",
)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    lengths.add_arguments(parser)
    parser.add_argument("--window", type=int, default=WINDOW, help="of max (default %(default)s)")
    parser.add_argument("--block-size", type=int, default=BLOCK_SIZE, metavar="TOKENS")
    parser.add_argument(
        "--slots", type=int, default=SLOTS, help="of the whole cache (default %(default)s)"
    )
    report.add_arguments(parser)
    args = parser.parse_args(argv)
    for name in ("window", "block_size", "slots"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, not at least 1")
    return args


def measure(lists: dict[str, list[lengths.Pair]], args: argparse.Namespace) -> dict[str, Any]:
    """Of each list its means, and every policy's use of memory."""
    as_published = (args.window, args.block_size, args.slots) == (WINDOW, BLOCK_SIZE, SLOTS)
    result: dict[str, Any] = {}
    for name, pairs in lists.items():
        published = PUBLISHED.get(name, {}) if as_published and not args.lengths else {}
        result[name] = {
            "num_requests": len(pairs),
            "mean_prompt": mean(p for p, _ in pairs)[0],
            "mean_answer": mean(a for _, a in pairs)[0],
            "policies": {
                policy: _policy(use, args.slots, published.get(policy))
                for policy, use in uses(pairs, args.window, args.block_size).items()
            },
        }
    return result


def _policy(use: Use, num_slots: int, published: tuple[float, int, int] | None) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "share": use.share,
        "share_error": use.share_error,
        "slots": use.slots,
        "slots_error": use.slots_error,
        "at_once": use.at_once(num_slots),
    }
    if published:
        share, slots, at_once = published
        figures["published"] = {"share": share / 100, "slots": slots, "at_once": at_once}
        # The published figure comes from a sample of the same size, so it has the same error.
        error = math.sqrt(2) * use.share_error
        figures["difference_in_errors"] = (use.share - share / 100) / error
    return figures


def rows(policies: dict[str, Any]) -> Iterator[list[str]]:
    for policy, figures in policies.items():
        published = figures.get("published")
        yield [
            policy,
            f"{figures['share']:.1%}",
            f"{figures['share_error']:.2%}",
            f"{published['share']:.1%}" if published else "",
            f"{figures['difference_in_errors']:+.1f} errors" if published else "",
            f"{figures['slots']:.0f}",
            f"{published['slots']}" if published else "",
            f"{figures['at_once']}",
            f"{published['at_once']}" if published else "",
        ]


def plot(result: dict[str, Any], file: Path) -> None:
    """Bars of the average reservation: the part that holds tokens, and the part that doesn't."""
    figure, axes = report.figure(1, len(result), 5 * len(result), 3.2)
    for axis, (name, figures) in zip(axes[0], result.items(), strict=True):
        policies = figures["policies"]
        labels = list(policies)
        slots = [policies[policy]["slots"] for policy in labels]
        held = [policies[policy]["share"] * policies[policy]["slots"] for policy in labels]
        axis.barh(labels, slots, color="white", edgecolor="black", label="reserved, empty")
        axis.barh(labels, held, color="0.35", edgecolor="black", label="holds a token")
        for i, policy in enumerate(labels):
            text = f" {policies[policy]['share']:.1%}, {policies[policy]['at_once']} at once"
            axis.text(slots[i], i, text, va="center", fontsize=9)
        axis.set_xlim(0, 1.4 * max(slots))
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.set(title=name, xlabel="slots reserved per running request (tokens)")
        axis.legend(loc="lower right", fontsize=9)
    report.save(figure, file)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    result = measure(lengths.load(args), args)
    if args.plot:
        plot(result, args.plot)
    if args.json:
        return report.print_json(result)
    for name, figures in result.items():
        title = (
            f"{name}: {figures['num_requests']:,} requests, prompt {figures['mean_prompt']:.0f} "
            f"tokens on average, answer {figures['mean_answer']:.0f}; {args.slots:,} slots"
        )
        report.show(report.make_table(title, COLUMNS, rows(figures["policies"])))


if __name__ == "__main__":
    report.run(main)

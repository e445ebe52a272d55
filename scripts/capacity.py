"""How many requests a Mac holds at once: Qwen2.5 by size, weights, KV precision and memory.

    python scripts/capacity.py                                  # ShareGPT's lengths
    python scripts/capacity.py --kv-bits 16 4 --dataset alpaca --window 8192
    python scripts/capacity.py --memory 36 48 --models 7B 14B --weights 4 --lengths mine.json

Each cell is "contiguous/paged": requests of average length in mid-answer, if each reserves the
window, and in blocks. Memory is counted as `mlx-paged doctor` does: 0.9 of the GPU's recommended
working set, minus the weights; activations come on top. That set is taken as 2/3 of the memory up
to 32 GB and 3/4 above, as macOS reports by default; recent versions allow more on large machines,
and `sudo sysctl iogpu.wired_limit_mb` raises it (--limit GB). K/V in 8 or 4 bits are as
`mlx-paged --kv-bits 8 --kv-group-size 64` stores them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measurements import lengths, report
from measurements.qwen import SHAPES, block_shape, weights_nbytes
from measurements.reservations import BLOCK_SIZE, WINDOW, Use, uses

from mlx_paged.engine.options import EngineOptions
from mlx_paged.engine.pool_size import num_pool_blocks
from mlx_paged.memory import MemoryLimit

GIB = 2**30
MEMORY = (8, 16, 24, 32, 48, 64, 96, 128, 192)
BITS = (16, 8, 4)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    lengths.add_arguments(parser, dataset="sharegpt")
    parser.add_argument("--memory", type=float, nargs="+", default=MEMORY, metavar="GB")
    parser.add_argument(
        "--limit", type=float, metavar="GB", help="the GPU's working set, for all of --memory"
    )
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument(
        "--weights", type=int, nargs="+", default=BITS, choices=BITS, metavar="BITS"
    )
    parser.add_argument(
        "--kv-bits", type=int, nargs="+", default=[16], choices=BITS, help="of K/V (default 16)"
    )
    parser.add_argument("--window", type=int, default=WINDOW, help="that contiguous ones reserve")
    parser.add_argument("--block-size", type=int, default=BLOCK_SIZE, metavar="TOKENS")
    report.add_arguments(parser)
    return parser.parse_args(argv)


def working_set(gigabytes: float) -> int:
    """Bytes that macOS recommends for the GPU, on a Mac of so much memory."""
    return int(gigabytes * GIB * (2 / 3 if gigabytes <= 32 else 3 / 4))


def num_slots(model: str, weights_bits: int, kv_bits: int, limit: MemoryLimit, size: int) -> int:
    """Tokens that the pool holds; 0 if the weights leave no room for a block."""
    block = block_shape(model, kv_bits, size)
    options = EngineOptions(block_size=size)
    weights = weights_nbytes(model, weights_bits)
    try:
        return size * num_pool_blocks(options, block, weights, lambda: 0, limit)
    except ValueError:
        return 0


def measure(
    lists: dict[str, list[lengths.Pair]], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """One row for each list, KV precision, model, weights and memory."""
    for name, pairs in lists.items():
        used = uses(pairs, args.window, args.block_size)
        for kv_bits in args.kv_bits:
            for model in args.models:
                for bits in args.weights:
                    for gigabytes in args.memory:
                        nbytes = int(args.limit * GIB) if args.limit else working_set(gigabytes)
                        limit = MemoryLimit(nbytes, f"a Mac of {gigabytes:g} GB")
                        slots = num_slots(model, bits, kv_bits, limit, args.block_size)
                        yield {
                            "lengths": name,
                            "model": f"Qwen2.5-{model}",
                            "weights_bits": bits,
                            "weights_bytes": weights_nbytes(model, bits),
                            "kv_bits": kv_bits,
                            "memory_gb": gigabytes,
                            "num_slots": slots,
                            "at_once": _at_once(used, slots),
                        }


def _at_once(used: dict[str, Use], slots: int) -> dict[str, int]:
    return {policy: use.at_once(slots) for policy, use in used.items()}


def table_rows(rows: list[dict[str, Any]], num_columns: int) -> Iterator[list[str]]:
    """Rows of one table, from measurements that have the memory as their innermost loop."""
    model = rows[0]["model"]
    for start in range(0, len(rows), num_columns):
        first = rows[start]
        if first["model"] != model:
            yield []
            model = first["model"]
        cells = [_cell(row["num_slots"], row["at_once"]) for row in rows[start:][:num_columns]]
        size = f"{first['weights_bytes'] / GIB:.1f}"
        yield [first["model"].removeprefix("Qwen2.5-"), str(first["weights_bits"]), size, *cells]


def _cell(slots: int, at_once: dict[str, int]) -> str:
    return f"{at_once['max']}/{at_once['paged']}" if slots else "-"


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Requests at once over memory, contiguous and paged, one panel a model; KV as first asked."""
    name, kv_bits = rows[0]["lengths"], rows[0]["kv_bits"]
    chosen = [r for r in rows if (r["lengths"], r["kv_bits"]) == (name, kv_bits)]
    models = list(dict.fromkeys(row["model"] for row in chosen))
    memory = sorted({row["memory_gb"] for row in chosen})
    num_columns = min(4, len(models))
    num_rows = -(-len(models) // num_columns)
    figure, axes = report.figure(num_rows, num_columns, 3.4 * num_columns, 3 * num_rows)
    for axis, model in zip(axes.flat, models, strict=False):
        bits = min(row["weights_bits"] for row in chosen)
        line = [r for r in chosen if r["model"] == model and r["weights_bits"] == bits]
        for style, policy, label in (
            (report.LINES[0], "paged", "paged"),
            (report.LINES[1], "oracle", "contiguous, length known"),
            (report.LINES[2], "max", "contiguous, whole window"),
        ):
            points = [(r["memory_gb"], r["at_once"][policy]) for r in line]
            points = [point for point in points if point[1]]
            if points:
                axis.plot(*zip(*points, strict=True), label=label, **style)
        axis.set(title=f"{model}, {bits}-bit weights", xscale="log", yscale="log", ylim=(0.8, 5e4))
        axis.set_xticks(memory if len(memory) <= 5 else memory[::2], minor=False)
        axis.xaxis.set_minor_locator(axis.xaxis.get_major_locator())
        axis.set_xlim(0.9 * memory[0], 1.1 * memory[-1])
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.set(xlabel="memory of the Mac (GB)", ylabel="requests at once")
    for axis in list(axes.flat)[len(models) :]:
        axis.axis("off")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    figure.suptitle(f"{name} lengths, {kv_bits}-bit K/V")
    report.save(figure, file)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    rows = list(measure(lengths.load(args), args))
    if args.plot:
        plot(rows, args.plot)
    if args.json:
        return report.print_json({"rows": rows})
    columns = ["size", "bits", "GiB", *(f"{gigabytes:g} GB" for gigabytes in args.memory)]
    for name in dict.fromkeys(row["lengths"] for row in rows):
        for kv_bits in args.kv_bits:
            part = [r for r in rows if r["lengths"] == name and r["kv_bits"] == kv_bits]
            title = (
                f"Qwen2.5: {name} requests at once, contiguous (window {args.window:,})/paged; "
                f"K/V in {kv_bits} bits"
            )
            report.show(report.make_table(title, columns, table_rows(part, len(args.memory))))


if __name__ == "__main__":
    report.run(main)

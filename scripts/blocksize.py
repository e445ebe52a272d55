"""What the block size trades: empty slots in last blocks, table length, and reuse of prefixes.

    python scripts/blocksize.py
    python scripts/blocksize.py --sizes 8 16 32 --lengths mine.json --plot blocksize.png

Small blocks leave fewer slots empty; large ones make shorter tables. A cached prefix is reused in
whole blocks, shown for a prompt of 96 tokens that shares its first 85 with one before, found by
this library's hash chain and by its radix tree.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measurements import lengths, report
from measurements.reservations import mean, num_slots_paged, use

from mlx_paged.blocks import BlockPool, Sequence
from mlx_paged.blocks.prefix import BlockIndex, HashIndex
from mlx_paged.blocks.prefix_cache import PrefixCache
from mlx_paged.blocks.radix import RadixIndex

SIZES = (1, 4, 8, 16, 32, 64, 128, 256)
PROMPT_TOKENS = 96
SHARED_TOKENS = 85

# Per block size: share of reserved slots in per cent, blocks per request, reused tokens.
PUBLISHED = {
    "ShareGPT": {
        1: (100.0, 424.0),
        4: (99.6, 106.4),
        8: (99.0, 53.4),
        16: (98.0, 27.0),
        32: (95.9, 13.7),
        64: (92.0, 7.1),
        128: (84.9, 3.8),
        256: (73.0, 2.2),
    },
    "Alpaca": {
        1: (100.0, 75.5),
        4: (97.9, 19.2),
        8: (95.3, 9.9),
        16: (90.4, 5.2),
        32: (82.4, 2.8),
        64: (68.7, 1.7),
        128: (48.8, 1.1),
        256: (27.2, 1.0),
    },
}
PUBLISHED_REUSED = {1: 85, 4: 84, 8: 80, 16: 80, 32: 64, 64: 64, 128: 0, 256: 0}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    lengths.add_arguments(parser)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, metavar="TOKENS", help="1 to 256"
    )
    report.add_arguments(parser)
    return parser.parse_args(argv)


def measure(lists: dict[str, list[lengths.Pair]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a block size, with the figures of each list."""
    rows = []
    for size in args.sizes:
        row: dict[str, Any] = {
            "block_size": size,
            "reused_by_hash": num_reused(HashIndex(size)),
            "reused_by_radix": num_reused(RadixIndex(size)),
            "published_reused": PUBLISHED_REUSED.get(size),
            "lists": {},
        }
        for name, pairs in lists.items():
            published = None if args.lengths else PUBLISHED.get(name, {}).get(size)
            row["lists"][name] = _figures(pairs, size, published)
        rows.append(row)
    return rows


def _figures(
    pairs: list[lengths.Pair], size: int, published: tuple[float, float] | None
) -> dict[str, Any]:
    used = use(pairs, lambda p, a: num_slots_paged(p, a, size))
    blocks, blocks_error = mean(-(-(p + a) // size) for p, a in pairs)
    figures: dict[str, Any] = {
        "share": used.share,
        "share_error": used.share_error,
        "blocks": blocks,
        "blocks_error": blocks_error,
    }
    if published:
        figures["published"] = {"share": published[0] / 100, "blocks": published[1]}
    return figures


def num_reused(index: BlockIndex) -> int:
    """Tokens of a prompt that the cache gives, after one that shares its first 85 of 96."""
    pool = BlockPool(-(-2 * PROMPT_TOKENS // index.block_size) + 1, index.block_size)
    cache = PrefixCache(pool, index)
    first = list(range(PROMPT_TOKENS))
    second = first[:SHARED_TOKENS] + [1000 + i for i in range(PROMPT_TOKENS - SHARED_TOKENS)]
    for token_ids in (first, second):
        sequence, chain = Sequence(pool, token_ids), index.chain()
        cache.attach(sequence, chain, cache.lookup(sequence, chain))
        num_found = sequence.num_cached_tokens
        sequence.reserve(sequence.num_tokens - num_found)
        sequence.num_cached_tokens = sequence.num_tokens
        cache.publish(sequence, chain)
        sequence.free()
    return num_found


def table_rows(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    for row in rows:
        cells = [str(row["block_size"])]
        for figures in row["lists"].values():
            published = figures.get("published", {})
            cells += [
                f"{figures['share']:.1%}",
                f"{published['share']:.1%}" if published else "",
                f"{figures['blocks']:.1f}",
                f"{published['blocks']:.1f}" if published else "",
            ]
        given = row["published_reused"]
        cells += [str(row["reused_by_hash"]), "" if given is None else str(given)]
        yield [*cells, str(row["reused_by_radix"])]


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Use of slots and blocks per request over block sizes."""
    figure, axes = report.figure(1, 2, 10, 3.6)
    sizes = [row["block_size"] for row in rows]
    for i, name in enumerate(rows[0]["lists"]):
        figures = [row["lists"][name] for row in rows]
        style = report.LINES[i]
        shares = [100 * f["share"] for f in figures]
        axes[0, 0].plot(sizes, shares, label=name, **style)
        axes[0, 1].plot(sizes, [f["blocks"] for f in figures], label=name, **style)
    axes[0, 0].set(title="use of memory", ylabel="slots with a token (%)", ylim=(0, 105))
    axes[0, 1].set(title="length of the table", ylabel="blocks per request", yscale="log")
    axes[0, 1].yaxis.set_major_formatter("{x:.0f}")
    for axis in axes[0]:
        axis.set_xlabel("block size (tokens)")
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.legend()
    report.save(figure, file)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    rows = measure(lengths.load(args), args)
    if args.plot:
        plot(rows, args.plot)
    if args.json:
        return report.print_json({"rows": rows})
    columns = ["block size"]
    for name in rows[0]["lists"]:
        columns += [f"{name}: slots with a token", "published", "blocks per request", "published"]
    columns += ["tokens of 85 reused", "published", "by radix"]
    report.show(report.make_table("By block size", columns, table_rows(rows)))


if __name__ == "__main__":
    report.run(main)

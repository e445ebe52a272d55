"""What K and V in 8 or 4 bits save, and what they cost: bytes, requests, perplexity of a text.

    python scripts/kv_bits.py                                 # Python's own reference, 4096 tokens
    python scripts/kv_bits.py --text book.txt --tokens 16384 --window 8192
    python scripts/kv_bits.py --model mlx-community/Qwen2.5-0.5B-Instruct-4bit --group-size 64

The text is read in windows, a window in chunks, so that every chunk but a window's first attends
over K and V as the pool stores them. The first row is the model's own precision: float32 on a CPU
unless --dtype says otherwise. Bytes and requests are those of a pool whose floats have 16 bits.
Attention's error is that of each layer's output, on the queries, keys and values of the first row.
Without --text it reads the language reference that comes with every Python, whose words differ a
little from version to version.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from measurements import lengths, report
from measurements.perplexity import AttentionError, Floats, Reading, surprises
from measurements.reservations import uses

from mlx_paged.cache.kv_format import KV_BITS, KV_GROUP_SIZES, BlockShape, KVFormat
from mlx_paged.loader import DTYPES, Loaded, load

GIB = 2**30
BITS = (16, *KV_BITS)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="smollm2, a folder or a hub id")
    parser.add_argument("--dtype", choices=DTYPES, help="that the model computes in")
    parser.add_argument("--group-size", type=int, choices=KV_GROUP_SIZES, default=32)
    parser.add_argument("--text", type=Path, metavar="FILE", help="a long text, UTF-8")
    parser.add_argument("--tokens", type=_at_least(2), default=4096, metavar="N", help="to read")
    parser.add_argument("--window", type=_at_least(2), default=2048, metavar="TOKENS")
    parser.add_argument("--chunk", type=_at_least(1), default=32, metavar="TOKENS")
    parser.add_argument(
        "--kv-memory", type=float, default=1.0, metavar="GIB", help="of the pool that requests fit"
    )
    lengths.add_arguments(parser, dataset="sharegpt")
    report.add_arguments(parser)
    return parser.parse_args(argv)


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {least}")
        return int(text)

    return parse


def read_text(file: Path | None) -> str:
    """The file's, or the reference of Python's language that pydoc has."""
    if file is not None:
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} can't be read as text: {error}") from error
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def measure(loaded: Loaded, token_ids: list[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each of `BITS`."""
    reading = Reading(loaded.model, token_ids, args.window, args.chunk)
    formats = [_format(loaded.dtype, bits, args.group_size) for bits in BITS]
    errors = [AttentionError(kv_format) for kv_format in formats[1:]]
    losses: list[Floats] = []
    with report.progress() as bar:
        for kv_format in formats:
            task = bar.add_task(str(kv_format), total=reading.num_chunks)
            watching = errors if kv_format.bits is None else ()
            losses.append(surprises(reading, kv_format, lambda t=task: bar.advance(t), watching))
    pairs = next(iter(lengths.load(args).values()))
    slots_needed = uses(pairs)["paged"]
    rows = []
    for bits, loss, error in zip(BITS, losses, [None, *errors], strict=True):
        stored = _format(mx.float16, bits, args.group_size)
        block = BlockShape.of_model(loaded.model.args, reading.block_size, stored)
        num_blocks = int(args.kv_memory * GIB) // block.nbytes
        more = loss - losses[0]
        rows.append(
            {
                "bits": bits,
                "bytes_per_token": block.nbytes // reading.block_size,
                "num_slots": num_blocks * reading.block_size,
                "requests": slots_needed.at_once(num_blocks * reading.block_size),
                "perplexity": math.exp(loss.mean()),
                "perplexity_change": math.expm1(more.mean()),
                "perplexity_change_error": float(more.std() / math.sqrt(len(more))),
                "attention_error": error.relative if error else 0.0,
                "attention_error_worst_layer": error.worst_layer if error else 0.0,
            }
        )
    return rows


def _format(dtype: mx.Dtype, bits: int, group_size: int) -> KVFormat:
    return KVFormat(dtype, None if bits == 16 else bits, group_size)


def table_row(row: dict[str, Any], first: dict[str, Any]) -> list[str]:
    is_first = row is first
    share = row["bytes_per_token"] / first["bytes_per_token"]
    change = f"{row['perplexity_change']:+.2%} ± {row['perplexity_change_error']:.2%}"
    error = f"{row['attention_error']:.2%}, {row['attention_error_worst_layer']:.2%}"
    return [
        str(row["bits"]),
        f"{row['bytes_per_token']:,}",
        f"{share:.3f}",
        f"{row['requests']:,}",
        f"{row['perplexity']:.4f}",
        "" if is_first else change,
        "" if is_first else error,
    ]


def plot(rows: list[dict[str, Any]], title: str, file: Path) -> None:
    """Perplexity over bytes of a token, and the requests that fit."""
    figure, axes = report.figure(1, 2, 9, 3.6)
    curve, bars = axes.flat
    nbytes = [row["bytes_per_token"] / 1024 for row in rows]
    curve.plot(nbytes, [row["perplexity"] for row in rows], **report.LINES[0])
    for x, row in zip(nbytes, rows, strict=True):
        curve.annotate(
            f"{row['bits']} bits",
            (x, row["perplexity"]),
            xytext=(6, 6),
            textcoords="offset points",
        )
    curve.set(xlabel="K and V of a token (KiB)", ylabel="perplexity", xlim=(0, 1.2 * max(nbytes)))
    curve.margins(y=0.2)
    bars.bar(
        [f"{row['bits']} bits" for row in rows], [row["requests"] for row in rows], color="0.6"
    )
    bars.set(ylabel="requests at once")
    bars.grid(axis="x", visible=False)
    figure.suptitle(title)
    report.save(figure, file)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    text = read_text(args.text)
    loaded = load(args.model, args.dtype)
    # Four characters make a token or so; a tokenizer takes its time for more than is needed.
    text = text[: 16 * args.tokens]
    # Longer than the model's context, which the tokenizer would remark on.
    token_ids = list(loaded.tokenizer.encode(text, verbose=False))[: args.tokens]
    if len(token_ids) < 2:
        raise ValueError("the text has fewer than 2 tokens, so there is nothing to predict")
    args.window = min(args.window, len(token_ids))
    rows = measure(loaded, token_ids, args)
    source = args.text.name if args.text else "Python's language reference"
    read = f"{len(token_ids):,} tokens of {source}"
    title = f"{loaded.description}; {read}"
    if args.plot:
        dtype = str(loaded.dtype).removeprefix("mlx.core.")
        plot(rows, f"{args.model} in {dtype}; {read}", args.plot)
    if args.json:
        return report.print_json(
            {
                "model": loaded.description,
                "text": source,
                "num_tokens": len(token_ids),
                "window": args.window,
                "chunk": args.chunk,
                "group_size": args.group_size,
                "kv_memory_gib": args.kv_memory,
                "rows": rows,
            }
        )
    columns = [
        "K/V bits",
        "bytes/token",
        "of 16 bits",
        f"requests in {args.kv_memory:g} GiB",
        "perplexity",
        "change",
        "attention error, worst layer",
    ]
    report.show(report.make_table(title, columns, [table_row(row, rows[0]) for row in rows]))


if __name__ == "__main__":
    report.run(main)

"""The command line: what is attended over, by which launch, and what is written."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from mlx_paged.kernels import tuned
from mlx_paged.kernels.launch import (
    HEAD_DIMS,
    MAX_BLOCK_SIZE,
    DecodeLaunch,
    DecodeShape,
    Splits,
)

from .workload import Workload, drawn_lens, equal_lens

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PREFILL_TOKENS = 512
DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}


@dataclass(frozen=True)
class Parsed:
    options: argparse.Namespace
    workload: Workload
    launch: DecodeLaunch


def parse(argv: list[str] | None, description: str) -> Parsed:
    """Exits with a sentence for options that make no sense together."""
    parser = _parser(description)
    options = parser.parse_args(argv)
    if options.plot and options.no_times:
        parser.error("--plot shows times, and --no-times leaves them out")
    if options.prefill and (options.plot or options.sweep or options.lengths):
        parser.error("--prefill has a table alone, of sequences of --tokens tokens each")
    if options.prefill and options.prefill > options.tokens:
        parser.error(f"--prefill {options.prefill} is more than the {options.tokens} --tokens")
    try:
        shape = _shape(options)
        workload = Workload(shape, _lens(options), options.seed)
        return Parsed(options, workload, _launch(options, shape))
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    work = parser.add_argument_group("what is attended over")
    for name, default, help_text in (
        ("sequences", 16, "in one decode step"),
        ("tokens", 4096, "cached by each sequence"),
        ("query-heads", 12, "a multiple of the KV heads"),
        ("kv-heads", 2, "whose rows are read"),
    ):
        text = f"{help_text} (default {default})"
        work.add_argument(f"--{name}", type=_positive, default=default, metavar="N", help=text)
    work.add_argument("--head-dim", type=int, default=128, choices=HEAD_DIMS, help="default 128")
    work.add_argument("--dtype", default="float16", choices=DTYPES, help="default float16")
    work.add_argument("--kv-bits", type=int, choices=(8, 4), help="quantised keys and values")
    work.add_argument("--kv-group-size", type=int, choices=(32, 64), default=32, help="default 32")
    work.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="a JSON list of [prompt, answer] tokens: sequences are such requests at a random step",
    )
    work.add_argument(
        "--block-sizes",
        type=_block_size,
        nargs="+",
        default=BLOCK_SIZES,
        metavar="N",
        help=f"default {' '.join(map(str, BLOCK_SIZES))}",
    )
    work.add_argument(
        "--prefill",
        type=_positive,
        nargs="?",
        const=PREFILL_TOKENS,
        metavar="N",
        help="the prefill kernel instead: the last N tokens of each sequence are new "
        f"(without N {PREFILL_TOKENS})",
    )
    work.add_argument("--seed", type=int, default=0, help="of values, lengths and block order")
    launch = parser.add_argument_group("launch choices, by default what suits chip and shape")
    for name, help_text in (
        ("heads", "query heads of a SIMD group, which share its loads"),
        ("lanes", "lanes that share a row: 4, 8, 16 or 32"),
        ("keys", "rows that a lane holds at once"),
        ("slices", "SIMD groups that divide a split's tokens"),
        ("split-tokens", "tokens of one threadgroup, whatever the length"),
    ):
        launch.add_argument(f"--{name}", type=_positive, metavar="N", help=help_text)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--sweep", action="store_true", help="try the launch choices on this Mac and keep the best"
    )
    output.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="rows as JSON, to stdout without FILE"
    )
    output.add_argument(
        "--plot", type=Path, metavar="FILE", help="a picture of times by block size"
    )
    output.add_argument("--no-times", action="store_true", help="error and counted bytes alone")
    return parser


def _shape(options: argparse.Namespace) -> DecodeShape:
    if options.query_heads % options.kv_heads:
        raise ValueError(
            f"{options.query_heads} query heads can't share {options.kv_heads} KV heads evenly"
        )
    dtype = DTYPES[options.dtype]
    if options.kv_bits and options.head_dim % options.kv_group_size:
        raise ValueError(
            f"heads of {options.head_dim} don't divide into groups of {options.kv_group_size}"
        )
    return DecodeShape(
        options.query_heads,
        options.kv_heads,
        options.head_dim,
        dtype,
        options.kv_bits,
        options.kv_group_size,
    )


def _lens(options: argparse.Namespace) -> tuple[int, ...]:
    if options.lengths is None:
        return equal_lens(options.sequences, options.tokens)
    return drawn_lens(options.lengths, options.sequences, options.seed)


def _launch(options: argparse.Namespace, shape: DecodeShape) -> DecodeLaunch:
    """The default launch, but for what the options say."""
    named = {name: getattr(options, name) for name in ("heads", "lanes", "keys", "slices")}
    choices = {name: value for name, value in named.items() if value is not None}
    if options.split_tokens is not None:
        choices["splits"] = Splits(options.split_tokens, options.split_tokens, 1)
    launch = replace(tuned.choose(shape), **choices)
    launch.check(shape.head_dim, shape.num_quant_groups)
    return launch


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def _block_size(text: str) -> int:
    number = _positive(text)
    if number > MAX_BLOCK_SIZE:
        raise argparse.ArgumentTypeError(f"{text} is over {MAX_BLOCK_SIZE} tokens")
    return number

"""Lengths of requests: lists that come with the scripts, one's own, or from the data sets."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

Pair = tuple[int, int]

DATA = Path(__file__).resolve().parents[1] / "data"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
NAMES = {"sharegpt": "ShareGPT", "alpaca": "Alpaca"}
NUM_REQUESTS = 5000


def add_arguments(parser: argparse.ArgumentParser, dataset: str | None = None) -> None:
    """Options that choose the lengths, for `load`; `dataset` is the default, None for both."""
    group = parser.add_argument_group("lengths")
    group.add_argument(
        "--dataset",
        choices=[*NAMES, "both"],
        default=dataset or "both",
        help="whose lengths (default: %(default)s)",
    )
    group.add_argument(
        "--source",
        choices=["committed", "hub"],
        default="committed",
        help="the lists in scripts/data, or the data sets, loaded and tokenized anew "
        "(pip install -e '.[datasets]')",
    )
    group.add_argument(
        "--lengths", type=Path, metavar="FILE", help="JSON of one's own: [[prompt, answer], ...]"
    )
    group.add_argument(
        "--requests", type=_positive, metavar="N", help="only the first N of each list"
    )


def load(args: argparse.Namespace) -> dict[str, list[Pair]]:
    """(prompt, answer) tokens of requests, by the name of their list."""
    if args.lengths:
        lists = {args.lengths.stem: read_pairs(args.lengths)}
    else:
        chosen = NAMES if args.dataset == "both" else [args.dataset]
        lists = {NAMES[name]: _from(args.source, name) for name in chosen}
    return {name: pairs[: args.requests] for name, pairs in lists.items()}


def read_pairs(file: Path) -> list[Pair]:
    """The pairs in a JSON file.

    Raises:
        ValueError: an entry isn't a pair of positive numbers.
    """
    rows = _read(file)
    for i, row in enumerate(rows):
        if not _are_counts(row, 1) or len(row) != 2:
            raise ValueError(
                f"entry {i} of {file} is {json.dumps(row)}; expected is [prompt tokens, answer "
                "tokens], both at least 1"
            )
    return [(prompt, answer) for prompt, answer in rows]


def read_conversations(file: Path) -> list[list[Pair]]:
    """Conversations of a JSON file of [prompt, answer, prompt, answer, ...], as lists of pairs."""
    rows = _read(file)
    for i, row in enumerate(rows):
        if not _are_counts(row, 0) or len(row) % 2 or not row:
            raise ValueError(
                f"entry {i} of {file} is not [prompt tokens, answer tokens, prompt tokens, ...]"
            )
    return [list(zip(row[::2], row[1::2], strict=True)) for row in rows]


def draw(pairs: list[Pair], num_requests: int = NUM_REQUESTS) -> list[Pair]:
    """The requests that vLLM's benchmark would keep, shuffled, the first `num_requests`."""
    kept = [
        (prompt, answer)
        for prompt, answer in pairs
        if prompt >= 4 and answer >= 4 and prompt <= 1024 and prompt + answer <= 2048
    ]
    random.Random(0).shuffle(kept)
    return kept[:num_requests]


def _from(source: str, name: str) -> list[Pair]:
    if source == "hub":
        from measurements import hub

        return draw(hub.pairs(name))
    return read_pairs(DATA / f"{name}.json")


def _read(file: Path) -> list[Any]:
    try:
        rows = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"{file} can't be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{file} holds no list of lengths")
    return rows


def _are_counts(row: Any, least: int) -> bool:
    return isinstance(row, list) and all(type(n) is int and n >= least for n in row)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number

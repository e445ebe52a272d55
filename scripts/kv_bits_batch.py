"""Which answers of a batch equal those given alone, by the bits of K and V, and why some don't.

    python scripts/kv_bits_batch.py                       # 16 prompts on the demo model
    python scripts/kv_bits_batch.py --bits 4 --tokens 64

Each prompt is read alone, then answers greedily three times: with all others in one batch; alone;
and alone in a batch of as many rows, whose others hold one token each. Matrix products of one row
and of sixteen may add in another order, so that a last bit differs. Rounding to codes makes a whole
step of that now and then. As long as the number of rows is the same, no bit differs.
"""

from __future__ import annotations

import argparse
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from measurements import report

from mlx_paged.blocks import Sequence
from mlx_paged.cache import KVPool, PagedCache, step
from mlx_paged.cache.kv_format import KV_BITS
from mlx_paged.loader import DTYPES, Loaded, load

BITS = (16, *KV_BITS)
BLOCK_SIZE = 16
TEXT = "What one has to know about {} is that"
SUBJECTS = (
    "rain",
    "bread",
    "a violin",
    "the moon",
    "a tax",
    "iron",
    "chess",
    "a harbour",
    "wool",
    "an echo",
    "a hospital",
    "salt",
    "a treaty",
    "glass",
    "a glacier",
    "paper",
)

# Inputs and outputs of a step's operations, with a row for each sequence.
Trace = list[tuple[str, npt.NDArray[np.float32], npt.NDArray[np.float32]]]

HOW = ("in the batch", "alone", "alone among as many rows")


def answers(
    model: nn.Module, prompts: list[list[int]], num_tokens: int, bits: int | None, how: str
) -> list[list[int]]:
    """Greedy, each prompt read alone whatever comes then."""
    pool, sequences = read(model, prompts, num_tokens, bits)
    for rows in batches(pool, sequences, how):
        for _ in range(num_tokens):
            logits = step(model, pool, rows, [1] * len(rows))
            drawn = np.array(logits.argmax(axis=-1))
            for sequence, token_id in zip(rows, drawn, strict=True):
                if any(sequence is s for s in sequences):
                    sequence.token_ids.append(int(token_id))
                else:
                    sequence.num_cached_tokens = 0
    return [s.token_ids[len(prompt) :] for s, prompt in zip(sequences, prompts, strict=True)]


def read(
    model: nn.Module, prompts: list[list[int]], num_tokens: int, bits: int | None
) -> tuple[KVPool, list[Sequence]]:
    """A pool with room for answers, and all but the last token of each prompt in it."""
    longest = max(map(len, prompts)) + num_tokens
    num_blocks = len(prompts) * (-(-longest // BLOCK_SIZE) + 1)
    pool = KVPool.for_model(model, num_blocks, BLOCK_SIZE, kv_bits=bits)
    sequences = [Sequence(pool.blocks, prompt) for prompt in prompts]
    for sequence in sequences:
        step(model, pool, [sequence], [sequence.num_tokens - 1])
    return pool, sequences


def batches(pool: KVPool, sequences: list[Sequence], how: str) -> list[list[Sequence]]:
    """Who decodes with whom, one batch after the other."""
    if how == "in the batch":
        return [sequences]
    if how == "alone":
        return [[sequence] for sequence in sequences]
    idle = [Sequence(pool.blocks, [0]) for _ in sequences]
    return [[*idle[:i], sequence, *idle[i + 1 :]] for i, sequence in enumerate(sequences)]


def first_difference(
    model: nn.Module, prompts: list[list[int]], bits: int | None
) -> dict[str, Any] | None:
    """The first operation of a decode step that gives rows other bits alone than in the batch.

    Rows count whose inputs to it are equal to the last bit. None if there is no such operation.
    """
    pool, sequences = read(model, prompts, 1, bits)
    batch = traced(model, pool, sequences)
    alone = [traced(model, pool, [sequence]) for sequence in sequences]
    for operation, (name, inputs, outputs) in enumerate(batch):
        singles = [trace[operation] for trace in alone]
        differences = [
            float(np.abs(outputs[row] - output[0]).max() / np.abs(output[0]).max())
            for row, (_, given, output) in enumerate(singles)
            if np.array_equal(inputs[row], given[0])
        ]
        num_rows = sum(difference > 0 for difference in differences)
        if num_rows:
            return {"operation": name, "rows": num_rows, "difference": max(differences)}
    return None


def traced(model: nn.Module, pool: KVPool, sequences: list[Sequence]) -> Trace:
    """The matrix products and attention of a step that decodes one token, which is dropped."""
    trace: list[tuple[str, mx.array, mx.array]] = []
    names = {id(module): name for name, module in model.named_modules()}
    linear, attend = nn.Linear.__call__, PagedCache.attend

    def call(module: nn.Linear, x: mx.array) -> mx.array:
        output = linear(module, x)
        trace.append((names[id(module)], x, output))
        return output

    def attended(cache: PagedCache, layer: int, *arguments: Any) -> mx.array:
        output = attend(cache, layer, *arguments)
        given = mx.concatenate([array.flatten(1) for array in arguments[:3]], axis=1)
        trace.append((f"attention of layer {layer}", given, output))
        return output

    with patch.object(nn.Linear, "__call__", call), patch.object(PagedCache, "attend", attended):
        step(model, pool, sequences, [1] * len(sequences))
    for sequence in sequences:
        sequence.trim(1)
    return [(name, _floats(given), _floats(output)) for name, given, output in trace]


def _floats(array: mx.array) -> npt.NDArray[np.float32]:
    return np.array(array.astype(mx.float32))


def measure(loaded: Loaded, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each format of K and V."""
    prompts = [loaded.tokenizer.encode(TEXT.format(subject)) for subject in SUBJECTS]
    rows = []
    with report.progress() as bar:
        task = bar.add_task("answering", total=len(args.bits) * len(HOW))
        for bits in args.bits:
            stored = None if bits == 16 else bits
            row: dict[str, Any] = {"bits": bits, "answers": len(prompts)}
            batch: list[list[int]] = []
            for how in HOW:
                given = answers(loaded.model, prompts, args.tokens, stored, how)
                batch = batch or given
                row[how] = sum(a == b for a, b in zip(given, batch, strict=True))
                bar.advance(task)
            row["first_difference"] = first_difference(loaded.model, prompts, stored)
            rows.append(row)
    return rows


def table_row(row: dict[str, Any]) -> list[str]:
    first = row["first_difference"]
    why = "none"
    if first:
        why = f"{first['operation']}, {first['rows']} rows by up to {first['difference']:.1e}"
    return [str(row["bits"]), *(f"{row[how]} of {row['answers']}" for how in HOW[1:]), why]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="smollm2, a folder or a hub id")
    parser.add_argument("--dtype", choices=DTYPES, help="that the model computes in")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="of each answer")
    parser.add_argument(
        "--bits", type=int, nargs="+", choices=BITS, default=BITS, help="of K and V"
    )
    report.add_arguments(parser, plot=False)
    args = parser.parse_args(argv)
    loaded = load(args.model, args.dtype)
    rows = measure(loaded, args)
    if args.json:
        return report.print_json({"model": loaded.description, "tokens": args.tokens, "rows": rows})
    title = f"{loaded.description}; greedy answers of {args.tokens} tokens, equal to the batch's"
    columns = ["K/V bits", *HOW[1:], "first operation whose bits differ alone"]
    report.show(report.make_table(title, columns, map(table_row, rows)))


if __name__ == "__main__":
    report.run(main)

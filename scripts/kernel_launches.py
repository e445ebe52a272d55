"""What a step launches in each layer, and what one kernel for rope and write would save of it.

    python scripts/kernel_launches.py                  # Qwen2.5-1.5B's heads and sizes
    python scripts/kernel_launches.py --kv-bits 8      # a quantised pool

Launches are the operations of a step's graph that start work on Metal; views start none. They are
counted on any machine: what is one operation on a GPU alone (rope, the norms, the attention
kernels, quantising) is counted where the model calls it. Bytes are those that the operations have
to move, weights and K and V being read once.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from measurements import report

from mlx_paged.cache import Batch, KVPool, PagedCache
from mlx_paged.cache.kv_format import KV_BITS, KVFormat
from mlx_paged.kernels import metal
from mlx_paged.models import qwen2

ITEMSIZE = mx.float16.size
BLOCK_SIZE = 16
PROMPT_TOKENS = 512

# They say how memory is read, and start nothing.
VIEWS = {"Broadcast", "Depends", "ExpandDims", "Reshape", "Slice", "Squeeze", "Transpose"}
VIEWS |= {"Flatten", "Unflatten", "Full"}

ROPE_AND_WRITE = ("RoPE", "Quantize", "ScatterAxis")


@dataclass(frozen=True)
class Sizes:
    """A model of Qwen2's architecture, by default Qwen2.5-1.5B."""

    hidden_size: int = 1536
    num_layers: int = 28
    num_heads: int = 12
    num_kv_heads: int = 2
    head_dim: int = 128
    intermediate_size: int = 8960
    vocab_size: int = 151936

    @property
    def weight_elements(self) -> int:
        """That a decode step reads, the embeddings as the last layer."""
        heads = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        projections = self.hidden_size * (heads + self.num_heads * self.head_dim)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (projections + mlp) + self.hidden_size * self.vocab_size


def rope_and_write_bytes(sizes: Sizes, kv_format: KVFormat, is_fused: bool) -> int:
    """What rope and the write of K and V read and write of a token, in one layer.

    Fused, turned keys go to the pool and nowhere else.
    """
    queries = sizes.num_heads * sizes.head_dim * ITEMSIZE
    keys = sizes.num_kv_heads * sizes.head_dim * ITEMSIZE
    stored = sizes.num_kv_heads * kv_format.row_nbytes(sizes.head_dim)
    if is_fused:
        return queries + 2 * keys + queries + 2 * stored
    rope = 2 * (queries + keys)
    codes = 0 if kv_format.bits is None else 4 * stored  # written by one launch, read by others
    return rope + 2 * keys + codes + 2 * stored


def launches(
    num_layers: int, rows: list[tuple[int, int]], weight_bits: int | None, kv_bits: int | None
) -> Counter[str]:
    """Of a step over rows of (cached, new) tokens, by the operation's name."""
    model = _model(num_layers, weight_bits)
    pool = KVPool.for_model(model, 1, BLOCK_SIZE, mx.float16, kv_bits=kv_bits)
    tables = [([0] * -(-(cached + new) // BLOCK_SIZE), cached, new) for cached, new in rows]
    batch = Batch.of(tables, BLOCK_SIZE)
    tokens, last = mx.zeros(batch.num_tokens, mx.int32), batch.cu_seqlens_q[1:] - 1
    mx.eval(tokens, last)
    with stand_ins() as called:
        logits = model(tokens, PagedCache(pool, batch, "metal"), last)
    return called + _operations([logits, *pool.arrays])


def per_layer(*step: Any) -> Counter[str]:
    """Of one layer of such a step."""
    return launches(2, *step) - launches(1, *step)


def with_one_kernel(counts: Counter[str]) -> int:
    """Launches if rope and the write of K and V were one."""
    return counts.total() - sum(counts[name] for name in ROPE_AND_WRITE) + 1


@contextmanager
def stand_ins() -> Iterator[Counter[str]]:
    """Count what is one launch on Metal, and put arrays of the right shape in its place."""
    called: Counter[str] = Counter()

    def stand_in(name: str, inputs: list[mx.array], shapes: list[Any], dtypes: list[Any]) -> Any:
        called[name] += 1
        outputs = [mx.zeros(*spec) for spec in zip(shapes, dtypes, strict=True)]
        mx.eval(outputs)
        return mx.depends(outputs, inputs)

    def like(name: str) -> Callable[..., mx.array]:
        def call(x: mx.array, *_: Any, **__: Any) -> mx.array:
            return stand_in(name, [x], [x.shape], [x.dtype])[0]

        return call

    def quantize(x: mx.array, group_size: int, bits: int) -> Any:
        groups = (*x.shape[:-1], x.shape[-1] // group_size)
        words = (*x.shape[:-1], x.shape[-1] * bits // 32)
        return stand_in("Quantize", [x], [words, groups, groups], [mx.uint32, x.dtype, x.dtype])

    def make_kernel(name: str, **_: Any) -> Callable[..., list[mx.array]]:
        kernel = name.split("_")[0]

        def launch(inputs: list[mx.array], output_shapes: Any, output_dtypes: Any, **_: Any) -> Any:
            return stand_in(f"our {kernel}", inputs, output_shapes, output_dtypes)

        return launch

    with (
        patch.object(mx.fast, "rope", like("RoPE")),
        patch.object(mx.fast, "rms_norm", like("RMSNorm")),
        patch.object(mx, "quantize", quantize),
        metal.using(make_kernel),
    ):
        yield called


def _operations(outputs: list[mx.array]) -> Counter[str]:
    """Of a graph, without views. Joining arrays is a launch for each."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.dot"
        mx.export_to_dot(str(file), *outputs)
        graph = file.read_text()
    labels = dict(re.findall(r'(\d+) \[label ="(.*?)"', graph))
    inputs = Counter(re.findall(r'" -> (\d+)', graph))
    outputs_of = Counter(re.findall(r'(\d+) -> "', graph))  # a compiled function is one node
    counts: Counter[str] = Counter()
    for node, label in labels.items():
        name = "Compiled" if label.startswith("Compiled") else label.split()[0]
        if name not in VIEWS:
            counts[name] += inputs[node] if name == "Concatenate" else outputs_of[node]
    return counts


def _model(num_layers: int, weight_bits: int | None) -> nn.Module:
    """One whose shapes are small where they don't matter."""
    sizes = Sizes()
    args = {
        "model_type": "qwen2",
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": num_layers,
        "intermediate_size": 64,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "rms_norm_eps": 1e-6,
        "vocab_size": 64,
    }
    model = qwen2.Model(qwen2.ModelArgs.from_dict(args))
    model.set_dtype(mx.float16)
    if weight_bits:
        nn.quantize(model, 64, weight_bits)
    mx.eval(model.parameters())
    return model


def step_bytes(sizes: Sizes, kv_format: KVFormat, num_rows: int, context: int) -> dict[str, int]:
    """What a decode step moves, in all layers."""
    row = 2 * sizes.num_kv_heads * kv_format.row_nbytes(sizes.head_dim)
    tokens = sizes.num_layers * num_rows
    return {
        "weights": sizes.weight_elements * ITEMSIZE,
        "attention": tokens * context * row,
        "rope_and_write": tokens * rope_and_write_bytes(sizes, kv_format, is_fused=False),
        "fused": tokens * rope_and_write_bytes(sizes, kv_format, is_fused=True),
    }


def measure(kv_bits: int | None) -> dict[str, Any]:
    sizes, kv_format = Sizes(), KVFormat(mx.float16, kv_bits)
    steps = {
        "decode": ([(1023, 1)], None, kv_bits),
        "decode, weights of 4 bits": ([(1023, 1)], 4, kv_bits),
        "prefill": ([(0, PROMPT_TOKENS)], None, kv_bits),
        "both in one step": ([(1023, 1), (0, PROMPT_TOKENS)], None, kv_bits),
    }
    layers = {name: per_layer(*step) for name, step in steps.items()}
    rows = [
        {"rows": num_rows, "context": context, **step_bytes(sizes, kv_format, num_rows, context)}
        for num_rows in (1, 32)
        for context in (1024, 8192)
    ]
    return {
        "kv": str(kv_format),
        "launches_per_layer": layers,
        "launches_per_layer_with_one_kernel": {
            name: with_one_kernel(counts) for name, counts in layers.items()
        },
        "bytes_per_step": rows,
    }


def show(result: dict[str, Any]) -> None:
    layers = result["launches_per_layer"]
    names = sorted({name for counts in layers.values() for name in counts})
    table = [[name, *(counts[name] or "" for counts in layers.values())] for name in names]
    totals = ["all", *(counts.total() for counts in layers.values())]
    fused = ["with one kernel for rope and write", *map(with_one_kernel, layers.values())]
    title = f"Launches in each layer; K and V in {result['kv']}"
    report.show(report.make_table(title, ["operation", *layers], [*table, [], totals, fused]))
    rows = []
    for row in result["bytes_per_step"]:
        moved = row["weights"] + row["attention"] + row["rope_and_write"]
        saved = row["rope_and_write"] - row["fused"]
        rows.append(
            [
                f"{row['rows']} x {row['context']:,}",
                *(f"{row[name] / 1e6:,.3f}" for name in ("weights", "attention")),
                *(f"{row[name] / 1e6:,.3f}" for name in ("rope_and_write", "fused")),
                f"{saved / moved:.4%}",
            ]
        )
    columns = ["decode step", "weights", "attention", "rope, write", "one kernel", "it saves"]
    report.show(report.make_table("MB moved by a step of Qwen2.5-1.5B in float16", columns, rows))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kv-bits", type=int, choices=KV_BITS, help="quantised keys and values")
    report.add_arguments(parser, plot=False)
    args = parser.parse_args(argv)
    result = measure(args.kv_bits)
    if args.json:
        return report.print_json(result)
    show(result)


if __name__ == "__main__":
    report.run(main)

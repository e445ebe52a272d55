"""Attention over scattered blocks, by block size: time, bandwidth, bytes loaded, error.

    python scripts/kernel.py                      # 16 x 4,096 tokens, Qwen2.5-1.5B's heads
    python scripts/kernel.py --plot kernel.png --json kernel.json
    python scripts/kernel.py --sweep              # on a Mac: find this chip's best launch, keep it
    python scripts/kernel.py --lengths scripts/data/sharegpt.json

On a Mac the decode kernel and a plain copy are timed against their contiguous variants, and MLX's
own attention beside them. Elsewhere nothing about Metal can be timed: then the gather path's times
on this machine's processor are real, and the kernel's error and bytes are counted by running its
text at a reduced size.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from kernel_bench import counts, report
from kernel_bench.gather_arms import GatherArms
from kernel_bench.metal_arms import MetalArms
from kernel_bench.options import parse
from kernel_bench.timing import Arm, Clock, gb_per_s, measure, refuse_impossible
from kernel_bench.workload import MAX_ERROR, ORDERS, Workload, max_error
from rich.console import Console
from rich.progress import track

from mlx_paged.kernels import metal, tuned
from mlx_paged.kernels.launch import DecodeLaunch

COUNTED_TOKENS = 1024
ON_CPU = Clock(warm_s=0.2, windows=3, window_s=0.2)

console = Console(stderr=True)


def main(argv: list[str] | None = None) -> int:
    parsed = parse(argv, __doc__ or "")
    options, workload, launch = parsed.options, parsed.workload, parsed.launch
    if options.sweep:
        return sweep(workload)
    console.print(f"{describe(workload)}; {launch}", soft_wrap=True)
    rows: list[dict[str, Any]] = [
        {"block_size": size, "order": order} for size in options.block_sizes for order in ORDERS
    ]
    result: dict[str, Any] = {
        "machine": machine(),
        "sequences": len(workload.lens),
        "cached_tokens": sum(workload.lens),
        "shape": str(workload.shape),
        "launch": launch.to_dict(),
        "rows": rows,
    }
    if not options.no_times:
        add_times = metal_times if metal.is_available() else gather_times
        result["contiguous"] = add_times(rows, workload, launch)
    result["counted"] = add_counts(rows, workload.reduced(COUNTED_TOKENS), launch)
    show(result, options)
    bound = MAX_ERROR[workload.shape.dtype]
    if any(not row.get("max_error", 0) <= bound for row in rows):
        console.print(f"wrong results: an error is above {bound:g}, and no time counts")
        return 1
    return 0


def metal_times(
    rows: list[dict[str, Any]], workload: Workload, launch: DecodeLaunch
) -> dict[str, dict[str, float]]:
    """Add kernel times to the rows; return the contiguous variants' and MLX's own."""
    arms = MetalArms(workload)
    contiguous, plain_copy = arms.contiguous_attention(launch), arms.contiguous_copy()
    mlx_attention = arms.mlx_attention()
    pairs = [
        (arms.attention(size, order, launch), arms.copy(size, order))
        for size, order in ((row["block_size"], row["order"]) for row in rows)
    ]
    for row, (attention, _) in zip(rows, pairs, strict=True):
        reference = workload.reference(arms.caches[0], row["block_size"], row["order"])
        row["max_error"] = max_error(attention.call(0)[0], reference)
    every = [contiguous, plain_copy, mlx_attention, *(arm for pair in pairs for arm in pair)]
    times = measure(every, Clock(), progress("timing kernels"))
    rates = {arm.name: gb_per_s(arm, times[arm.name]) for arm in every}
    refuse_impossible(rates, metal.chip())
    for row, pair in zip(rows, pairs, strict=True):
        for what, arm, base in zip(("attention", "copy"), pair, every[:2], strict=True):
            row[f"{what}_ms"] = times[arm.name] * 1e3
            row[f"{what}_over_contiguous"] = times[arm.name] / times[base.name]
            row[f"{what}_gb_per_s"] = rates[arm.name]
    return {
        name: {"ms": times[arm.name] * 1e3, "gb_per_s": rates[arm.name]}
        for name, arm in (
            ("attention without a table", contiguous),
            ("copy without a table", plain_copy),
            ("MLX's own attention", mlx_attention),
        )
    }


def gather_times(
    rows: list[dict[str, Any]], workload: Workload, launch: DecodeLaunch
) -> dict[str, dict[str, float]]:
    """Add the gather path's times to the rows; return a contiguous cache's in MLX operations."""
    console.print(
        "No Metal device here: the kernels can't be timed. Timed instead, on this processor in "
        "float32: attention by gathering in MLX operations, which says nothing about Metal."
    )
    on_cpu = replace(workload, shape=replace(workload.shape, dtype=mx.float32))
    arms = GatherArms(on_cpu)
    contiguous = arms.contiguous_attention()
    gathers = [arms.attention(row["block_size"], row["order"]) for row in rows]
    times = measure([contiguous, *gathers], ON_CPU, progress("timing the gather path"))
    for row, arm in zip(rows, gathers, strict=True):
        row["gather_ms"] = times[arm.name] * 1e3
        row["gather_over_contiguous"] = times[arm.name] / times[contiguous.name]
        row["gather_gb_per_s"] = gb_per_s(arm, times[arm.name])
    seconds = times[contiguous.name]
    rate = gb_per_s(contiguous, seconds)
    return {"matrix products in MLX": {"ms": seconds * 1e3, "gb_per_s": rate}}


def add_counts(
    rows: list[dict[str, Any]], workload: Workload, launch: DecodeLaunch
) -> dict[str, int] | None:
    """Add counted bytes to the rows, and the error where no Metal device gave one."""
    if counts.NO_COMPILER:
        console.print(f"Bytes and errors aren't counted here: {counts.NO_COMPILER}")
        return None
    for row in track(rows, "counting bytes", console=console, transient=True):
        row.update(counts.count(workload, row["block_size"], row["order"], launch) | row)
    return {"sequences": len(workload.lens), "cached_tokens": sum(workload.lens)}


def sweep(workload: Workload) -> int:
    """Measure the launch choices and keep the best."""
    if not mx.metal.is_available():
        console.print(
            "No Metal device here, so there is nothing to sweep: run this on the Mac whose chip "
            "the launch choices are for."
        )
        return 1
    from kernel_bench.sweep import sweep as fastest

    chip = metal.chip()
    best, rate = fastest(workload, chip, progress("sweeping"), console.print)
    refuse_impossible({"best launch": rate}, chip)
    file = tuned.save(workload.shape, best, rate)
    console.print(f"{workload.shape} on {chip}: {best}, {rate:.0f} GB/s, kept in {file}")
    return 0


def progress(description: str) -> Any:
    """Wraps what is iterated over in a progress bar."""

    def wrap(arms: Iterable[Arm]) -> Iterable[Arm]:
        return track(list(arms), description, console=console, transient=True)

    return wrap


def machine() -> dict[str, Any]:
    info = mx.device_info()
    return {
        "device": info["device_name"],
        "architecture": info["architecture"],
        "system": platform.platform(),
        "mlx": version("mlx"),
        "is_metal": mx.metal.is_available(),
    }


def describe(workload: Workload) -> str:
    lens = workload.lens
    each = f"{lens[0]}" if len(set(lens)) == 1 else f"{min(lens)} to {max(lens)}"
    return (
        f"{len(lens)} sequences x {each} cached tokens, {workload.shape}, "
        f"{workload.kv_bytes / 2**20:.0f} MiB of keys and values per step"
    )


def show(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Table, JSON and picture, as asked for."""
    rows, counted = result["rows"], result["counted"]
    notes = [f"MLX {result['machine']['mlx']} on {result['machine']['device']}"]
    if counted:
        size = f"{counted['sequences']} sequences, {counted['cached_tokens']} tokens"
        notes.append(f"bytes{'' if metal.is_available() else ' and errors'} counted at {size}")
    for name, times in result.get("contiguous", {}).items():
        notes.append(f"contiguous, {name}: {times['ms']:.3g} ms, {times['gb_per_s']:.3g} GB/s")
    shown = Console(stderr=options.json == "-")
    if not shown.is_terminal:
        shown.width = 150
    shown.print(report.table(rows, "\n".join(notes)))
    if options.json:
        text = json.dumps(result, indent=1)
        if options.json == "-":
            print(text)
        else:
            Path(options.json).write_text(text + "\n")
    if options.plot:
        report.plot(rows, options.plot, f"{result['shape']}; {notes[0]}")


if __name__ == "__main__":
    sys.exit(main())

"""Attention over scattered blocks, by block size: time, bandwidth, bytes loaded, error.

    python scripts/kernel.py                      # 16 x 4,096 tokens, Qwen2.5-1.5B's heads
    python scripts/kernel.py --plot kernel.png --json kernel.json
    python scripts/kernel.py --sweep              # on a Mac: find this chip's best launch, keep it
    python scripts/kernel.py --lengths scripts/data/sharegpt.json
    python scripts/kernel.py --prefill            # the last 512 tokens of each are a prompt's
    python scripts/kernel.py --kv-bits 8          # quantised; with --prefill too

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
from kernel_bench import counts, prefill, report
from kernel_bench.gather_arms import GatherArms
from kernel_bench.metal_arms import MetalArms
from kernel_bench.options import parse
from kernel_bench.timing import Arm, Clock, gb_per_s, measure, refuse_impossible
from kernel_bench.workload import MAX_ERROR, ORDERS, Workload, max_error
from rich.console import Console
from rich.progress import track

from mlx_paged.kernels import metal, tuned
from mlx_paged.kernels.defaults import num_cores
from mlx_paged.kernels.launch import DecodeLaunch
from mlx_paged.kernels.prefill_launch import default_prefill_launch

COUNTED_TOKENS = 1024
COUNTED_PREFILL_TOKENS = 256
ON_CPU = Clock(warm_s=0.2, windows=3, window_s=0.2)

RATES = {"ms": "ms", "gb_per_s": "GB/s", "tokens_per_s": "tokens/s"}

console = Console(stderr=True)


def main(argv: list[str] | None = None) -> int:
    parsed = parse(argv, __doc__ or "")
    options, workload, launch = parsed.options, parsed.workload, parsed.launch
    if options.sweep:
        return sweep(workload)
    rows: list[dict[str, Any]] = [
        {"block_size": size, "order": order} for size in options.block_sizes for order in ORDERS
    ]
    result: dict[str, Any] = {
        "machine": machine(),
        "sequences": len(workload.lens),
        "cached_tokens": sum(workload.lens),
        "shape": str(workload.shape),
        "rows": rows,
    }
    if options.prefill:
        result |= measure_prefill(rows, workload, options)
    else:
        result |= measure_decode(rows, workload, launch, options)
    show(result, options)
    bound = MAX_ERROR[workload.shape.dtype]
    if any(not row.get("max_error", 0) <= bound for row in rows):
        console.print(f"wrong results: an error is above {bound:g}, and no time counts")
        return 1
    return 0


def measure_decode(
    rows: list[dict[str, Any]],
    workload: Workload,
    launch: DecodeLaunch,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Add times and counts of one decode step to the rows; return what goes beside them."""
    console.print(f"{describe(workload)}; {launch}", soft_wrap=True)
    result: dict[str, Any] = {"launch": launch.to_dict()}
    if not options.no_times:
        add_times = metal_times if metal.is_available() else gather_times
        result["contiguous"] = add_times(rows, workload, launch)
    result["counted"] = add_counts(rows, workload.reduced(COUNTED_TOKENS), launch)
    return result


def measure_prefill(
    rows: list[dict[str, Any]], workload: Workload, options: argparse.Namespace
) -> dict[str, Any]:
    """The same of one pass over each sequence's last tokens; off Metal nothing is timed."""
    work = prefill.Prefill(workload, options.prefill)
    launch = default_prefill_launch(workload.shape, num_cores(metal.chip()))
    console.print(f"{describe(workload)}, {work.num_new} of each new; {launch}", soft_wrap=True)
    result: dict[str, Any] = {"new_tokens": work.num_tokens, "launch": vars(launch)}
    if metal.is_available() and not options.no_times:
        mlx_times = prefill.times(work, rows, Clock(), progress("timing prefill"))
        result["contiguous"] = {"MLX's own attention": mlx_times}
    if counts.NO_COMPILER:
        console.print(f"Bytes and errors aren't counted here: {counts.NO_COMPILER}")
        return result | {"counted": None}
    reduced = work.reduced(COUNTED_PREFILL_TOKENS)
    for row in track(rows, "counting bytes", console=console, transient=True):
        row.update(prefill.count(reduced, row["block_size"], row["order"], launch))
    lens = reduced.workload.lens
    return result | {"counted": {"sequences": len(lens), "cached_tokens": sum(lens)}}


def metal_times(
    rows: list[dict[str, Any]], workload: Workload, launch: DecodeLaunch
) -> dict[str, dict[str, float]]:
    """Add kernel times to the rows; return the contiguous variants' and MLX's own."""
    arms = MetalArms(workload)
    plain = arms.plain
    contiguous = plain.contiguous_attention(launch if plain is arms else None)
    plain_copy, mlx_attention = plain.contiguous_copy(), plain.mlx_attention()
    pairs = [
        (arms.attention(size, order, launch), plain.copy(size, order))
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
        rates = (f"{value:.3g} {RATES[unit]}" for unit, value in times.items())
        notes.append(f"contiguous, {name}: {', '.join(rates)}")
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

"""Error and counted traffic of the kernel's own text, run by the executor of tests/msl."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_paged.kernels import metal, paged_decode_attention
from mlx_paged.kernels.launch import DecodeLaunch

from .workload import Order, Workload, max_error

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

import msl

_EXECUTOR = msl.Executor(may_leave_unwritten=("partial_out", "partial_stats"))
NO_COMPILER = None if msl.find_compiler() else msl.NO_COMPILER


class Reports:
    """Makes kernels with the executor and keeps the reports of their launches."""

    def __init__(self) -> None:
        self.reports: list[Any] = []

    def __call__(self, **arguments: Any) -> Any:
        kernel = _EXECUTOR.metal_kernel(**arguments)

        def launch(**launch_arguments: Any) -> Any:
            outputs = kernel(**launch_arguments)
            self.reports.append(kernel.report)
            return outputs

        return launch


def count(
    workload: Workload, block_size: int, order: Order, launch: DecodeLaunch | None
) -> dict[str, float]:
    """Run one decode step on this machine's processor and say what the kernels loaded."""
    kv = workload.kv()
    reports = Reports()
    with metal.using(reports):
        out = paged_decode_attention(
            workload.queries(),
            workload.pool(kv.keys, block_size),
            workload.pool(kv.values, block_size),
            mx.array(workload.tables(block_size, order)),
            workload.context_lens,
            scale=workload.scale,
            max_context_len=workload.max_len,
            launch=launch,
        )
    decode = reports.reports[0]
    table = decode["block_tables"]
    parts = ("codes", "scales", "biases") if workload.shape.kv_bits else ("pool",)
    loaded = sum(decode[f"{of}_{part}"].bytes_loaded for of in ("key", "value") for part in parts)
    rows = sum(workload.lens) * workload.shape.num_kv_heads
    return {
        "kv_bytes_loaded_over_needed": loaded / workload.kv_bytes,
        "table_loads_per_row": table.loads / rows,  # of the same entry, by each lane of the row
        "table_bytes_over_kv_bytes": table.distinct_bytes_loaded / workload.kv_bytes,
        "max_error": max_error(out, workload.reference(kv, block_size, order)),
    }

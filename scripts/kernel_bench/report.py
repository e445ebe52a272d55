"""The measurement as rows, as a table and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

Row = dict[str, Any]

# What a column is called, its key in a row, and how it is written.
COLUMNS = (
    ("block", "block_size", "{}"),
    ("order", "order", "{}"),
    ("attention ms", "attention_ms", "{:.3f}"),
    ("vs contiguous", "attention_over_contiguous", "{:.2f}x"),
    ("GB/s", "attention_gb_per_s", "{:.0f}"),
    ("copy ms", "copy_ms", "{:.3f}"),
    ("vs contiguous", "copy_over_contiguous", "{:.2f}x"),
    ("GB/s", "copy_gb_per_s", "{:.0f}"),
    ("gather ms", "gather_ms", "{:.1f}"),
    ("vs contiguous", "gather_over_contiguous", "{:.2f}x"),
    ("GB/s", "gather_gb_per_s", "{:.1f}"),
    ("prefill ms", "prefill_ms", "{:.3f}"),
    ("tokens/s", "prefill_tokens_per_s", "{:.0f}"),
    ("of MLX's rate", "prefill_of_mlx_rate", "{:.2f}"),
    ("K, V bytes loaded / needed", "kv_bytes_loaded_over_needed", "{:.3f}"),
    ("with one head in a tile", "kv_bytes_loaded_over_needed_by_head", "{:.3f}"),
    ("table bytes / K, V bytes", "table_bytes_over_kv_bytes", "{:.5f}"),
    ("max error", "max_error", "{:.1e}"),
)


def table(rows: list[Row], title: str) -> Table:
    """The columns that any row has."""
    columns = [column for column in COLUMNS if any(column[1] in row for row in rows)]
    shown = Table(title=title, title_justify="left")
    for name, key, _ in columns:
        shown.add_column(name, justify="left" if key == "order" else "right")
    for row in rows:
        shown.add_row(*(form.format(row[key]) if key in row else "" for _, key, form in columns))
    return shown


def plot(rows: list[Row], file: Path, subtitle: str) -> None:
    """Times over block sizes, relative to the contiguous cache, one panel a measurement."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [
        (title, key)
        for title, key in (
            ("attention kernel", "attention_over_contiguous"),
            ("copy kernel", "copy_over_contiguous"),
            ("attention by gathering, on the CPU", "gather_over_contiguous"),
        )
        if any(key in row for row in rows)
    ]
    figure, axes = plt.subplots(
        1, len(panels), figsize=(5.5 * len(panels), 4), squeeze=False, layout="constrained"
    )
    for axis, (title, key) in zip(axes[0], panels, strict=True):
        for order, marker, line in (("in order", "o", "-"), ("scattered", "s", "--")):
            chosen = [row for row in rows if row["order"] == order]
            sizes = [row["block_size"] for row in chosen]
            axis.plot(
                sizes, [row[key] for row in chosen], line, marker=marker, color="black", label=order
            )
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set(title=title, xlabel="block size (tokens)", ylabel="time / contiguous cache's time")
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({row["block_size"] for row in rows}))
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False)
    figure.suptitle(subtitle, fontsize=9)
    figure.savefig(file, dpi=150)

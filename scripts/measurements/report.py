"""Results as a table on the terminal, as JSON, or as a picture."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

# Told apart in greyscale too: each with a dash pattern, a marker and a hatch of its own.
LINES: tuple[dict[str, Any], ...] = (
    {"color": "black", "linestyle": "-", "marker": "o"},
    {"color": "0.45", "linestyle": "--", "marker": "s"},
    {"color": "0.2", "linestyle": "-.", "marker": "^"},
    {"color": "0.6", "linestyle": ":", "marker": "D"},
    {"color": "0.3", "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "v"},
    {"color": "0.7", "linestyle": (0, (8, 2)), "marker": "P"},
    {"color": "0.5", "linestyle": (0, (1, 1)), "marker": "X"},
)
FILLS: tuple[dict[str, Any], ...] = (
    {"facecolor": "black", "hatch": ""},
    {"facecolor": "0.6", "hatch": ""},
    {"facecolor": "0.85", "hatch": "..."},
    {"facecolor": "white", "hatch": "///"},
    {"facecolor": "white", "hatch": ""},
)


def add_arguments(parser: argparse.ArgumentParser, plot: bool = True) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    if plot:
        group.add_argument(
            "--plot", type=Path, metavar="FILE", help="draw a picture (pip install -e '.[plots]')"
        )


def run(main: Callable[[], Any]) -> None:
    """Call a script's main function; a bad input is one line on stderr, and exit status 1.

    SIGTERM ends it as Ctrl-C does, with what it has started.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main())
    except (ValueError, RuntimeError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Group:
    """The first column is text, all others numbers. An empty row becomes a line."""
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        if row:
            table.add_row(*map(str, row))
        else:
            table.add_section()
    return Group(Text(title, style="bold"), table)


def show(*renderables: Any) -> None:
    """Print tables and lines, at full width where stdout is no terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    for renderable in renderables:
        console.print(renderable)


def print_json(result: dict[str, Any]) -> None:
    print(json.dumps(result))


def progress() -> Progress:
    """A bar on stderr, gone when done."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def figure(num_rows: int, num_columns: int, width: float, height: float) -> tuple[Any, Any]:
    """A matplotlib figure and its axes as a 2D array.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install -e '.[plots]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "0.9",
            "hatch.color": "0.4",
            "lines.markersize": 5,
            "legend.frameon": False,
        }
    )
    return plt.subplots(
        num_rows, num_columns, figsize=(width, height), squeeze=False, layout="constrained"
    )


def save(figure: Any, file: Path) -> None:
    figure.savefig(file, dpi=150)
    import matplotlib.pyplot as plt

    plt.close(figure)
    print(f"drew {file}", file=sys.stderr)

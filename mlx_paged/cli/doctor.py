"""`mlx-paged doctor`: prints what `mlx_paged.doctor` finds."""

from __future__ import annotations

import argparse
import json

from rich.console import Console
from rich.text import Text

from mlx_paged.cli.arguments import pool_options
from mlx_paged.cli.manners import FAILED
from mlx_paged.doctor import Finding, Question, as_dict, examine, is_healthy

STYLES = {"ok": "green", "note": "yellow", "missing": "bold red"}
MARKS = {"ok": "ok", "note": "!", "missing": "x"}


def run(args: argparse.Namespace) -> int:
    question = Question(
        model=args.model,
        dtype=args.dtype,
        **pool_options(args),
    )
    findings = examine(question)
    if args.json:
        print(json.dumps(as_dict(findings), indent=2))
    else:
        _print(findings)
    return 0 if is_healthy(findings) else FAILED


class PipedConsole(Console):
    """Leaves a closed pipe to whoever runs the command; rich would exit with status 1."""

    def on_broken_pipe(self) -> None:
        raise


def _print(findings: list[Finding]) -> None:
    console = PipedConsole(soft_wrap=True, highlight=False)
    width = max(len(finding.name) for finding in findings)
    section = None
    for finding in findings:
        if finding.section != section:
            section = finding.section
            console.print(Text(section, style="bold"))
        console.print(_line(finding, width))
    missing = [finding.name for finding in findings if finding.level == "missing"]
    if missing:
        console.print(Text(f"missing: {', '.join(missing)}", style=STYLES["missing"]))


def _line(finding: Finding, width: int) -> Text:
    indent = "\n" + " " * (width + 8)
    text = Text(f"  {MARKS[finding.level]:<3} ", style=STYLES[finding.level])
    text.append(f"{finding.name:<{width}}  ", style="default")
    text.append(finding.text.replace("\n", indent), style="default")
    if finding.advice:
        text.append(f"{indent}-> {finding.advice}", style="cyan")
    return text

"""What moves on stderr while a person waits; nothing at all if stderr is not a terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.status import Status

LONG_PROMPT_TOKENS = 256


def waiting(what: str) -> Status:
    """A spinner with a text, for a `with` block."""
    return Console(stderr=True).status(what)


class PrefillBar:
    """Prompt tokens computed so far; it disappears with the first text."""

    def __init__(self, num_prompt_tokens: int) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("Reading the prompt"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=num_prompt_tokens < LONG_PROMPT_TOKENS or not console.is_terminal,
        )
        self._task = self._progress.add_task("prefill", total=num_prompt_tokens)

    def __enter__(self) -> PrefillBar:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def update(self, num_prefilled: int, num_prompt_tokens: int) -> None:
        """Takes what `LLM.stream` reports."""
        self._progress.update(self._task, completed=num_prefilled, total=num_prompt_tokens)

    def close(self) -> None:
        self._progress.stop()

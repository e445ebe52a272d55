"""A progress bar over many prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Bar:
    """Counts tokens and requests; shows nothing by itself."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_requests = 0

    def token(self) -> None:
        self.num_tokens += 1

    def request(self) -> None:
        self.num_requests += 1


class _RichBar(Bar):
    def __init__(self, num_requests: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        super().__init__()
        self.progress = Progress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self.progress.add_task("requests", total=num_requests, tokens=0)

    def token(self) -> None:
        super().token()
        self.progress.update(self._task, tokens=self.num_tokens)

    def request(self) -> None:
        super().request()
        self.progress.advance(self._task)


@contextmanager
def progress_bar(num_requests: int, shown: bool) -> Iterator[Bar]:
    """A bar on stderr, or a silent count."""
    if not shown:
        yield Bar()
        return
    bar = _RichBar(num_requests)
    with bar.progress:
        yield bar

"""This project's server with a small pool, and what it says about itself."""

from __future__ import annotations

import asyncio
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from serving.client import Reply
from serving.load import Job, Target, run_jobs
from serving.processes import ServerProcess, rss_of_tree

LOADING_SECONDS = 300.0
# For the end of a request to reach the metrics: the engine reports once a second.
SETTLE_SECONDS = 5.0

# So small that an answer of 64 tokens takes 16 of them, and admission keeps one free for each
# running sequence: with fewer free blocks than answers grow by, some are preempted.
BLOCK_SIZE = 4

NUM_USED = 'mlx_paged_pool_blocks{state="used"}'
NUM_OPEN = "mlx_paged_requests_open"
NUM_RUNNING = "mlx_paged_samples_running"
NUM_WAITING = "mlx_paged_samples_waiting"
NUM_PREEMPTIONS = "mlx_paged_preemptions_total"


@dataclass(frozen=True)
class Setup:
    """How servers are started and asked; all times in seconds.

    Attributes:
        timeout: of a request; one that takes longer hangs.
        shutdown: that the server gives open requests after SIGTERM.
        grace: beyond that, and for what should be immediate.
    """

    model: str
    num_blocks: int
    concurrency: int
    seed: int
    timeout: float
    shutdown: float
    grace: float


def _ignore(reply: Reply) -> None:
    pass


class SmallServer:
    """Use it in a `with` block, which begins once the server is ready."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        options = {
            "--model": setup.model,
            "--port": "{port}",
            "--block-size": BLOCK_SIZE,
            "--num-blocks": setup.num_blocks,
            "--max-num-seqs": setup.concurrency,
            "--shutdown-timeout": f"{setup.shutdown:g}",
            "--log-level": "warning",
        }
        words = [str(word) for option in options.items() for word in option]
        command = [sys.executable, "-m", "mlx_paged", "serve", *words]
        self.child = ServerProcess("mlx-paged", command, "/ready")
        self.url = self.child.url

    def __enter__(self) -> SmallServer:
        try:
            self.child.wait_ready(LOADING_SECONDS)
        except BaseException:
            self.child.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.child.__exit__()

    @property
    def pid(self) -> int:
        """Of the HTTP process."""
        return self.child.pid

    @property
    def engine_pid(self) -> int:
        """Of the child process that holds most memory."""
        sizes = {pid: nbytes for pid, nbytes in rss_of_tree(self.pid).items() if pid != self.pid}
        return max(sizes, key=lambda pid: sizes[pid])

    def metrics(self) -> dict[str, float]:
        """Each metric's value, by name and labels as they are written."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def settled_metrics(self) -> dict[str, float]:
        """Those once nothing is left over, or after a while."""
        end = time.monotonic() + SETTLE_SECONDS
        while True:
            found = self.metrics()
            if not left_over(found) or time.monotonic() > end:
                return found
            time.sleep(0.1)

    def wait_busy(self) -> int:
        """Waits until several requests run, and returns how many are open. RuntimeError if not."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with suppress(OSError):
                found = self.metrics()
                if found[NUM_RUNNING] >= 2:
                    return int(found[NUM_OPEN])
            time.sleep(0.05)
        raise RuntimeError("the server does not become busy")

    def run(self, jobs: Sequence[Job], on_reply: Callable[[Reply], None] = _ignore) -> list[Reply]:
        setup = self.setup
        target = Target(self.url, setup.model)
        return asyncio.run(run_jobs(target, jobs, setup.concurrency, setup.timeout, on_reply))


def left_over(metrics: dict[str, float]) -> dict[str, float]:
    """What there should be none of when nobody asks for anything."""
    names = (NUM_USED, NUM_OPEN, NUM_RUNNING, NUM_WAITING)
    return {name: metrics[name] for name in names if metrics[name]}

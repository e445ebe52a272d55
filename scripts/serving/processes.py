"""Servers as child processes, and the memory of a process with its children."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

POLL_SECONDS = 0.1
HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


class ServerProcess:
    """A server on a port of its own; use it in a `with` block.

    Its output goes to a file, whose end is quoted if it fails.

    Args:
        name: for messages.
        command: with `{port}` where the port belongs.
        ready: the path that answers 200 once it can be asked.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        ready: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self._ready = ready
        self._log = tempfile.NamedTemporaryFile(prefix=f"{name}-", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            [part.format(port=self.port) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            # A Ctrl-C is for the script, which stops its servers.
            start_new_session=True,
        )

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop(5)
        self._log.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def log_tail(self, num_lines: int = 15) -> str:
        lines = Path(self._log.name).read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def wait_ready(self, seconds: float) -> float:
        """Returns how long it took. RuntimeError if it ends, or takes longer than `seconds`."""
        start = time.monotonic()
        while status_of(f"{self.url}{self._ready}") != 200:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"{self.name} ended with status {self.process.returncode}:\n{self.log_tail()}"
                )
            if time.monotonic() - start > seconds:
                raise RuntimeError(f"{self.name} is not ready in {seconds:g} s:\n{self.log_tail()}")
            time.sleep(POLL_SECONDS)
        return time.monotonic() - start

    def wait(self, seconds: float) -> int | None:
        """The exit status, or None if it has not ended by then."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, seconds: float) -> int:
        """Ends it by SIGTERM, or after `seconds` with all its children by SIGKILL."""
        family = tree(self.pid)
        if self.process.poll() is None:
            self.process.terminate()
        status = self.wait(seconds)
        for pid in family:
            if status is None or pid != self.pid:
                kill(pid)
        return self.process.wait() if status is None else status


def status_of(url: str, timeout: float = 5.0) -> int | None:
    """The status of a GET request; None if nothing answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """False also for one that has ended and was not waited for."""
    return pid in _table()


def tree(pid: int) -> list[int]:
    """A running process and its descendants, itself first."""
    return list(rss_of_tree(pid))


def rss_of_tree(pid: int) -> dict[int, int]:
    """Resident bytes of a running process and of its descendants, itself first."""
    table = _table()
    found: dict[int, int] = {}
    pending = [pid]
    while pending:
        parent = pending.pop(0)
        if parent in table:
            found[parent] = table[parent][1]
            pending += [child for child, (its_parent, _) in table.items() if its_parent == parent]
    return found


def _table() -> dict[int, tuple[int, int]]:
    """Each running process's parent and resident bytes."""
    return _proc_table() if sys.platform == "linux" else _ps_table()


def _proc_table() -> dict[int, tuple[int, int]]:
    page = os.sysconf("SC_PAGE_SIZE")
    table = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                # After the name in brackets, which may hold anything: state, parent, ...
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                table[int(folder.name)] = (int(fields[1]), int(fields[21]) * page)
    return table


def _ps_table() -> dict[int, tuple[int, int]]:
    command = ["ps", "-axo", "pid=,ppid=,rss=,state="]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [line.split() for line in lines]
    return {int(r[0]): (int(r[1]), int(r[2]) * 1024) for r in rows if not r[3].startswith("Z")}


class MemoryMeter:
    """Reads a process tree's memory from time to time, in a thread; use it in a `with` block.

    Pages that processes share count for each of them.

    Attributes:
        samples: (seconds on the monotonic clock, resident bytes by process).
    """

    def __init__(self, pid: int, seconds: float = 0.5) -> None:
        self.samples: list[tuple[float, dict[int, int]]] = []
        self._pid, self._seconds = pid, seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemoryMeter:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def peak_nbytes(self) -> int:
        return max((sum(sample.values()) for _, sample in self.samples), default=0)

    def _run(self) -> None:
        while True:
            if sample := rss_of_tree(self._pid):
                self.samples.append((time.monotonic(), sample))
            if self._stop.wait(self._seconds):
                return

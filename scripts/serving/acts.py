"""What a server is put through, and what must hold of it."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from serving.client import Reply
from serving.load import Job
from serving.processes import MemoryMeter, is_running, kill, status_of, tree
from serving.requests import long_requests, plain_request
from serving.small_server import NUM_PREEMPTIONS, SmallServer, left_over

MIB = 2**20
# What a process may grow by: allocators keep and split what they have.
GROWTH_SHARE, GROWTH_BYTES = 0.05, 48 * MIB
MIN_SAMPLES = 12

OK, LEFT, HUNG = "ok", "left", "hung"


class Checks:
    """What must hold, with what was seen."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, is_ok: bool, seen: object) -> None:
        self.rows.append({"check": name, "ok": bool(is_ok), "seen": str(seen)})

    @property
    def all_ok(self) -> bool:
        return all(row["ok"] for row in self.rows)


def outcome(reply: Reply, job: Job, timeout: float) -> str:
    """OK, LEFT, HUNG, or what is wrong with a reply."""
    if reply.has_left:
        return LEFT
    if reply.seconds >= timeout:
        return HUNG
    if reply.error is not None:
        return reply.error
    num_answers = job.body.get("n", 1)
    if sorted(reply.finish_reasons) != list(range(num_answers)):
        return f"{len(reply.finish_reasons)} of {num_answers} answers ended"
    if not set(reply.finish_reasons.values()) <= {"stop", "length"}:
        return f"answers ended by {sorted(set(reply.finish_reasons.values()))}"
    return OK


def mixed_load(
    server: SmallServer, jobs: Sequence[Job], checks: Checks, on_reply: Callable[[Reply], None]
) -> dict[str, Any]:
    """All requests, some of whose clients leave. Afterwards nothing must be left of them."""
    start = time.monotonic()
    with MemoryMeter(server.pid, seconds=0.1) as meter:
        replies = server.run(jobs, on_reply)
    seconds = time.monotonic() - start
    timeout = server.setup.timeout
    outcomes = [outcome(reply, job, timeout) for reply, job in zip(replies, jobs, strict=True)]
    num_whole, num_left = outcomes.count(OK), outcomes.count(LEFT)
    wrong = [text for text in outcomes if text not in (OK, LEFT)]
    checks.add("every other answer is whole", not wrong, _listed(wrong) or f"{num_whole} are")
    num_leaving = sum(job.leave is not None for job in jobs)
    checks.add("clients leave early", num_left >= num_leaving / 3, f"{num_left} of {num_leaving}")
    metrics = server.settled_metrics()
    check_nothing_left(metrics, checks)
    num_preemptions = int(metrics[NUM_PREEMPTIONS])
    checks.add("the pool runs out", num_preemptions > 0, f"{num_preemptions} preemptions")
    check_serves(server, checks)
    engine = server.engine_pid
    for name, pid in (("HTTP", server.pid), ("engine", engine)):
        sizes = [sample[pid] for _, sample in meter.samples if pid in sample]
        check_flat(f"memory of the {name} process stays", sizes, checks)
    whole = [reply for reply, text in zip(replies, outcomes, strict=True) if text == OK]
    return {
        "seconds": seconds,
        "num_whole": num_whole,
        "num_left": num_left,
        "num_preemptions": num_preemptions,
        "num_output_tokens": sum(reply.num_tokens for reply in whole),
        "slowest_s": max(reply.seconds for reply in replies),
        "memory_bytes": [[round(t - start, 2), *by_pid.values()] for t, by_pid in meter.samples],
    }


def terminate(server: SmallServer, checks: Checks) -> dict[str, Any]:
    """SIGTERM under load: the server ends in time, with its engine and all requests."""
    bound = server.setup.shutdown + server.setup.grace
    load = Load(server)
    server.wait_busy()
    family = tree(server.pid)
    start = time.monotonic()
    os.kill(server.pid, signal.SIGTERM)
    status = server.child.wait(bound)
    seconds = time.monotonic() - start
    outcomes = load.outcomes(server.setup.grace)
    seen = f"status {status} after {seconds:.1f} s" if status is not None else "still runs"
    checks.add(f"SIGTERM: ends within {bound:g} s with status 0", status == 0, seen)
    left = [pid for pid in family if is_running(pid)]
    checks.add("SIGTERM: no process is left", not left, left or "none")
    num_hung = outcomes.count(HUNG)
    checks.add("SIGTERM: no request hangs", not num_hung, f"{num_hung} of {len(outcomes)}")
    return {"seconds": seconds, "status": status, "num_whole": outcomes.count(OK)}


def kill_engine(server: SmallServer, checks: Checks) -> dict[str, Any]:
    """SIGKILL to the engine under load: open requests fail, and a new engine serves the next."""
    grace = server.setup.grace
    load = Load(server)
    num_open = server.wait_busy()
    watch = ReadyWatch(f"{server.url}/ready")
    start = time.monotonic()
    kill(server.engine_pid)
    outcomes = load.outcomes(grace)
    seconds = time.monotonic() - start
    num_failed = sum(text not in (OK, HUNG) for text in outcomes)
    said = _listed([text for text in outcomes if text != OK])
    checks.add(
        f"SIGKILL: every open request fails within {grace:g} s",
        HUNG not in outcomes and num_failed >= num_open,
        f"{num_failed} of {num_open} open, after {seconds:.2f} s: {said}",
    )
    changes = watch.wait(server.setup.timeout)
    statuses = [status for status, _ in changes]
    seen = ", ".join(f"{status} after {moment - start:.2f} s" for status, moment in changes)
    checks.add("SIGKILL: /ready says 503, then 200", statuses == [503, 200], seen or "nothing")
    check_serves(server, checks, "SIGKILL: ")
    check_nothing_left(server.settled_metrics(), checks, "SIGKILL: ")
    return {"seconds_to_errors": seconds, "num_open": num_open, "num_failed": num_failed}


class Load:
    """Long requests in a thread."""

    def __init__(self, server: SmallServer) -> None:
        setup = server.setup
        self._jobs = long_requests(setup.concurrency, setup.seed)
        self._timeout = setup.timeout
        self._replies: list[Reply] = []
        self._thread = threading.Thread(
            target=lambda: self._replies.extend(server.run(self._jobs)), daemon=True
        )
        self._thread.start()

    def outcomes(self, seconds: float) -> list[str]:
        """Of all requests, which must have ended within so many seconds."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            return [HUNG] * len(self._jobs)
        pairs = zip(self._replies, self._jobs, strict=True)
        return [outcome(reply, job, self._timeout) for reply, job in pairs]


class ReadyWatch:
    """Asks an address in a thread, and notes each change of its status from 200."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._changes: list[tuple[int | None, float]] = []
        self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> list[tuple[int | None, float]]:
        """Each new status with its moment, up to the first 200 or for so many seconds."""
        self._thread.join(seconds)
        self._is_over = True
        return list(self._changes)

    def _run(self) -> None:
        last: int | None = 200
        while not self._is_over:
            status = status_of(self._url)
            if status != last:
                self._changes.append((status, time.monotonic()))
                last = status
                if status == 200:
                    return
            time.sleep(0.01)


def check_serves(server: SmallServer, checks: Checks, when: str = "") -> None:
    reply = server.run([plain_request()])[0]
    checks.add(f"{when}the next request is served", reply.error is None, reply.error or "yes")


def check_nothing_left(metrics: dict[str, float], checks: Checks, when: str = "") -> None:
    left = left_over(metrics)
    checks.add(f"{when}no block is used, no request open", not left, left or "none")


def check_flat(name: str, sizes: Sequence[int], checks: Checks) -> None:
    """Compares medians: of the time from a tenth to a third, and of the last third."""
    count = len(sizes)
    if count < MIN_SAMPLES:
        checks.add(name, False, f"only {count} samples")
        return
    early = statistics.median(sizes[count // 10 : count // 3])
    late = statistics.median(sizes[-(count // 3) :])
    is_flat = late - early <= GROWTH_SHARE * early + GROWTH_BYTES
    checks.add(name, is_flat, f"{early / MIB:,.0f} MiB, later {late / MIB:,.0f}")


def _listed(texts: Sequence[str]) -> str:
    """Each text once, with its count."""
    counts = {text: texts.count(text) for text in texts}
    return "; ".join(f"{count} x {text}" for text, count in sorted(counts.items()))

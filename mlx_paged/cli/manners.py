"""How every command ends: interrupts, closed pipes and errors without a traceback."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

FAILED = 1
USAGE = 2
INTERRUPTED = 128 + signal.SIGINT
PIPE_CLOSED = 128 + signal.SIGPIPE

SHOW_CURSOR = "\x1b[?25h"


class UsageError(Exception):
    """The command line is wrong; exit status 2."""


class Interrupts:
    """The first Ctrl-C raises KeyboardInterrupt, a second one ends the process at once.

    What was running may turn the first into an exception of its own (an extension module that
    was being imported does), so it is also remembered. And while MLX computes, Python calls no
    handler; a thread counts the signals then.

    A command that goes on after a Ctrl-C says so with `forget`: the next is a first one again.
    """

    def __init__(self) -> None:
        self.happened = False
        self.raises = True
        self._num_handled = 0
        self._num_forgotten = 0

    def forget(self) -> None:
        """Only what Python has handled: the thread may not have counted it yet."""
        self.happened = False
        self._num_forgotten = self._num_handled

    def __enter__(self) -> Interrupts:
        read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._previous_fd = signal.set_wakeup_fd(self._write_end)
        self._previous = signal.signal(signal.SIGINT, self._handle)
        threading.Thread(target=self._watch, args=(read_end,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._previous)
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._write_end)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.happened = True
        self._num_handled += 1
        if self.raises:
            raise KeyboardInterrupt

    def _watch(self, read_end: int) -> None:
        num_interrupts = 0
        while num_interrupts < self._num_forgotten + 2:
            signal_number = os.read(read_end, 1)
            if not signal_number:
                os.close(read_end)
                return
            num_interrupts += signal_number == bytes([signal.SIGINT])
        if sys.stderr.isatty():
            os.write(2, SHOW_CURSOR.encode())
        os._exit(INTERRUPTED)


_interrupts = Interrupts()


def run(command: Callable[[], int]) -> int:
    """Runs a command, and turns whatever ends it into an exit status and at most one sentence."""
    global _interrupts
    _prepare_streams()
    with Interrupts() as _interrupts:
        return _run(command, _interrupts)


def forget_interrupt() -> None:
    """Says that the command has dealt with a KeyboardInterrupt and goes on."""
    _interrupts.forget()


@contextmanager
def interrupts_kept() -> Iterator[Callable[[], bool]]:
    """In this block Ctrl-C raises nothing; the value, called, says whether there was one.

    It is for what must not be left halfway, and asks from time to time. A second Ctrl-C still
    ends the process.
    """
    interrupts = _interrupts
    interrupts.raises = False
    try:
        yield lambda: interrupts.happened
    finally:
        interrupts.raises = True
        interrupts.forget()


def _run(command: Callable[[], int], interrupts: Interrupts) -> int:
    try:
        status = _status_of(command)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        _discard_output()
        return PIPE_CLOSED
    except OSError as error:
        _discard_output()
        print(f"mlx-paged: {error}", file=sys.stderr)
        return FAILED
    except BaseException as error:
        if not (interrupts.happened or isinstance(error, KeyboardInterrupt)):
            raise
        _end_line()
        return INTERRUPTED


def _prepare_streams() -> None:
    """Writing text must not fail for what a stream can't spell, or for one closed at the start."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (as long as the process)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _status_of(command: Callable[[], int]) -> int:
    from mlx_paged.blocks import OutOfBlocks

    try:
        return command()
    except SystemExit as exit:  # argparse, after --help or a wrong option
        return exit.code if isinstance(exit.code, int) else FAILED
    except UsageError as error:
        return _complain(error, USAGE)
    except (ValueError, OutOfBlocks) as error:
        return _complain(error, FAILED)
    except (RuntimeError, MemoryError) as error:
        # MLX has no exception type for memory; its allocators name themselves in brackets.
        if not isinstance(error, MemoryError) and "malloc" not in str(error).partition("]")[0]:
            raise
        return _complain(
            f"memory ran out ({error}); make the pool smaller (--kv-memory, --num-blocks) or take "
            "a smaller model",
            FAILED,
        )


def _complain(error: object, status: int) -> int:
    sys.stdout.flush()
    print(f"mlx-paged: {error}", file=sys.stderr)
    return status


def _end_line() -> None:
    """Leaves the shell's prompt at the start of a line, after half an answer."""
    try:
        if sys.stdout.isatty():
            print()
        sys.stdout.flush()
    except OSError:
        _discard_output()


def _discard_output() -> None:
    """Points stdout at nothing, or Python would complain when it flushes at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)

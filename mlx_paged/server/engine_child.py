"""The engine's process, seen from the HTTP process."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import zmq
import zmq.asyncio

from mlx_paged.server.messages import FromEngine, ToEngine, decode_from_engine, encode

# What a process that has ended may still have sent.
DRAIN_SECONDS = 0.2


class EngineChild:
    """A running engine process with the two sockets to it. Make one with `spawn`."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._context = zmq.asyncio.Context()
        # The side that connects may send before the other one is there.
        self._outbox = zmq.Socket(zmq.Context(self._context), zmq.PUSH)
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox.set_hwm(0)
        self._inbox.set_hwm(0)
        self._inbox.bind(f"ipc://{folder}/from_engine")
        self._outbox.connect(f"ipc://{folder}/to_engine")

    @classmethod
    async def spawn(cls) -> EngineChild:
        # A socket's path has about 100 characters at most, and $TMPDIR is long on a Mac.
        folder = Path(tempfile.mkdtemp(prefix="mlx-paged-", dir="/tmp"))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "mlx_paged.server.engine_process",
            str(folder),
            stdin=asyncio.subprocess.PIPE,  # the child ends when we do, which closes it
            start_new_session=True,  # Ctrl-C in a terminal reaches the server alone
        )
        return cls(process, folder)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Hand a message over; never blocks.

        Raises:
            OverflowError: it holds a number of more than 64 bits.
        """
        self._outbox.send(encode(message))

    async def messages(self) -> AsyncIterator[FromEngine]:
        """What the engine sends, until its process has ended."""
        ended = asyncio.ensure_future(self._process.wait())
        try:
            while True:
                received = asyncio.ensure_future(self._inbox.recv())
                await asyncio.wait({received, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not received.done():
                    await asyncio.wait({received}, timeout=DRAIN_SECONDS)
                if not received.done():
                    received.cancel()
                    return
                yield decode_from_engine(received.result())
        finally:
            ended.cancel()

    def how_it_ended(self) -> str:
        """The end of the process, in words."""
        status = self._process.returncode
        if status is None:
            return "the engine's process is running"
        if status < 0:
            return f"the engine's process was ended by {signal.Signals(-status).name}"
        return f"the engine's process ended with status {status}"

    async def close(self, timeout: float = 0) -> None:
        """Wait for the end of the process, or bring it about after `timeout` seconds."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._process.wait(), timeout)
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._outbox.close(linger=0)
        self._inbox.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

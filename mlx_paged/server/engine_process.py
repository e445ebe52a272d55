"""The engine process: loads a model, then steps on one thread until it is told to stop.

Run as `python -m mlx_paged.server.engine_process FOLDER`, a folder for the sockets `to_engine` and
`from_engine`. It also ends when its stdin is closed, which the end of the other process does.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import zmq

from mlx_paged.server.messages import (
    Died,
    FromEngine,
    Ready,
    Start,
    Stop,
    ToEngine,
    decode_to_engine,
    encode,
)

if TYPE_CHECKING:
    from mlx_paged.engine.engine import Engine

log = logging.getLogger("mlx_paged.engine")


class Channel:
    """The engine's ends of the two sockets, and the watch over stdin."""

    def __init__(self, folder: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._inbox = context.socket(zmq.PULL)
        self._outbox = context.socket(zmq.PUSH)
        for socket in (self._inbox, self._outbox):
            socket.set_hwm(0)
        self._inbox.bind(f"ipc://{folder}/to_engine")
        self._outbox.connect(f"ipc://{folder}/from_engine")
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(sys.stdin.fileno(), zmq.POLLIN)

    def send(self, message: FromEngine) -> None:
        self._outbox.send(encode(message))

    def receive(self, timeout: float | None) -> Iterator[ToEngine]:
        """Messages that have come, or that come within `timeout` seconds; None waits for one.

        Raises:
            EOFError: the other process has ended.
        """
        ready = dict(self._poller.poll(None if timeout is None else round(timeout * 1000)))
        if sys.stdin.fileno() in ready:
            raise EOFError("the server has ended")
        while self._inbox in ready:
            try:
                yield decode_to_engine(self._inbox.recv(zmq.NOBLOCK))
            except zmq.Again:
                return

    def close(self) -> None:
        """Send what is left, for a second at most."""
        zmq.Context.instance().destroy(linger=1000)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the server, which tells us
    logging.basicConfig(format="%(asctime)s %(levelname)s engine: %(message)s")
    channel = Channel(sys.argv[1])
    try:
        return _run(channel)
    except EOFError:
        return 1
    except Exception as error:
        if isinstance(error, ValueError):  # it says what the user has to change
            channel.send(Died(str(error)))
        else:
            log.exception("the engine ends")
            channel.send(Died(f"the engine met {type(error).__name__}: {error}"))
        return 1
    finally:
        channel.close()


def _run(channel: Channel) -> int:
    (start,) = channel.receive(timeout=None)
    assert isinstance(start, Start)
    # MLX's streams belong to the thread that made them: everything from here on is on this one.
    from mlx_paged.engine.engine import Engine
    from mlx_paged.engine.options import EngineOptions
    from mlx_paged.loader import load
    from mlx_paged.server.engine_loop import EngineLoop

    options = EngineOptions(**start.options)
    loaded = load(start.model, start.dtype)
    engine = Engine(loaded.model, loaded.tokenizer, options, loaded.dtype, loaded.name, texts=False)
    loop = EngineLoop(engine, channel.send)
    loop.warm_up()
    channel.send(_ready(engine, loaded.name, loaded.description))
    while True:
        for message in channel.receive(loop.seconds_to_wait()):
            if isinstance(message, Stop):
                return 0
            loop.receive(message)
        loop.turn()


def _ready(engine: Engine, name: str, description: str) -> Ready:
    import mlx.core as mx

    pool, kind = engine.pool, mx.default_device().type.name.upper()
    return Ready(
        model=name,
        description=description,
        attention=engine.runner.attention,
        device=f"{kind} ({mx.device_info().get('device_name', 'of unknown name')})",
        kv_format=str(pool.format),
        block_size=pool.block_size,
        num_blocks=pool.num_blocks,
        pool_nbytes=pool.nbytes,
        max_num_seqs=engine.options.max_num_seqs,
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
    )


if __name__ == "__main__":
    sys.exit(main())

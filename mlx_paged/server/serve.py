"""The server: a socket, HTTP on it, an engine behind it, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import uvicorn

from mlx_paged.loader import load_tokenizer
from mlx_paged.server.api.app import create_app
from mlx_paged.server.api.settings import ServerSettings
from mlx_paged.server.engine_client import SHUTTING_DOWN, EngineClient
from mlx_paged.server.messages import Ready, Start
from mlx_paged.server.token_stream import EngineDied

# For answers that have been cut off to reach their clients.
LAST_WORDS_SECONDS = 2


@dataclass(frozen=True)
class ServeOptions:
    """How a server is set up.

    Attributes:
        start: what the engine loads.
        settings: of the HTTP side.
        host, port: where it listens; port 0 takes a free one.
        max_waiting: requests that may be without a first token.
        shutdown_timeout: seconds that open requests have after SIGTERM before they are cut off.
        access_log: whether each request is logged.
    """

    start: Start
    settings: ServerSettings
    host: str = "127.0.0.1"
    port: int = 8000
    max_waiting: int = 1024
    shutdown_timeout: float = 30.0
    access_log: bool = True


def serve(options: ServeOptions) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ValueError: the model can't be loaded or the address can't be used, as a sentence.
    """
    listener = _listen(options.host, options.port)
    tokenizer = load_tokenizer(options.start.model)
    client = EngineClient(options.start, max_waiting=options.max_waiting)
    app = create_app(client, tokenizer, options.settings)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=options.access_log,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=int(options.shutdown_timeout) + LAST_WORDS_SECONDS,
    )
    with listener:
        asyncio.run(_Server(config, client, options.shutdown_timeout).run_on(listener))


class _Server(uvicorn.Server):
    """Ends by itself on a signal, and reports the status 0 then, unlike uvicorn's own."""

    def __init__(
        self, config: uvicorn.Config, client: EngineClient, shutdown_timeout: float
    ) -> None:
        super().__init__(config)
        self._client = client
        self._shutdown_timeout = shutdown_timeout

    async def run_on(self, listener: socket.socket) -> None:
        """Serve on a socket that is bound, and load the model meanwhile."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._end)
        loading = asyncio.create_task(self._load(_url(listener)))
        try:
            await self.serve(sockets=[listener])
        finally:
            await self._client.stop()
        if loading.done():
            loading.result()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def _load(self, url: str) -> None:
        try:
            info = await self._client.start()
        except EngineDied as error:
            self.should_exit = True
            raise ValueError(str(error)) from error
        print(summary(info, url), file=sys.stderr, flush=True)

    def _end(self) -> None:
        """The first signal lets open requests finish in time, a second one cuts them off."""
        if self.should_exit:
            self._client.fail_open(SHUTTING_DOWN)
            return
        self.should_exit = True
        self._client.refuse_new()
        if self._client.num_open:
            logging.getLogger("mlx_paged.server").info(
                "open requests: %d; they have %g s to end",
                self._client.num_open,
                self._shutdown_timeout,
            )
        asyncio.get_running_loop().call_later(
            self._shutdown_timeout, self._client.fail_open, SHUTTING_DOWN
        )


def summary(info: Ready, url: str) -> str:
    """What serves where, in a few lines."""
    lines = {
        "model": info.description,
        "pool": f"{info.num_blocks:,} blocks of {info.block_size} tokens: "
        f"{info.num_blocks * info.block_size:,} tokens in {info.pool_nbytes / 2**30:.2f} GiB "
        f"({info.kv_format})",
        "attention": f"{info.attention}, on the {info.device}",
        "serving": f"{url}/v1",
        "pool page": f"{url}/",
    }
    return "\n".join(f"{name + ':':<11}{text}" for name, text in lines.items())


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ValueError(
            f"can't listen on port {port} of {host}: {error.strerror or error}; choose others "
            "with --host and --port"
        ) from error


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

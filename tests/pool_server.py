"""The whole server around a simulated engine, at a pace that one can watch.

The engine's scheduler, blocks and prefix cache are the real ones, its model is made of integers,
and what it says is scripted.
"""

import asyncio
import contextlib
import socket
import threading
from collections import deque
from types import SimpleNamespace

import uvicorn
from fake_client import make_app, tokens_of
from simulated_engine import SimulatedEngine

from mlx_paged.engine.request import Request
from mlx_paged.engine.stats import Counts, EngineStats
from mlx_paged.server.engine_client import LatestView
from mlx_paged.server.messages import PoolView, Ready, Token
from mlx_paged.server.pool_view import pool_view
from mlx_paged.server.token_stream import TokenStream

SAYINGS = (
    "A block holds the keys and values of some tokens, and a table says where it lies. ",
    "Whoever begins alike reads the same blocks, and copies one only to write. ",
    "Nothing is reserved ahead, so that whoever comes next finds room. ",
    "When the pool runs dry, the youngest waits and loses no word. ",
)


def ready(num_blocks=128, block_size=4):
    return Ready(
        model="tiny",
        description="made of integers",
        attention="gather",
        device="the CPU",
        kv_format="float32",
        block_size=block_size,
        num_blocks=num_blocks,
        pool_nbytes=num_blocks * block_size * 1000,
        max_num_seqs=32,
        max_model_len=2000,
        vocab_size=260,
    )


class ScriptedPool:
    """An engine's client whose views a test puts."""

    def __init__(self, info=None):
        self.info = info or ready()
        self.stats = self.not_ready = self.last_view = None
        self.num_open = self.num_waiting = self.num_restarts = 0
        self.watchers = set()

    @contextlib.asynccontextmanager
    async def views(self):
        watcher = LatestView()
        self.watchers.add(watcher)
        if self.last_view is not None:
            watcher.put(self.last_view)
        try:
            yield watcher
        finally:
            self.watchers.discard(watcher)

    def put(self, view):
        self.last_view = PoolView(view.stats, view.cached, view.tables, [])
        for watcher in self.watchers:
            watcher.put(view)

    def end(self):
        for watcher in self.watchers:
            watcher.end()


class SimulatedPool(ScriptedPool):
    """Steps a simulated engine every `step_seconds` while it has work.

    Attributes:
        say: the text of a sample, by its index; it goes on from the beginning at its end.
        refuse: an exception that `open` raises.
    """

    def __init__(self, step_seconds=0.02, num_blocks=128, block_size=4, **options):
        super().__init__(ready(num_blocks, block_size))
        options = {"max_num_seqs": 16, "max_num_batched_tokens": 64, **options}
        self.engine = SimulatedEngine(num_blocks, block_size, **options)
        self.step_seconds = step_seconds
        self.say = lambda index: SAYINGS[index % len(SAYINGS)]
        self.refuse = None
        self.counts = Counts()
        self.copies = deque()
        self.open_requests = {}
        self.num_told = {}
        self.put(self.view())

    def open(self, request_id, prompt_token_ids, params, *, priority=0, salt=""):
        if self.refuse is not None:
            raise self.refuse
        request = Request(
            request_id, list(prompt_token_ids), params, params.max_tokens or 64, salt=salt
        )
        self.engine.scheduler.add(request)
        stream = TokenStream(request_id, params.num_samples, self._drop, lambda _: None)
        self.open_requests[request_id] = (request, stream)
        return stream

    async def run(self):
        while True:
            if self.engine.scheduler.has_work():
                self._step()
            await asyncio.sleep(self.step_seconds)

    def view(self):
        engine, scheduler = self.engine, self.engine.scheduler
        shown = SimpleNamespace(
            pool=SimpleNamespace(blocks=engine.pool),
            scheduler=scheduler,
            prefix_cache=scheduler.prefix_cache,
            copies=self.copies,
            stats=self._stats,
        )
        return pool_view(shown)

    def _step(self):
        plan = self.engine.step()
        self.copies.extend(plan.copies)
        self.counts.num_copies += len(plan.copies)
        self.counts.num_prompt_tokens += sum(n for _, _, n in self.engine.rows if n > 1)
        for request, stream in list(self.open_requests.values()):
            for sample in request.samples:
                self._tell(request, stream, sample)
            if request.is_finished:
                del self.open_requests[request.request_id]
        self.put(self.view())

    def _tell(self, request, stream, sample):
        """The token that the step drew for the sample, if it did."""
        position = len(sample.sequence.token_ids) - request.num_prompt_tokens - 1
        if position < 0 or self.num_told.get(sample, 0) > position:
            return
        self.num_told[sample] = position + 1
        self.counts.num_generated_tokens += 1
        said = tokens_of(self.say(sample.index))
        token_id = said[position % len(said)]
        stream.put(
            Token(request.request_id, sample.index, token_id, finish_reason=sample.finish_reason)
        )

    def _drop(self, request_id, index):
        request, _ = self.open_requests[request_id]
        for sample in request.samples:
            if not sample.is_finished and index in (None, sample.index):
                self.engine._finish(sample, "abort")
        if index is None:
            del self.open_requests[request_id]
        self.put(self.view())

    def _stats(self):
        pool, scheduler = self.engine.pool, self.engine.scheduler
        num_used = pool.num_blocks - pool.num_free_blocks
        num_stored = sum(sample.sequence.num_cached_tokens for sample in scheduler.running)
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_preemptions=scheduler.num_preemptions,
            block_size=pool.block_size,
            num_blocks=pool.num_blocks,
            num_blocks_used=num_used,
            num_blocks_cached=sum(b in pool.index for b in pool.free_queue),
            slot_share=min(1, num_stored / max(1, num_used * pool.block_size)),
            pool_nbytes=1,
            peak_memory_nbytes=1,
            counts=self.counts,
            prefix=scheduler.prefix_cache.stats,
        )


class PoolServer:
    """The server with its own thread and event loop. `call` runs a function there.

    Args:
        client: of the engine; its `run`, if it has one, runs beside the server.
        port: 0 for a free one.
        settings: those of `ServerSettings`.
    """

    def __init__(self, client, port=0, **settings):
        self.client = client
        self.listener = socket.create_server(("127.0.0.1", port))
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(
            make_app(client, **settings),
            log_level="error",
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self.server = uvicorn.Server(config)
        self.started = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.error = None

    async def _run(self):
        self.loop = asyncio.get_running_loop()
        self.started.set()
        serving = asyncio.create_task(self.server.serve([self.listener]))
        tasks = {serving}
        if hasattr(self.client, "run"):
            tasks.add(asyncio.create_task(self.client.run()))
        done, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {serving}:
            self.error = task.exception()
        for task in running - {serving}:
            task.cancel()
        self.server.should_exit = True
        await serving

    def __enter__(self):
        self.thread.start()
        assert self.started.wait(10)
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        if self.thread.is_alive():
            self.call(self.client.end)
        self.thread.join(10)
        self.listener.close()
        assert not self.thread.is_alive()
        if self.error:
            raise self.error

    def call(self, function, *args):
        async def run():
            return function(*args)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

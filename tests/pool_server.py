"""The pool page over a real engine with a tiny model, in this process, at a pace one can watch."""

import asyncio
import contextlib
import json
import threading
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from tiny_engine import make_engine
from tiny_models import VOCAB_SIZE

from mlx_paged.engine.params import SamplingParams
from mlx_paged.server import page
from mlx_paged.server.engine_client import LatestView
from mlx_paged.server.messages import PoolView, Ready
from mlx_paged.server.pool_view import pool_view


@dataclass
class Settings:
    model_name: str = "tiny"
    api_key: str | None = None


def ready(num_blocks=128, block_size=4):
    return Ready(
        model="tiny",
        description="a tiny Qwen2",
        attention="gather",
        device="cpu",
        kv_format="float32",
        block_size=block_size,
        num_blocks=num_blocks,
        pool_nbytes=1_000_000,
        max_num_seqs=32,
        max_model_len=512,
        vocab_size=VOCAB_SIZE,
    )


class PoolClient:
    """What the page sees of an engine's client: views that a test, or an engine, puts."""

    def __init__(self, info=None):
        self.info = info or ready()
        self.not_ready = None
        self.watchers = set()

    @contextlib.asynccontextmanager
    async def views(self):
        watcher = LatestView()
        self.watchers.add(watcher)
        self.begin(watcher)
        try:
            yield watcher
        finally:
            self.watchers.discard(watcher)

    def begin(self, watcher):
        """Somebody watches."""

    def put(self, view: PoolView):
        for watcher in self.watchers:
            watcher.put(view)


class EnginePool(PoolClient):
    """Steps an engine every `step_seconds` while it has work."""

    def __init__(self, step_seconds=0.03, num_blocks=128, block_size=4, **options):
        options.update(num_blocks=num_blocks, block_size=block_size)
        super().__init__(ready(options["num_blocks"], options["block_size"]))
        self.options, self.engine = options, None
        self.step_seconds = step_seconds
        self.inboxes = {}
        self.num_requests = 0

    def begin(self, watcher):
        watcher.put(pool_view(self.engine))

    async def run(self):
        self.engine = make_engine(**self.options)  # an engine belongs to its thread
        while True:
            if self.engine.has_work():
                for output in self.engine.step():
                    if inbox := self.inboxes.get(output.request_id):
                        inbox.put_nowait(output)
                if self.watchers:
                    self.put(pool_view(self.engine))
            await asyncio.sleep(self.step_seconds)

    async def answer(self, prompt, params):
        """(request id, token) for each token."""
        self.num_requests += 1
        request_id = f"cmpl-{self.num_requests}"
        inbox = self.inboxes[request_id] = asyncio.Queue()
        self.engine.add_request(request_id, prompt, params)
        try:
            completes = False
            while not completes:
                output = await inbox.get()
                completes = output.completes
                yield request_id, output
        finally:
            self.engine.abort(request_id)
            del self.inboxes[request_id]
            self.put(pool_view(self.engine))


WORDS = (
    " A block holds the keys and values of some tokens , and its table says where they lie .".split(
        " "
    )
)


def tokens_of(text):
    """A token for each letter."""
    return [ord(letter) % VOCAB_SIZE for letter in text]


def make_app(client, settings=None, word=lambda token: f" {WORDS[token % len(WORDS)]}"):
    """The page, and as much of the API as it asks for. `word` is the text of a token id."""
    settings = settings or Settings()
    app = FastAPI()
    app.include_router(page.router(client, settings))

    async def complete(request: Request):
        if (
            settings.api_key
            and request.headers.get("authorization") != f"Bearer {settings.api_key}"
        ):
            return JSONResponse({"error": {"message": "Wrong API key."}}, 401)
        body = await request.json()
        prompt = body.get("prompt") or body["messages"][0]["content"]
        if prompt == "refuse me":
            return JSONResponse(
                {"error": {"message": "The queue is full."}}, 503, {"Retry-After": "3"}
            )
        params = SamplingParams(
            n=body["n"], max_tokens=body["max_tokens"], temperature=body["temperature"], seed=1
        )
        return StreamingResponse(events(prompt, params), media_type="text/event-stream")

    async def events(prompt, params):
        async with contextlib.aclosing(client.answer(tokens_of(prompt), params)) as tokens:
            async for request_id, output in tokens:
                text, reason = word(output.token_id), output.finish_reason
                choice = {"index": output.index, "text": text, "finish_reason": reason}
                yield f"data: {json.dumps({'id': request_id, 'choices': [choice]})}\n\n"
        yield "data: [DONE]\n\n"

    app.post("/v1/completions")(complete)
    app.post("/v1/chat/completions")(complete)
    return app


class ServerThread:
    """A server on a free port, with its own thread and event loop. `call` runs a function there."""

    def __init__(self, app, *tasks, port=0):
        self.config = uvicorn.Config(
            app, host="127.0.0.1", port=port, log_level="error", timeout_graceful_shutdown=1
        )
        self.server = uvicorn.Server(self.config)
        self.tasks = tasks
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.started = threading.Event()

    async def _run(self):
        self.loop = asyncio.get_running_loop()
        running = [asyncio.create_task(task()) for task in self.tasks]
        serving = asyncio.create_task(self.server.serve())
        while not self.server.started and not serving.done():
            await asyncio.sleep(0.01)
        self.started.set()
        await asyncio.wait([serving, *running], return_when=asyncio.FIRST_COMPLETED)
        self.errors = [task.exception() for task in running if task.done()]
        for task in running:
            task.cancel()
        await serving

    def __enter__(self):
        self.thread.start()
        assert self.started.wait(10)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join(10)
        assert not self.thread.is_alive()
        for error in self.errors:
            raise error

    def call(self, function, *args):
        async def run():
            return function(*args)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

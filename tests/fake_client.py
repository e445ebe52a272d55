"""An engine's client that answers from a script, a tokenizer of bytes, and a server around them."""

import asyncio
import contextlib
import socket
import tempfile
import threading
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import uvicorn
from mlx_lm.tokenizer_utils import load
from tiny_models import write_tokenizer

from mlx_paged.engine.params import SamplingParams
from mlx_paged.engine.stats import EngineStats
from mlx_paged.server.api.app import create_app
from mlx_paged.server.api.settings import ServerSettings
from mlx_paged.server.messages import Ready, Token
from mlx_paged.server.token_stream import TokenStream

MODEL = "someone/tiny"
EOS = 256
VOCAB_SIZE = 260
MAX_MODEL_LEN = 6000
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' or m.content == 'refuse me' %}"
    "{{ raise_exception('no such talk') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
FOREVER = "x" * 100_000


@cache
def make_tokenizer(template: str | None = TEMPLATE, **attributes):
    """A token for every byte, and one that ends answers. `attributes` are set on mlx-lm's."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        tokenizer = load(Path(folder))
    if template is not None:
        tokenizer._tokenizer.chat_template = template
        tokenizer.has_chat_template = True
    for name, value in attributes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def tokens_of(text: str) -> list[int]:
    return make_tokenizer().encode(text)


def text_of(token_ids: list[int]) -> str:
    return make_tokenizer().decode(token_ids)


@dataclass
class Opened:
    """A request that reached the engine, and what became of it."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int
    salt: str
    num_sent: int = 0
    is_closed: bool = False
    dropped: list[int | None] = field(default_factory=list)

    @property
    def prompt(self) -> str:
        return text_of(self.prompt_token_ids)


class FakeClient:
    """Answers every sample with `reply(prompt, index)`: its text, or an exception to raise.

    Attributes:
        reply: may also give (text, exception): the exception comes after the text.
        first_token_seconds: until the first token.
        step_seconds: between two tokens.
        tokens_per_step: that reach the reader together.
        refuse: an exception that `open` raises.
        finish: the reason of an answer's last token.
        opened: all requests so far.
    """

    def __init__(self):
        self.info = Ready(
            MODEL, "tiny", "gather", "cpu", "float32", 16, 400, 1, 32, MAX_MODEL_LEN, VOCAB_SIZE
        )
        self.stats = EngineStats(1, 2, 3, 16, 400, 50, 25, 0.5, 1000, 2000)
        self.num_open = self.num_waiting = self.num_restarts = 0
        self.reset()

    def reset(self):
        self.not_ready = None
        self.reply = lambda prompt, index: "Hello!"
        self.first_token_seconds = self.step_seconds = 0.0
        self.tokens_per_step = 1
        self.refuse = None
        self.finish = "stop"
        self.opened: list[Opened] = []

    @property
    def last(self) -> Opened:
        return self.opened[-1]

    @contextlib.asynccontextmanager
    async def views(self):
        async def none():
            await asyncio.Event().wait()
            yield

        yield none()

    def open(self, request_id, prompt_token_ids, params, *, priority=0, salt=""):
        if self.refuse is not None:
            raise self.refuse
        opened = Opened(request_id, prompt_token_ids, params, priority, salt)
        self.opened.append(opened)
        stream = TokenStream(
            request_id,
            params.num_samples,
            lambda _, index: opened.dropped.append(index),
            lambda _: setattr(opened, "is_closed", True),
        )
        opened.task = asyncio.create_task(self._feed(opened, stream))
        return stream

    async def _feed(self, opened, stream):
        answers = [self.reply(opened.prompt, i) for i in range(opened.params.num_samples)]
        await asyncio.sleep(self.first_token_seconds)
        steps = [self._tokens(opened, i, answer) for i, answer in enumerate(answers)]
        for step in range(max(map(len, steps))):
            if opened.is_closed:
                return
            for tokens in steps:
                if step < len(tokens):
                    if isinstance(tokens[step], Exception):
                        stream.fail(tokens[step])
                        return
                    stream.put(tokens[step])
                    opened.num_sent += 1
            if step % self.tokens_per_step == self.tokens_per_step - 1:
                await asyncio.sleep(self.step_seconds)

    def _tokens(self, opened, index, answer):
        text, error = answer if isinstance(answer, tuple) else (answer, None)
        if isinstance(text, Exception):
            return [text]
        token_ids = [*tokens_of(text), EOS]
        limit = opened.params.max_tokens or 10**9
        token_ids = token_ids[:limit]
        tokens = [
            Token(opened.request_id, index, token_id, self._logprobs(opened.params, token_id, i))
            for i, token_id in enumerate(token_ids)
        ]
        if error is not None:
            return [*tokens[:-1], error]
        tokens[-1].finish_reason = self.finish if token_ids[-1] == EOS else "length"
        tokens[-1].num_cached_tokens = 2
        return tokens

    def _logprobs(self, params, token_id, position):
        """The drawn token is the second likeliest everywhere."""
        if params.num_logprobs is None:
            return None
        drawn, likelier = (token_id, -1.5 - position), ((token_id + 1) % EOS, -0.5)
        others = [(likelier), drawn, *(((token_id + 1 + k) % EOS, -9.0 - k) for k in range(1, 25))]
        return [drawn, *others[: max(2, params.num_logprobs)]]


def make_app(client, tokenizer=None, **settings):
    return create_app(
        client, tokenizer or make_tokenizer(), ServerSettings(**{"model_name": MODEL, **settings})
    )


@contextlib.contextmanager
def serving(app):
    """The app on a port of its own. Gives its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()

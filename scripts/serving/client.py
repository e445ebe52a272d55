"""One request to a server of OpenAI's API, with the time of everything that comes back."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
DONE = "[DONE]"
# Of the connection, and of what comes over it.
NO_ANSWER = (
    httpx.HTTPError,
    httpx.StreamError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
)


@dataclass
class Reply:
    """What came back. Times are on the `time.perf_counter` clock.

    Attributes:
        status: of HTTP; None if there was none.
        texts, finish_reasons: by the index of the answer.
        text_times: when a piece of text came; of an answer that isn't streamed, its end.
        usage: the server's own count of tokens, empty if it gives none.
        error: why it is not a whole answer; None if it is.
        has_left: whether we closed the connection.
    """

    start: float
    end: float = 0.0
    status: int | None = None
    texts: dict[int, str] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    text_times: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    has_left: bool = False

    @property
    def text(self) -> str:
        return self.texts.get(0, "")

    @property
    def first_seconds(self) -> float | None:
        """To the first text."""
        return self.text_times[0] - self.start if self.text_times else None

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def gaps(self) -> list[float]:
        """Seconds between two pieces of text."""
        return [after - before for before, after in pairwise(self.text_times)]

    @property
    def num_tokens(self) -> int:
        """Of the answers: by the server's count, or else a token for each piece of text."""
        return int(self.usage.get("completion_tokens") or len(self.text_times))

    @property
    def num_prompt_tokens(self) -> int:
        return int(self.usage.get("prompt_tokens") or 0)

    @property
    def num_cached_tokens(self) -> int | None:
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")


@dataclass(frozen=True)
class Leave:
    """When a client hangs up: after so many seconds, or as soon as so many pieces have come."""

    seconds: float
    pieces: int | None = None


def make_client(url: str, concurrency: int, timeout: float, key: str | None = None) -> Any:
    """An httpx.AsyncClient whose requests may take `timeout` seconds, with a connection each."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    return httpx.AsyncClient(
        base_url=url, headers=headers, limits=limits, timeout=timeout, trust_env=False
    )


async def ask(client: Any, path: str, body: dict[str, Any], leave: Leave | None = None) -> Reply:
    """Sends a request and reads its answer to the end, or until it is time to leave."""
    reply = Reply(time.perf_counter())
    task = asyncio.ensure_future(_exchange(client, path, body, leave, reply))
    done, _ = await asyncio.wait({task}, timeout=leave.seconds if leave else None)
    if not done:
        reply.has_left = True
        task.cancel()
    await asyncio.wait({task})
    if not task.cancelled() and (error := task.exception()) is not None:
        if not isinstance(error, NO_ANSWER):
            raise error
        reply.error = f"{type(error).__name__}: {error}"
    reply.end = time.perf_counter()
    return reply


async def _exchange(
    client: Any, path: str, body: dict[str, Any], leave: Leave | None, reply: Reply
) -> None:
    async with client.stream("POST", path, json=body) as response:
        reply.status = response.status_code
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        if not is_stream:
            _take_whole(await response.aread(), reply)
            return
        # Read later, so that requests of other clients aren't kept waiting.
        pieces: list[tuple[float, bytes]] = []
        async for data in response.aiter_raw():
            pieces.append((time.perf_counter(), data))
            if leave and leave.pieces is not None and len(pieces) >= leave.pieces:
                reply.has_left = True
                return
    _take_events(pieces, reply)


def _take_whole(data: bytes, reply: Reply) -> None:
    body = json.loads(data)
    if reply.status != 200:
        reply.error = f"status {reply.status}: {_error_message(body)}"
        return
    reply.usage = body.get("usage") or {}
    for choice in body["choices"]:
        said = choice["message"]["content"] if "message" in choice else choice["text"]
        reply.texts[choice["index"]] = said or ""
        reply.finish_reasons[choice["index"]] = choice["finish_reason"]
    reply.text_times.append(time.perf_counter())


def _take_events(pieces: list[tuple[float, bytes]], reply: Reply) -> None:
    is_done = False
    for moment, data in _events(pieces):
        if data == DONE:
            is_done = True
            continue
        event = json.loads(data)
        if "error" in event:
            reply.error = _error_message(event)
            return
        reply.usage = event.get("usage") or reply.usage
        num_texts = sum(_take_choice(choice, reply) for choice in event["choices"])
        if num_texts:
            reply.text_times.append(moment)
    if not is_done:
        reply.error = "the stream ended early"


def _take_choice(choice: dict[str, Any], reply: Reply) -> bool:
    """Whether it holds text."""
    index = choice["index"]
    text = choice["delta"].get("content") if "delta" in choice else choice["text"]
    reply.texts[index] = reply.texts.get(index, "") + (text or "")
    if choice.get("finish_reason"):
        reply.finish_reasons[index] = choice["finish_reason"]
    return bool(text)


def _events(pieces: list[tuple[float, bytes]]) -> list[tuple[float, str]]:
    """The data of server-sent events, each with the time when its last byte came."""
    events = []
    rest = b""
    for moment, data in pieces:
        *whole, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            lines = event.decode().split("\n")
            values = [line[5:].strip() for line in lines if line.startswith("data:")]
            if values:
                events.append((moment, "\n".join(values)))
    return events


def _error_message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)

"""What the HTTP process and the engine process say to each other, as MessagePack."""

from __future__ import annotations

from typing import Any

import msgspec

from mlx_paged.engine.params import SamplingParams
from mlx_paged.engine.stats import EngineStats


class Message(msgspec.Struct, tag=True):
    """Any message; on the wire it carries its type's name."""


# To the engine


class Start(Message):
    """The first message: what to load. `options` are those of `EngineOptions`, by name."""

    model: str
    dtype: str | None
    options: dict[str, Any]


class Add(Message):
    """A request. The engine refuses or fails it, or answers it with tokens."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    salt: str = ""


class Abort(Message):
    """End a request, or one sample of it, whose reader has enough. Its blocks are free at once."""

    request_id: str
    index: int | None = None


class Watch(Message):
    """Begin or stop sending a `PoolView` several times a second."""

    on: bool


class Stop(Message):
    """End the process. What runs is dropped."""


# From the engine


class Ready(Message):
    """The model is loaded and warmed up."""

    model: str
    description: str
    attention: str
    device: str
    kv_format: str
    block_size: int
    num_blocks: int
    pool_nbytes: int
    max_num_seqs: int
    max_model_len: int
    vocab_size: int


class Token(msgspec.Struct, array_like=True):
    """One more token of one sample.

    Attributes:
        logprobs: (token id, log-probability) of the token drawn, then of all that are known,
            likeliest first: as many of the likeliest as were asked for, and the drawn one, which
            may be an extra one at the end. None if they weren't asked for.
        finish_reason: "stop", "length", "error" or "abort" if the sample ends here.
        num_cached_tokens: tokens of the prompt that the prefix cache held.
    """

    request_id: str
    index: int
    token_id: int
    logprobs: list[tuple[int, float]] | None = None
    finish_reason: str | None = None
    num_cached_tokens: int = 0


class Tokens(Message):
    """What one step drew."""

    tokens: list[Token]


class Refused(Message):
    """A request that can never run; `reason` is a sentence for the client."""

    request_id: str
    reason: str


class Failed(Message):
    """A request that was running when the engine met an error."""

    request_id: str
    reason: str


class Beat(Message):
    """A sign of progress, at least once a second unless a step takes longer."""

    stats: EngineStats


class Table(msgspec.Struct):
    """A running or waiting sample.

    Attributes:
        num_tokens: of prompt and answer so far.
        num_stored_tokens: those whose K/V are in the pool.
    """

    request_id: str
    index: int
    is_running: bool
    block_table: list[int]
    num_prompt_tokens: int
    num_tokens: int
    num_stored_tokens: int
    num_preemptions: int


class PoolView(Message):
    """The pool at one moment.

    Attributes:
        cached: free blocks that hold a prefix, as runs of (first block, number of blocks).
            Blocks that no table lists and that are not cached are free.
        copies: (source, destination) of blocks copied on write since the last view.
    """

    stats: EngineStats
    cached: list[tuple[int, int]]
    tables: list[Table]
    copies: list[tuple[int, int]]


class Died(Message):
    """The engine can't go on, and its process ends."""

    reason: str


ToEngine = Start | Add | Abort | Watch | Stop
FromEngine = Ready | Tokens | Refused | Failed | Beat | PoolView | Died

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """Raises msgspec.ValidationError for anything else."""
    return _to_engine.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    """Raises msgspec.ValidationError for anything else."""
    return _from_engine.decode(data)

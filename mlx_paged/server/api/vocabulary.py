"""The text of single tokens."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

from starlette.concurrency import run_in_threadpool

from mlx_paged.engine.text import first_token_id


class Vocabulary:
    """What single tokens are as bytes. A token may hold a part of a character.

    Args:
        tokenizer: mlx-lm's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.token_bytes = lru_cache(maxsize=65536)(self._token_bytes)

    @cached_property
    def first_token_id(self) -> int | None:
        """What to put before an answer's tokens, worked out once."""
        return first_token_id(self._tokenizer)

    async def prepare(self) -> None:
        """Read the tokenizer, which takes a second the first time, on another thread."""
        if "_llguidance" not in self.__dict__:
            await run_in_threadpool(getattr, self, "_llguidance")

    @cached_property
    def _llguidance(self) -> Any:
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(self._tokenizer._tokenizer, slices=[])
        except ValueError:  # not a fast tokenizer
            return None

    def _token_bytes(self, token_id: int) -> bytes:
        if self._llguidance is None or token_id >= self._llguidance.vocab_size:
            return str(self._tokenizer.decode([token_id])).encode()
        return bytes(self._llguidance.decode_bytes([token_id]))

    def token_text(self, token_id: int) -> str:
        """The token as text; one that holds no whole characters as bytes:\\x.."""
        token_bytes = self.token_bytes(token_id)
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)

"""What generating took: time, blocks, memory."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PoolStats:
    """The model, and what its answers took of the pool and of memory.

    `num_used_blocks` is the most at any one time.
    """

    model: str
    attention: str
    block_size: int
    num_blocks: int
    num_used_blocks: int
    peak_memory_bytes: int
    num_prompt_tokens: int
    num_generated_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """The fields, and what is derived from them."""
        derived = [name for name, value in vars(type(self)).items() if isinstance(value, property)]
        return asdict(self) | {name: getattr(self, name) for name in derived}

    def print(self) -> None:
        """A few lines on stderr."""
        for name, text in self._lines().items():
            print(f"{name + ':':<13}{text}", file=sys.stderr)

    def _lines(self) -> dict[str, str]:
        return {
            "model": f"{self.model}; attention: {self.attention}",
            "blocks": f"{self.num_used_blocks} of {self.num_blocks} used, {self.block_size} "
            "tokens each",
            "peak memory": f"{self.peak_memory_bytes / 2**30:.2f} GiB",
        }


@dataclass(frozen=True, kw_only=True)
class Stats(PoolStats):
    """One answer's: `prompt_seconds` until its first token, `generation_seconds` from there."""

    prompt_seconds: float
    generation_seconds: float

    @property
    def prompt_tokens_per_second(self) -> float:
        return self.num_prompt_tokens / self.prompt_seconds

    @property
    def generation_tokens_per_second(self) -> float | None:
        """Without the first token, which belongs to the prompt's pass; None if it is the only."""
        if self.num_generated_tokens < 2:
            return None
        return (self.num_generated_tokens - 1) / self.generation_seconds

    @property
    def slot_share(self) -> float:
        """Share of the used blocks' slots that hold a token at the end.

        The last token's K and V are never stored, since no token follows it.
        """
        num_stored = self.num_prompt_tokens + self.num_generated_tokens - 1
        return num_stored / (self.num_used_blocks * self.block_size)

    def _lines(self) -> dict[str, str]:
        lines = super()._lines()
        speed = self.generation_tokens_per_second
        lines["blocks"] += f"; {self.slot_share:.1%} of their slots hold tokens"
        return {
            "model": lines.pop("model"),
            "prompt": f"{self.num_prompt_tokens} tokens, {self.prompt_tokens_per_second:.1f} "
            f"tokens/s ({self.prompt_seconds:.2f} s to the first token)",
            "generation": f"{self.num_generated_tokens} tokens"
            + (f", {speed:.1f} tokens/s" if speed else ""),
            **lines,
        }


@dataclass(frozen=True, kw_only=True)
class BatchStats(PoolStats):
    """Those of many answers together, over the `seconds` from the first prompt to the last end."""

    num_answers: int
    seconds: float

    @property
    def generation_tokens_per_second(self) -> float:
        return self.num_generated_tokens / self.seconds

    def _lines(self) -> dict[str, str]:
        lines = super()._lines()
        lines["blocks"] += " at most at once"
        return {
            "model": lines.pop("model"),
            "prompts": f"{self.num_prompt_tokens} tokens",
            "answers": f"{self.num_answers} with {self.num_generated_tokens} tokens in "
            f"{self.seconds:.2f} s, {self.generation_tokens_per_second:.1f} tokens/s together",
            **lines,
        }

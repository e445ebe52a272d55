"""What one answer took: time, blocks, memory."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stats:
    """`prompt_seconds` lasts until the first token, `generation_seconds` from there on."""

    model: str
    attention: str
    num_prompt_tokens: int
    num_generated_tokens: int
    prompt_seconds: float
    generation_seconds: float
    block_size: int
    num_blocks: int
    peak_memory_bytes: int

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
    def num_stored_tokens(self) -> int:
        """Tokens whose K/V were stored at the end: all but the last, which nothing followed."""
        return self.num_prompt_tokens + self.num_generated_tokens - 1

    @property
    def num_used_blocks(self) -> int:
        return -(-self.num_stored_tokens // self.block_size)

    @property
    def slot_share(self) -> float:
        """Share of the used blocks' slots that hold a token."""
        return self.num_stored_tokens / (self.num_used_blocks * self.block_size)

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "attention": self.attention,
            "prompt_tokens": self.num_prompt_tokens,
            "generated_tokens": self.num_generated_tokens,
            "prompt_seconds": self.prompt_seconds,
            "generation_seconds": self.generation_seconds,
            "prompt_tokens_per_second": self.prompt_tokens_per_second,
            "generation_tokens_per_second": self.generation_tokens_per_second,
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "num_used_blocks": self.num_used_blocks,
            "slot_share": self.slot_share,
            "peak_memory_bytes": self.peak_memory_bytes,
        }

    def print(self) -> None:
        """Five lines on stderr."""
        speed = self.generation_tokens_per_second
        lines = {
            "model": f"{self.model}; attention: {self.attention}",
            "prompt": f"{self.num_prompt_tokens} tokens, {self.prompt_tokens_per_second:.1f} "
            f"tokens/s ({self.prompt_seconds:.2f} s to the first token)",
            "generation": f"{self.num_generated_tokens} tokens"
            + (f", {speed:.1f} tokens/s" if speed else ""),
            "blocks": f"{self.num_used_blocks} of {self.num_blocks} used, {self.block_size} tokens "
            f"each; {self.slot_share:.1%} of their slots hold tokens",
            "peak memory": f"{self.peak_memory_bytes / 2**30:.2f} GiB",
        }
        for name, text in lines.items():
            print(f"{name + ':':<13}{text}", file=sys.stderr)

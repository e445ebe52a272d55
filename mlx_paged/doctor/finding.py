"""What a report consists of, and what it is asked about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["ok", "note", "missing"]


@dataclass(frozen=True)
class Finding:
    """One line of the report: `text` for a person, `value` for a program."""

    section: str
    name: str
    text: str
    value: Any = None
    level: Level = "ok"
    advice: str | None = None


@dataclass(frozen=True)
class Question:
    """What the report is asked about; the fields are those of `LLM`, `kv_memory` in bytes."""

    model: str = "smollm2"
    dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_memory: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 32
    attention: str = "auto"

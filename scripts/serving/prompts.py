"""Prompts of ShareGPT's lengths, and long texts for system prompts."""

from __future__ import annotations

import json
import random
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED_DATA = ROOT.parent / "shared/data"
LENGTHS = ROOT / "scripts/data/sharegpt.json"
MAX_PROMPT_TOKENS = 600

# Frequent words, most of them one token with the space before, in most vocabularies.
WORDS = """\
    the of and to in is that it was for on are as with his they be at one have this from or had
    by not but what all were when we there can an your which their said if do will each about how
    up out them then she many some so these would other into has more her two like him see time
    could no make than first been its who now people my made over did down only way find use may
    water long little very after words called just where most know
"""


def chat_prompts(count: int) -> list[str]:
    """Different texts: ShareGPT's, where they are, and then words in its lengths."""
    texts = _sharegpt_texts()[:count]
    rng = random.Random(0)
    lengths = [p for p, _ in json.loads(LENGTHS.read_text()) if p <= MAX_PROMPT_TOKENS]
    return texts + [
        f"Go on with this text: {words(rng, length)}" for length in lengths[: count - len(texts)]
    ]


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS.split(), k=count))


def system_prompt(number: int, num_tokens: int) -> str:
    """A text of about that many tokens, another for each number, different from the start on."""
    rng = random.Random(f"system prompt {number}")
    return f"Case {number}. Answer in a word, by these rules. {words(rng, num_tokens)}."


def _sharegpt_texts() -> list[str]:
    file = SHARED_DATA / "prompts/sharegpt_prompts_100.jsonl"
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]

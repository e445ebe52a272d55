"""ShareGPT and Alpaca from the Hugging Face hub, at fixed revisions, tokenized."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import track

from measurements.lengths import Pair

TOKENIZER = ("Qwen/Qwen2.5-1.5B-Instruct", "989aa7980e4cf806f80c7fef2b1adb7bc71aa306")
DATASETS = {
    "sharegpt": {
        "path": "anon8231489123/ShareGPT_Vicuna_unfiltered",
        "revision": "192ab2185289094fc556ec8ce5ce1e8e587154ca",
        "data_files": "ShareGPT_V3_unfiltered_cleaned_split.json",
    },
    "alpaca": {
        "path": "tatsu-lab/alpaca",
        "revision": "dce01c9b08f87459cf36a430d809084718273017",
    },
}


def pairs(name: str) -> list[Pair]:
    """Prompt and answer tokens of every record; downloads what isn't there yet.

    Raises:
        ValueError: the package `datasets` or the network is missing, with the way out.
    """
    try:
        from datasets import load_dataset
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(f"{error}; pip install -e '.[datasets]'") from error
    try:
        records = load_dataset(split="train", **DATASETS[name])
        tokenizer = AutoTokenizer.from_pretrained(TOKENIZER[0], revision=TOKENIZER[1])
    except Exception as error:  # the hub client has dozens of types
        raise ValueError(
            f"{DATASETS[name]['path']} could not be loaded from the hub: {error} "
            "(without a network: leave --source out)"
        ) from error
    texts = list((sharegpt_texts if name == "sharegpt" else alpaca_texts)(records))
    return count_tokens(tokenizer, texts)


def sharegpt_texts(records: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """The first two turns of each record that has them, whoever wrote them."""
    for record in records:
        turns = record["conversations"]
        if len(turns) >= 2:
            yield turns[0]["value"], turns[1]["value"]


def alpaca_texts(records: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Instruction and input, and the output."""
    for record in records:
        prompt = record["instruction"]
        if record["input"]:
            prompt += "\n" + record["input"]
        yield prompt, record["output"]


def count_tokens(tokenizer: Any, texts: list[tuple[str, str]], batch: int = 1000) -> list[Pair]:
    """Tokens of each pair of texts, without special ones."""
    counted: list[Pair] = []
    console = Console(stderr=True)
    for start in track(range(0, len(texts), batch), "counting tokens", console=console):
        part = texts[start : start + batch]
        prompts, answers = (
            tokenizer(list(side), add_special_tokens=False)["input_ids"]
            for side in zip(*part, strict=True)
        )
        counted += [(len(p), len(a)) for p, a in zip(prompts, answers, strict=True)]
    return counted

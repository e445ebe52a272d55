"""Where prompts come from, and how one becomes tokens."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mlx_paged.cli.manners import UsageError

STDIN = "-"


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts that the command line names, at least one and none empty."""
    if (args.prompt is None) == (args.prompts_file is None):
        raise UsageError("generate takes one prompt, - for stdin, or --prompts-file")
    if args.raw and args.system is not None:
        raise UsageError("--system needs the chat template, which --raw leaves out")
    if args.prompts_file is not None:
        return read_prompts_file(args.prompts_file)
    prompt = _read(STDIN).removesuffix("\n") if args.prompt == STDIN else args.prompt
    if not prompt:
        raise UsageError("the prompt is empty")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UsageError("the prompt is not valid UTF-8") from error
    return [prompt]


def to_token_ids(prompt: str, tokenizer: Any, system: str | None, raw: bool) -> list[int]:
    """The prompt's tokens: in the model's chat template, or as they are if `raw`."""
    if raw:
        return list(tokenizer.encode(prompt))
    if not tokenizer.has_chat_template:
        raise UsageError("the model has no chat template; give --raw to use the prompt as it is")
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))


def _read(name: str) -> str:
    try:
        if name != STDIN:
            return Path(name).read_text(encoding="utf-8")
        if sys.stdin.isatty():
            print("Type the prompt, then Ctrl-D on a line of its own.", file=sys.stderr)
        return sys.stdin.buffer.read().decode("utf-8")
    except OSError as error:
        raise UsageError(f"{name} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        source = "stdin" if name == STDIN else name
        raise UsageError(f"{source} is not valid UTF-8 (byte {error.start})") from error


def read_prompts_file(name: str) -> list[str]:
    """One prompt a line; a line that starts with { is a JSON object with a "prompt"."""
    prompts = []
    for number, line in enumerate(_read(name).split("\n"), start=1):
        if not line.strip():
            continue
        prompts.append(_from_json(line, f"{name}, line {number}") if line[0] == "{" else line)
    if not prompts:
        raise UsageError(f"{name} holds no prompt")
    return prompts


def _from_json(line: str, place: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except ValueError as error:
        raise UsageError(f"{place} starts like JSON, but isn't: {error}") from error
    except KeyError as error:
        raise UsageError(f'{place} has no "prompt"') from error
    if not isinstance(prompt, str) or not prompt:
        raise UsageError(f'{place}: "prompt" must be a text that is not empty')
    return prompt

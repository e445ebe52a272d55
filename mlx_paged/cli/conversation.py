"""The messages of a chat, and the files that keep them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Message = dict[str, str]

ROLES = ("system", "user", "assistant")


class Conversation:
    """What a person and a model said in turn, after an optional system message.

    A question without an answer, the last one at most, is replaced by the next question.

    Attributes:
        system: the system message; None leaves it to the model's chat template.
        turns: messages of the roles user and assistant.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        system = [] if self.system is None else [_message("system", self.system)]
        return system + self.turns

    @property
    def is_asked(self) -> bool:
        """Whether the last question waits for an answer."""
        return bool(self.turns) and self.turns[-1]["role"] == "user"

    def ask(self, question: str) -> None:
        if self.is_asked:
            self.turns.pop()
        self.turns.append(_message("user", question))

    def answer(self, text: str) -> None:
        self.turns.append(_message("assistant", text))

    def ask_again(self) -> str:
        """Takes the last answer back and returns its question. ValueError without a question."""
        while self.turns and not self.is_asked:
            self.turns.pop()
        if not self.turns:
            raise ValueError("nothing has been asked yet")
        return self.turns[-1]["content"]

    def clear(self) -> None:
        """Forgets all turns; the system message stays."""
        self.turns.clear()

    def save(self, file: Path) -> None:
        """Writes JSON: an object with "messages", as OpenAI's API takes them.

        Raises ValueError if there is a file that isn't a saved conversation, or for a place that
        can't be written to.
        """
        if file.exists():
            try:
                _read(file)
            except ValueError as error:
                raise ValueError(
                    f"{file} exists and is no saved conversation; choose another name"
                ) from error
        text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=2)
        try:
            file.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{file} can't be written: {error.strerror or error}") from error

    def load(self, file: Path) -> None:
        """Becomes what `save` wrote. Raises ValueError, and stays as it is, for anything else."""
        messages = _read(file)
        system = [message["content"] for message in messages if message["role"] == "system"]
        self.system = "\n\n".join(system) if system else None
        self.turns = [message for message in messages if message["role"] != "system"]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _read(file: Path) -> list[Message]:
    try:
        data: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} can't be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    messages = data.get("messages") if isinstance(data, dict) else data
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise ValueError(
            f'{file} has no "messages", a list of objects with "role" ({", ".join(ROLES)}) and '
            '"content" (text)'
        )
    return [_message(message["role"], message["content"]) for message in messages]


def _is_message(item: Any) -> bool:
    return (
        isinstance(item, dict)
        and item.get("role") in ROLES
        and isinstance(item.get("content"), str)
    )

"""Messages of a chat, as clients send them."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema

from mlx_paged.server.api.fields import Body, refusal


def read_content(value: Any) -> Any:
    """Text of a message, whether it came whole or in parts."""
    if not isinstance(value, list):
        return value
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise refusal(
                f"content[{index}] is {f'of type {kind!r}' if kind else 'no content part'}; "
                "the model reads text alone, as a string or in parts of type 'text'."
            )
        if not isinstance(part.get("text"), str):
            raise refusal(f"content[{index}] has no text.")
        texts.append(part["text"])
    return "".join(texts)


def _read_arguments(value: str) -> str:
    """Check that a call's arguments are a JSON object."""
    try:
        arguments = json.loads(value)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise refusal("a tool call's arguments must be a JSON object, as text.")
    return value


_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Content = Annotated[
    str,
    BeforeValidator(read_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]}),
]


class CalledFunction(Body):
    """A function that the model called."""

    name: str
    arguments: Annotated[str, AfterValidator(_read_arguments)] = Field(
        description="A JSON object, as text.", examples=['{"city": "Paris"}']
    )


class ToolCall(Body):
    """A call that the model made."""

    model_config = ConfigDict(extra="ignore")

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class _Message(Body):
    model_config = ConfigDict(extra="ignore")

    name: str | None = Field(default=None, description="Ignored.")


class SystemMessage(_Message):
    """What the model should know or do throughout."""

    role: Literal["system", "developer"]
    content: Content


class UserMessage(_Message):
    """What the user says."""

    role: Literal["user"]
    content: Content


class AssistantMessage(_Message):
    """What the model said."""

    refused: ClassVar[dict[str, str]] = {
        "function_call": "send tool_calls",
        "audio": "send the text as content",
    }

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: list[ToolCall] | None = None


class ToolMessage(_Message):
    """What a tool that the model called has answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]

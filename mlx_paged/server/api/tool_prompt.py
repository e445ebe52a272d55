"""Messages and tools as a chat template gets them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mlx_paged.server.api.chat_request import Tool
from mlx_paged.server.api.messages import AssistantMessage, Message, ToolCall, ToolMessage

INSTRUCTION = """\
You can call functions. They are, as JSON:
{tools}
To call one, write exactly this, with its name and its arguments as a JSON object:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """For a template that knows tools. Arguments of calls are given as objects."""
    return [_template_message(message) for message in messages]


def tell_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """For a template that knows no tools: they, their calls and results are told in text."""
    told: list[dict[str, Any]] = []
    for message in messages:
        entry = _told_message(message)
        if told and isinstance(message, ToolMessage) and told[-1]["role"] == "user":
            told[-1]["content"] += "\n" + entry["content"]
        else:
            told.append(entry)
    if tools:
        _instruct(told, tools)
    return told


def _template_message(message: Message) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    entry: dict[str, Any] = {"role": role, "content": message.content or ""}
    if isinstance(message, ToolMessage):
        entry["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            entry["name"] = message.name
    if isinstance(message, AssistantMessage) and message.tool_calls:
        entry["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    return entry


def _template_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _told_message(message: Message) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    content = message.content or ""
    if isinstance(message, ToolMessage):
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    if isinstance(message, AssistantMessage) and message.tool_calls:
        calls = [_told_call(call) for call in message.tool_calls]
        content = "\n".join([content, *calls] if content else calls)
    return {"role": role, "content": content}


def _told_call(call: ToolCall) -> str:
    name = json.dumps(call.function.name)
    return f'<tool_call>\n{{"name": {name}, "arguments": {call.function.arguments}}}\n</tool_call>'


def _instruct(told: list[dict[str, Any]], tools: Sequence[Tool]) -> None:
    listed = [tool.model_dump(exclude_none=True) for tool in tools]
    text = INSTRUCTION.format(tools=json.dumps(listed, ensure_ascii=False))
    if told[0]["role"] == "system":
        told[0]["content"] = f"{told[0]['content']}\n\n{text}".lstrip()
    else:
        told.insert(0, {"role": "system", "content": text})

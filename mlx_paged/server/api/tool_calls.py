"""Calls of tools in the text of an answer."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.tool_parsers import json_tools

from mlx_paged.engine.text import overlap
from mlx_paged.server.api.responses import FunctionCall, ToolCallMade


@dataclass(frozen=True)
class ToolSyntax:
    """How a model writes calls.

    Attributes:
        start, end: what stands around a call. With an empty `end`, all that follows belongs to it.
        parse: turns what stands between them into a dict with "name" and "arguments", or several.
    """

    start: str
    end: str
    parse: Callable[[str, Any], Any]


JSON_SYNTAX = ToolSyntax(
    json_tools.tool_call_start, json_tools.tool_call_end, json_tools.parse_tool_call
)


def syntax_of(tokenizer: Any) -> ToolSyntax:
    """The model's own way, or the one that it is told of."""
    if not tokenizer.has_tool_calling:
        return JSON_SYNTAX
    return ToolSyntax(
        tokenizer.tool_call_start, tokenizer.tool_call_end or "", tokenizer.tool_parser
    )


@dataclass
class ToolReader:
    """Parts an answer's text, as it comes, into content and calls.

    Text that could be the beginning of a call is held back, and so is space before one.
    What stands between the marks but is no call is content.

    Attributes:
        tools: as the parsers of mlx-lm take them.
        at_most: calls to read.
        num_calls: read so far.
    """

    syntax: ToolSyntax
    tools: list[dict[str, Any]]
    at_most: int | None = None
    num_calls: int = 0
    _pending: str = field(default="", init=False)
    _is_inside: bool = field(default=False, init=False)

    @property
    def is_full(self) -> bool:
        """Whether no call may follow."""
        return self.at_most is not None and self.num_calls >= self.at_most

    def feed(self, text: str) -> tuple[str, list[ToolCallMade]]:
        """Content and calls that have become certain."""
        self._pending += text
        content = ""
        calls: list[ToolCallMade] = []
        while not self.is_full:
            if not self._is_inside:
                content += self._take_until_start()
            if not self._is_inside or not self._has_end():
                break
            more, new_calls = self._take_call()
            content += more
            calls += new_calls
        return content, calls

    def finish(self) -> tuple[str, list[ToolCallMade]]:
        """What remains at the answer's end. Space around calls is no content."""
        content = ""
        calls: list[ToolCallMade] = []
        if self._is_inside and not self.is_full:
            if self.syntax.end:
                content = self.syntax.start + self._pending
            else:
                content, calls = self._take_call()
        elif not self.num_calls:
            content = self._pending
        self._pending = ""
        return content, calls

    def _take_until_start(self) -> str:
        before, mark, after = self._pending.partition(self.syntax.start)
        if mark:
            self._is_inside, self._pending = True, after
            return before.rstrip()
        end = len(before) - overlap(before, self.syntax.start)
        end = len(before[:end].rstrip())
        self._pending = before[end:]
        return before[:end]

    def _has_end(self) -> bool:
        return bool(self.syntax.end) and self.syntax.end in self._pending

    def _take_call(self) -> tuple[str, list[ToolCallMade]]:
        inside, mark, after = (
            self._pending.partition(self.syntax.end) if self.syntax.end else (self._pending, "", "")
        )
        self._is_inside, self._pending = False, after
        calls = self._parse(inside)
        if not calls:
            return self.syntax.start + inside + mark, []
        if self.at_most is not None:
            calls = calls[: self.at_most - self.num_calls]
        self.num_calls += len(calls)
        return "", calls

    def _parse(self, text: str) -> list[ToolCallMade]:
        try:
            parsed = self.syntax.parse(text, self.tools)
        except Exception:
            # What a model writes can fail in as many ways as there are parsers.
            return []
        calls = parsed if isinstance(parsed, list) else [parsed]
        made = [_call(call) for call in calls]
        return [call for call in made if call is not None]


def _call(call: Any) -> ToolCallMade | None:
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        return None
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    call_id = call.get("id")
    return ToolCallMade(
        id=call_id if isinstance(call_id, str) else f"call_{uuid.uuid4().hex[:24]}",
        type="function",
        function=FunctionCall(name=name, arguments=arguments),
    )

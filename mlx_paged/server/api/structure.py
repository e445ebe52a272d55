"""Grammars that answers must follow, in llguidance's notation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher
from starlette.concurrency import run_in_threadpool

from mlx_paged.server.api.chat_request import (
    ChatRequest,
    Function,
    JsonObjectFormat,
    JsonSchemaFormat,
)
from mlx_paged.server.api.errors import invalid, printable
from mlx_paged.server.api.tool_calls import JSON_SYNTAX, syntax_of

# A small model can otherwise write spaces until its answer is full.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
ANY_OBJECT: dict[str, Any] = {"type": "object"}
NO_ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


async def grammar_of(request: ChatRequest, tokenizer: Any) -> str | None:
    """The grammar of a chat's answer; None if it may be any text.

    Raises:
        ApiError: a schema that is no JSON Schema, or that can't be enforced.
    """
    forced = request.forced_tools
    schema = _schema_of(request)
    if forced:
        if schema is not None:
            raise invalid(
                "response_format can't hold for an answer that must call a tool; leave it out, "
                "or set tool_choice to 'auto' or 'none'.",
                "response_format",
            )
        several = request.parallel_tool_calls is not False
        lark, param = _calls_rule(forced, several), "tools"
    elif schema is not None and request.offered_tools:
        if syntax_of(tokenizer).start != JSON_SYNTAX.start:
            raise invalid(
                "response_format together with tools is not supported for the way in which this "
                "model writes calls; set tool_choice to 'none' or 'required'.",
                "response_format",
            )
        functions = [tool.function for tool in request.offered_tools]
        several = request.parallel_tool_calls is not False
        lark = f"{_calls_rule(functions, several)}\nanswer: {_json_rule(schema)}\n"
        lark, param = lark.replace("start: ", "start: answer | ", 1), "response_format"
    elif schema is not None:
        lark, param = f"start: {_json_rule(schema)}\n", "response_format"
    else:
        return None
    grammar = str(LLMatcher.grammar_from_lark(lark))
    if problem := await run_in_threadpool(LLMatcher.validate_grammar, grammar):
        raise invalid(f"The schema can't be enforced: {_first_line(problem)}", param)
    return grammar


def _first_line(problem: str) -> str:
    """The problem itself, without the place in a text that the client hasn't seen."""
    line = problem.strip().partition("\n")[0]
    return printable(line.rpartition("failed to compile JSON schema: ")[2], 300)


def _schema_of(request: ChatRequest) -> dict[str, Any] | None:
    match request.response_format:
        case JsonSchemaFormat(json_schema=wanted):
            return ANY_OBJECT if wanted.schema_ is None else wanted.schema_
        case JsonObjectFormat():
            return ANY_OBJECT
    return None


def _calls_rule(functions: Sequence[Function], several: bool) -> str:
    """One call, or one and more, of the functions."""
    start, end = json.dumps(JSON_SYNTAX.start + "\n"), json.dumps("\n" + JSON_SYNTAX.end)
    names = [f"call{i}" for i in range(len(functions))]
    lines = [
        'start: call ("\\n" call)*' if several else "start: call",
        f"call: {start} ({' | '.join(names)}) {end}",
    ]
    for name, function in zip(names, functions, strict=True):
        head = json.dumps(f'{{"name": "{function.name}", "arguments": ')
        schema = NO_ARGUMENTS if function.parameters is None else function.parameters
        lines.append(f'{name}: {head} {_json_rule(schema)} "}}"')
    return "\n".join(lines) + "\n"


def _json_rule(schema: dict[str, Any]) -> str:
    options = schema.get("x-guidance")
    options = dict(options) if isinstance(options, dict) else {}
    options.setdefault("whitespace_pattern", WHITESPACE)
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"

"""Prompts as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool

from mlx_paged.server.api.chat_request import ChatRequest
from mlx_paged.server.api.errors import invalid
from mlx_paged.server.api.tool_prompt import tell_tools, template_messages

# Tokenizing takes about a millisecond for this many characters.
LONG = 4000
RESERVED = {"add_generation_prompt", "conversation", "messages", "tokenize", "tools", "documents"}


async def encode_prompts(tokenizer: Any, prompts: Sequence[str | list[int]]) -> list[list[int]]:
    """Tokens of prompts, texts with what the tokenizer puts before them."""
    if sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) > LONG:
        return await run_in_threadpool(_encode_prompts, tokenizer, prompts)
    return _encode_prompts(tokenizer, prompts)


async def encode_chat(tokenizer: Any, request: ChatRequest) -> list[int]:
    """Tokens of a chat, by the model's template.

    Raises:
        ApiError: the model has no template, or its template can't render these messages.
    """
    length = sum(len(message.content or "") for message in request.messages)
    if length + 1000 * len(request.offered_tools) > LONG:
        return await run_in_threadpool(_encode_chat, tokenizer, request)
    return _encode_chat(tokenizer, request)


def _encode_prompts(tokenizer: Any, prompts: Sequence[str | list[int]]) -> list[list[int]]:
    return [_encode(tokenizer, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def _encode(tokenizer: Any, prompt: str) -> list[int]:
    token_ids = list(tokenizer.encode(prompt))
    if not token_ids:
        raise invalid("The prompt has no tokens; an answer needs something to follow.", "prompt")
    return token_ids


def _encode_chat(tokenizer: Any, request: ChatRequest) -> list[int]:
    if not tokenizer.has_chat_template:
        raise invalid(
            "The model has no chat template; send its prompt as text to /v1/completions.",
            "messages",
        )
    variables = _variables(request)
    messages: Sequence[dict[str, Any]]
    if tokenizer.has_tool_calling:
        messages = template_messages(request.messages)
        tools = [tool.model_dump(exclude_none=True) for tool in request.offered_tools]
        variables["tools"] = tools or None
    else:
        messages = tell_tools(request.messages, request.offered_tools)
    try:
        token_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **variables)
    except Exception as error:
        # A template is a program of the model's author, and can raise anything.
        raise invalid(
            f"The model's chat template can't render these messages: {error}", "messages"
        ) from error
    return [int(token_id) for token_id in token_ids]


def _variables(request: ChatRequest) -> dict[str, Any]:
    variables = dict(request.chat_template_kwargs or {})
    if taken := sorted(RESERVED & variables.keys()):
        raise invalid(f"chat_template_kwargs can't set {taken[0]!r}.", "chat_template_kwargs")
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    return variables

"""/v1/chat/completions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import APIRouter, Body, Request
from starlette.responses import Response

from mlx_paged.server.api.answer import Answer
from mlx_paged.server.api.chat_request import ChatRequest
from mlx_paged.server.api.context import Context
from mlx_paged.server.api.generation import Generation, Order
from mlx_paged.server.api.logprobs import chat_logprobs
from mlx_paged.server.api.prompt import encode_chat
from mlx_paged.server.api.reply import Reply, finish_reason
from mlx_paged.server.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ToolCallDelta,
    ToolCallMade,
)
from mlx_paged.server.api.route import JsonRoute, generates, respond
from mlx_paged.server.api.sampling import sampling_params
from mlx_paged.server.api.structure import grammar_of
from mlx_paged.server.api.tool_calls import JSON_SYNTAX, ToolReader, syntax_of


def router(context: Context) -> APIRouter:
    """The chat route."""
    routes = APIRouter(route_class=JsonRoute, tags=["OpenAI"])

    @routes.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses=generates(ChatChunk),
        summary="Answer a chat",
    )
    async def create_chat_completion(
        request: Request, body: Annotated[ChatRequest, Body()]
    ) -> Response:
        return await respond(request, context, body, _stream, _answer)

    return routes


class Chat:
    """A chat request whose answers are on their way."""

    def __init__(self, context: Context, body: ChatRequest, generation: Generation) -> None:
        self.body, self.generation = body, generation
        self.reply = Reply(context, generation)
        self._vocabulary = context.vocabulary
        self._readers: dict[int, ToolReader] = {}
        if body.offered_tools:
            syntax = JSON_SYNTAX if body.forced_tools else syntax_of(context.tokenizer)
            tools = [tool.model_dump(exclude_none=True) for tool in body.offered_tools]
            at_most = 1 if body.parallel_tool_calls is False else None
            for answer in generation.answers[0]:
                self._readers[answer.index] = ToolReader(syntax, tools, at_most)

    def take(self, answer: Answer) -> tuple[str, list[ToolCallMade]]:
        """Content and calls that came since the last time. May end the answer."""
        text, reader = answer.take(), self._readers.get(answer.index)
        if reader is None:
            return text, []
        content, calls = reader.feed(text)
        if reader.is_full and answer.finish_reason is None:
            self.generation.end_sample(0, answer)
        if answer.finish_reason is not None:
            more, more_calls = reader.finish()
            content, calls = content + more, calls + more_calls
        return content, calls

    def logprobs(self, answer: Answer) -> ChatLogprobs | None:
        """Those that came since the last time."""
        if not self.body.logprobs:
            return None
        return chat_logprobs(answer.take_logprobs(), self._vocabulary)

    def num_calls(self, answer: Answer) -> int:
        reader = self._readers.get(answer.index)
        return reader.num_calls if reader else 0

    def finish_reason(self, answer: Answer) -> str | None:
        """Why the answer ended, with calls as the reason of their own."""
        if answer.finish_reason == "stop" and self.num_calls(answer):
            return "tool_calls"
        return answer.finish_reason

    def chunk(self, index: int, delta: ChatDelta, **fields: object) -> ChatChunk:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._chunk([ChatChunkChoice.model_validate({**choice, **fields})])

    def usage_chunk(self) -> ChatChunk:
        return self._chunk([]).model_copy(update={"usage": self.reply.usage()})

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        head = self.reply.chunk_head(self.body.includes_usage)
        return ChatChunk(**head, object="chat.completion.chunk", choices=choices)


async def _begin(context: Context, body: ChatRequest) -> Chat:
    """Everything before the engine."""
    if body.logprobs:
        await context.vocabulary.prepare()
    grammar = await grammar_of(body, context.tokenizer)
    prompt = await encode_chat(context.tokenizer, body)
    params = sampling_params(
        body,
        context,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=grammar,
    )
    order = Order.of(body, "chatcmpl", [prompt], params, body.top_logprobs)
    return Chat(context, body, Generation(context, order))


async def _answer(context: Context, body: ChatRequest) -> Response:
    chat = await _begin(context, body)
    parts: dict[int, tuple[str, list[ToolCallMade]]] = {}
    async with contextlib.aclosing(chat.generation.steps()) as steps:
        async for touched in steps:
            for _, answer in touched:
                content, calls = parts.get(answer.index, ("", []))
                more, more_calls = chat.take(answer)
                parts[answer.index] = (content + more, calls + more_calls)
    choices = [_choice(chat, answer, *parts[answer.index]) for answer in chat.generation.answers[0]]
    reply = chat.reply
    completion = ChatCompletion(
        **reply.head(), object="chat.completion", choices=choices, usage=reply.usage()
    )
    return reply.response(completion)


def _choice(chat: Chat, answer: Answer, content: str, calls: list[ToolCallMade]) -> ChatChoice:
    fields = {"tool_calls": calls} if calls else {}
    text = content or (None if calls else "")
    message = ChatMessage(role="assistant", content=text, refusal=None, **fields)
    return ChatChoice(
        index=answer.index,
        message=message,
        logprobs=chat.logprobs(answer),
        finish_reason=finish_reason(chat.finish_reason(answer)),
    )


async def _stream(context: Context, body: ChatRequest) -> AsyncGenerator[ChatChunk, None]:
    chat = await _begin(context, body)
    has_begun: set[int] = set()
    async with contextlib.aclosing(chat.generation.steps()) as steps:
        async for touched in steps:
            for _, answer in touched:
                if answer.index not in has_begun:
                    has_begun.add(answer.index)
                    yield chat.chunk(answer.index, ChatDelta(role="assistant", content=""))
                for chunk in _chunks(chat, answer):
                    yield chunk
    if body.includes_usage:
        yield chat.usage_chunk()


def _chunks(chat: Chat, answer: Answer) -> list[ChatChunk]:
    """What an answer's last tokens have brought: text, calls, its end."""
    index, chunks = answer.index, []
    num_calls = chat.num_calls(answer)
    content, calls = chat.take(answer)
    logprobs = chat.logprobs(answer)
    if content or (logprobs and logprobs.content):
        chunks.append(chat.chunk(index, ChatDelta(content=content), logprobs=logprobs))
    if calls:
        deltas = [
            ToolCallDelta(index=i, id=call.id, type="function", function=call.function)
            for i, call in enumerate(calls, num_calls)
        ]
        chunks.append(chat.chunk(index, ChatDelta(tool_calls=deltas)))
    if answer.finish_reason is not None:
        reason = finish_reason(chat.finish_reason(answer))
        chunks.append(chat.chunk(index, ChatDelta(), finish_reason=reason))
    return chunks

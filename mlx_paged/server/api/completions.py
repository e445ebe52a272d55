"""/v1/completions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated

from fastapi import APIRouter, Body, Request
from starlette.responses import Response

from mlx_paged.server.api.answer import Answer
from mlx_paged.server.api.completion_request import DEFAULT_MAX_TOKENS, CompletionRequest
from mlx_paged.server.api.context import Context
from mlx_paged.server.api.generation import Generation, Order
from mlx_paged.server.api.logprobs import completion_logprobs
from mlx_paged.server.api.prompt import encode_prompts
from mlx_paged.server.api.reply import Reply, finish_reason
from mlx_paged.server.api.responses import Completion, CompletionChoice, CompletionLogprobs
from mlx_paged.server.api.route import JsonRoute, generates, respond
from mlx_paged.server.api.sampling import sampling_params


def router(context: Context) -> APIRouter:
    """The text completion route."""
    routes = APIRouter(route_class=JsonRoute, tags=["OpenAI"])

    @routes.post(
        "/v1/completions",
        response_model=Completion,
        responses=generates(Completion),
        summary="Go on from text or tokens",
    )
    async def create_completion(
        request: Request, body: Annotated[CompletionRequest, Body()]
    ) -> Response:
        return await respond(request, context, body, _stream, _answer)

    return routes


class TextCompletion:
    """A completion request whose answers are on their way.

    Attributes:
        echoes: the prompts as text if they are to be echoed, else empty texts.
    """

    def __init__(self, context: Context, body: CompletionRequest, generation: Generation) -> None:
        self.body, self.generation = body, generation
        self.reply = Reply(context, generation)
        self._vocabulary = context.vocabulary
        self.echoes = [""] * len(body.prompt)
        if body.echo:
            self.echoes = [
                prompt if isinstance(prompt, str) else str(context.tokenizer.decode(prompt))
                for prompt in body.prompt
            ]

    @property
    def n(self) -> int:
        return self.body.n or 1

    def chosen(self, answers: Sequence[Answer]) -> list[Answer]:
        """The answers to give to one prompt."""
        if len(answers) == self.n:
            return list(answers)
        best = sorted(answers, key=lambda answer: answer.mean_logprob, reverse=True)
        return best[: self.n]

    def logprobs(self, answer: Answer) -> CompletionLogprobs | None:
        """Those that came since the last time."""
        if self.body.logprobs is None:
            return None
        return completion_logprobs(answer.take_logprobs(), self._vocabulary)

    def chunk(self, choice: CompletionChoice | None) -> Completion:
        """A part of a stream; without a choice it is the last one, with the usage."""
        head = self.reply.chunk_head(self.body.includes_usage)
        choices = [] if choice is None else [choice]
        completion = Completion(**head, object="text_completion", choices=choices)
        if choice is None:
            completion.usage = self.reply.usage()
        return completion


async def _begin(context: Context, body: CompletionRequest) -> TextCompletion:
    """Everything before the engine."""
    if body.logprobs is not None:
        await context.vocabulary.prepare()
    prompts = await encode_prompts(context.tokenizer, body.prompt)
    params = sampling_params(
        body,
        context,
        max_tokens=body.max_tokens or DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
        best_of=body.best_of,
    )
    order = Order.of(body, "cmpl", prompts, params, body.logprobs)
    return TextCompletion(context, body, Generation(context, order))


async def _answer(context: Context, body: CompletionRequest) -> Response:
    completion = await _begin(context, body)
    await completion.generation.run()
    choices = [
        CompletionChoice(
            index=prompt_index * completion.n + rank,
            text=completion.echoes[prompt_index] + answer.text,
            logprobs=completion.logprobs(answer),
            finish_reason=finish_reason(answer.finish_reason),
        )
        for prompt_index, answers in enumerate(completion.generation.answers)
        for rank, answer in enumerate(completion.chosen(answers))
    ]
    reply = completion.reply
    whole = Completion(
        **reply.head(), object="text_completion", choices=choices, usage=reply.usage()
    )
    return reply.response(whole)


async def _stream(context: Context, body: CompletionRequest) -> AsyncGenerator[Completion, None]:
    completion = await _begin(context, body)
    has_begun: set[int] = set()
    async with contextlib.aclosing(completion.generation.steps()) as steps:
        async for touched in steps:
            for prompt_index, answer in touched:
                index = prompt_index * completion.n + answer.index
                text, logprobs = answer.take(), completion.logprobs(answer)
                if index not in has_begun:
                    has_begun.add(index)
                    text = completion.echoes[prompt_index] + text
                if not text and answer.finish_reason is None and logprobs is None:
                    continue
                yield completion.chunk(
                    CompletionChoice(
                        index=index,
                        text=text,
                        logprobs=logprobs,
                        finish_reason=(
                            None
                            if answer.finish_reason is None
                            else finish_reason(answer.finish_reason)
                        ),
                    )
                )
    if body.includes_usage:
        yield completion.chunk(None)

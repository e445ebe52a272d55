"""The prompts of one HTTP request on their way through the engine."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_paged.engine.params import SamplingParams
from mlx_paged.engine.text import TextStream
from mlx_paged.server.api.answer import Answer
from mlx_paged.server.api.context import Context
from mlx_paged.server.api.errors import ENGINE_ERRORS, ApiError, from_engine, invalid, unavailable
from mlx_paged.server.api.fields import SamplingFields
from mlx_paged.server.api.merged import merged
from mlx_paged.server.api.timing import Timing
from mlx_paged.server.messages import Token

if TYPE_CHECKING:
    from mlx_paged.server.token_stream import TokenStream


@dataclass(frozen=True)
class Order:
    """What the engine is asked for, with what this side does to the answers.

    Attributes:
        request_id: the response's; with several prompts, the engine's ids end in -0, -1, ...
        params: of every prompt.
        num_top_logprobs: log-probabilities to report for each token, besides its own.
    """

    request_id: str
    prompts: Sequence[list[int]]
    params: SamplingParams
    stop: Sequence[str] = ()
    num_top_logprobs: int = 0
    priority: int = 0
    salt: str = ""

    @classmethod
    def of(
        cls,
        body: SamplingFields,
        kind: str,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        num_top_logprobs: int | None,
    ) -> Order:
        """What a body asks for, under a new id that begins with `kind`."""
        return cls(
            f"{kind}-{uuid.uuid4().hex}",
            prompts,
            params,
            body.stop or (),
            num_top_logprobs or 0,
            body.priority or 0,
            body.cache_salt or "",
        )


class Generation:
    """Runs an order. Leaving `steps` early ends what still runs.

    Attributes:
        answers: for each prompt, one for each sample.
    """

    def __init__(self, context: Context, order: Order) -> None:
        self.context, self.order = context, order
        self.answers = [
            [self._answer(index) for index in range(order.params.num_samples)]
            for _ in order.prompts
        ]
        self._streams: list[TokenStream] = []
        self._timing = Timing(context.metrics)
        self._num_cached_tokens = [0] * len(order.prompts)
        self._is_late = False

    async def steps(self) -> AsyncGenerator[list[tuple[int, Answer]], None]:
        """Answers that have got something new, each with its prompt's index.

        Raises:
            ApiError: the engine can't or won't go on, or the request's time is over.
        """
        self._check_lengths()
        try:
            with ExitStack() as stack:
                self._streams = self._open(stack)
                stack.enter_context(self._deadline())
                async with contextlib.aclosing(merged(self._streams)) as arriving:
                    async for prompt_index, tokens in arriving:
                        if touched := self._add(prompt_index, tokens):
                            yield touched
            self._check_ended()
        except ENGINE_ERRORS as error:
            raise from_engine(error) from error
        self._timing.end()

    async def run(self) -> None:
        """Wait for the end of all answers."""
        async with contextlib.aclosing(self.steps()) as steps:
            async for _ in steps:
                pass

    def end_sample(self, prompt_index: int, answer: Answer, reason: str = "stop") -> None:
        """An answer that has enough, for a reason that its text alone doesn't show."""
        answer.finish(reason)
        self._streams[prompt_index].stop_sample(answer.index)
        self.context.metrics.finished.labels(reason).inc()

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.order.prompts))

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompts that the prefix cache held."""
        return sum(self._num_cached_tokens)

    @property
    def num_completion_tokens(self) -> int:
        return sum(answer.num_tokens for answers in self.answers for answer in answers)

    def _answer(self, index: int) -> Answer:
        tokenizer, vocabulary = self.context.tokenizer, self.context.vocabulary
        text = TextStream(
            tokenizer.detokenizer, self.order.stop, first_token_id=vocabulary.first_token_id
        )
        return Answer(index, text, self.order.params.min_tokens, self.order.num_top_logprobs)

    def _check_lengths(self) -> None:
        info = self.context.client.info
        if info is None:
            return
        room = min(info.max_model_len - 1, info.num_blocks * info.block_size)
        for token_ids in self.order.prompts:
            if len(token_ids) > room:
                raise invalid(
                    f"The prompt has {len(token_ids)} tokens, more than the {room} for which the "
                    "model and its pool have room; shorten it.",
                    code="context_length_exceeded",
                )
            if max(token_ids) >= info.vocab_size:
                raise invalid(
                    f"The prompt holds token {max(token_ids)}; the model's tokens are from 0 to "
                    f"{info.vocab_size - 1}."
                )

    def _open(self, stack: ExitStack) -> list[TokenStream]:
        """All prompts, or none."""
        order, client = self.order, self.context.client
        opened = []
        for index, token_ids in enumerate(order.prompts):
            suffix = f"-{index}" if len(order.prompts) > 1 else ""
            stream = client.open(
                order.request_id + suffix,
                token_ids,
                order.params,
                priority=order.priority,
                salt=order.salt,
            )
            opened.append(stack.enter_context(stream))
        self.context.metrics.prompt_tokens.inc(self.num_prompt_tokens)
        return opened

    @contextlib.contextmanager
    def _deadline(self) -> Iterator[None]:
        """Ends all streams when the request's time is over."""
        timeout = self.context.settings.request_timeout
        if timeout is None:
            yield
            return
        timer = asyncio.get_running_loop().call_later(timeout, self._run_out)
        try:
            yield
        finally:
            timer.cancel()

    def _run_out(self) -> None:
        self._is_late = True
        for stream in self._streams:
            stream.close()

    def _add(self, prompt_index: int, tokens: list[Token]) -> list[tuple[int, Answer]]:
        self._num_cached_tokens[prompt_index] = tokens[0].num_cached_tokens
        touched: dict[int, Answer] = {}
        num_new: Counter[int] = Counter()
        for token in tokens:
            answer = self.answers[prompt_index][token.index]
            if answer.finish_reason is not None:
                continue
            if answer.add(token):
                self._streams[prompt_index].stop_sample(token.index)
            if answer.finish_reason is not None:
                self.context.metrics.finished.labels(answer.finish_reason).inc()
            _check_sound(answer)
            touched[token.index] = answer
            num_new[token.index] += 1
        self._timing.tokens(prompt_index, num_new)
        return [(prompt_index, answer) for answer in touched.values()]

    def _check_ended(self) -> None:
        if all(answer.finish_reason for answers in self.answers for answer in answers):
            return
        if self._is_late:
            timeout = self.context.settings.request_timeout
            raise ApiError(
                504, f"The answer was not complete within {timeout:g} s.", code="timeout"
            )
        raise ApiError(500, "The engine left an answer without an end.")


def _check_sound(answer: Answer) -> None:
    if answer.finish_reason == "error":
        raise ApiError(
            500,
            "The model's output was not a number; the answer can't go on.",
            code="invalid_logits",
        )
    if answer.finish_reason == "abort":
        raise unavailable("The engine dropped the request.")

"""The offline API: one model, many prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Any

from mlx_paged.engine.beam_search import BeamSearch
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.options import EngineOptions
from mlx_paged.engine.outputs import CompletionOutput, Logprob, RequestOutput, TokenOutput
from mlx_paged.engine.params import BeamSearchParams, SamplingParams
from mlx_paged.engine.progress import progress_bar
from mlx_paged.engine.stats import EngineStats
from mlx_paged.loader import Loaded, load

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "TokenOutput",
]

Message = Mapping[str, Any]
# Text, token ids, or the messages of a chat.
Prompt = str | Sequence[int] | Sequence[Message]


class LLM:
    """A model with its tokenizer, over a paged KV cache.

    Args:
        model: what `load` takes: "smollm2", a folder that mlx_lm.convert wrote, or a hub id.
        dtype: see `load`.
        options: those of `EngineOptions`, by name: block_size, num_blocks, kv_memory, attention,
            prefix_caching, max_num_seqs, policy, ...
    """

    def __init__(self, model: str = "smollm2", dtype: str | None = None, **options: Any) -> None:
        checked = EngineOptions(**options)
        self.loaded: Loaded = load(model, dtype)
        self.tokenizer = self.loaded.tokenizer
        self.engine = Engine(
            self.loaded.model, self.tokenizer, checked, self.loaded.dtype, self.loaded.name
        )
        self._ids = count()
        self._inboxes: dict[str, deque[TokenOutput]] = {}

    @property
    def attention(self) -> str:
        """The attention path in use, "metal" or "gather"."""
        return self.engine.runner.attention

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.engine.pool.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self.engine.pool.num_blocks

    def stats(self) -> EngineStats:
        """What the engine has done, and what it holds."""
        return self.engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer many prompts together.

        Args:
            prompts: texts, lists of token ids, or chats (lists of messages); or a single one.
            params: for all prompts, or one for each.
            progress: show a bar on stderr.

        Returns:
            One output per prompt, in their order.

        Raises:
            ValueError: one of the prompts can never run; none has been started.
        """
        tokens = [self.encode(prompt) for prompt in _as_list(prompts)]
        each = [params] * len(tokens) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(tokens):
            raise ValueError(f"{len(tokens)} prompts with {len(each)} params; give one for each")
        ids = self._add(tokens, each)
        outputs: dict[str, RequestOutput] = {}
        try:
            with progress_bar(len(ids), shown=progress) as bar:
                while len(outputs) < len(ids):
                    self._step()
                    for output in chain.from_iterable(map(self._received, ids)):
                        bar.token()
                        if output.request_output is not None:
                            outputs[output.request_id] = output.request_output
                            bar.request()
        finally:
            self._drop(ids)
        for request_id, prompt in zip(ids, _as_list(prompts), strict=True):
            outputs[request_id].prompt = prompt if isinstance(prompt, str) else None
        return [outputs[request_id] for request_id in ids]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[TokenOutput]:
        """Answer one prompt, token by token.

        Args:
            prompt: text, token ids, or a chat's messages.
            params: `SamplingParams()` by default.
            progress: called with (prompt tokens stored, prompt tokens) as the prompt is read.

        Yields:
            Each token with the text that can be shown. With several samples, `index` tells
            them apart.
        """
        ids = self._add([self.encode(prompt)], [params], streams=True)
        return self._stream(ids[0], progress)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams | None = None
    ) -> list[RequestOutput]:
        """The likeliest answers that a beam search finds, best first."""
        search = BeamSearch(self.engine, params or BeamSearchParams())
        outputs = []
        for prompt in _as_list(prompts):
            output = search.run(f"beam-{next(self._ids)}", self.encode(prompt))
            output.prompt = prompt if isinstance(prompt, str) else None
            outputs.append(output)
        return outputs

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; a chat goes through the model's template."""
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt))
        if all(isinstance(item, Mapping) for item in prompt) and len(prompt):
            if not self.tokenizer.has_chat_template:
                raise ValueError("the model has no chat template; give the prompt as text")
            return list(
                self.tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True)
            )
        token_ids: Any = prompt
        return [int(token_id) for token_id in token_ids]

    def _stream(
        self, request_id: str, progress: Callable[[int, int], None] | None
    ) -> Iterator[TokenOutput]:
        request = self.engine.requests[request_id]
        total, has_token = request.num_prompt_tokens, False
        try:
            while self._inboxes[request_id] or not request.is_finished:
                if not self._inboxes[request_id]:
                    self._step()
                received = list(self._received(request_id))
                if progress and not has_token:
                    num_stored = request.samples[0].sequence.num_cached_tokens
                    progress(total if received else min(num_stored, total), total)
                has_token = has_token or bool(received)
                yield from received
        finally:
            self._drop([request_id])

    def _step(self) -> None:
        """Run the engine, and keep every token for whoever waits for it."""
        for output in self.engine.step():
            if (inbox := self._inboxes.get(output.request_id)) is not None:
                inbox.append(output)

    def _received(self, request_id: str) -> Iterator[TokenOutput]:
        inbox = self._inboxes[request_id]
        while inbox:
            yield inbox.popleft()

    def _drop(self, ids: Sequence[str]) -> None:
        for request_id in ids:
            self.engine.abort(request_id)
            self._inboxes.pop(request_id, None)

    def _add(
        self,
        prompts: list[list[int]],
        params: Sequence[SamplingParams | None],
        streams: bool = False,
    ) -> list[str]:
        """Add all prompts, or none if one is refused."""
        ids: list[str] = []
        try:
            for prompt, each in zip(prompts, params, strict=True):
                request_id = f"request-{next(self._ids)}"
                self.engine.add_request(request_id, prompt, each, streams=streams)
                self._inboxes[request_id] = deque()
                ids.append(request_id)
        except ValueError:
            self._drop(ids)
            raise
        return ids


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Prompts as a list, whether it was one or several."""
    is_single = isinstance(prompts, str) or (
        len(prompts) > 0 and isinstance(prompts[0], (int, Mapping))
    )
    many: Any = prompts
    return [many] if is_single else list(many)

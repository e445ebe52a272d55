"""Beam search over forks: beams share the blocks of what they have in common."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_paged.blocks.sequence import Sequence
from mlx_paged.cache import step
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.outputs import CompletionOutput, RequestOutput
from mlx_paged.engine.params import BeamSearchParams
from mlx_paged.engine.request import RequestMetrics
from mlx_paged.engine.sampler import top_sorted


@dataclass
class Beam:
    """A beginning of an answer, and the sum of its tokens' log-probabilities."""

    sequence: Sequence
    logprob: float = 0.0


@dataclass
class Answer:
    """A finished beam."""

    token_ids: list[int]
    logprob: float
    finish_reason: str

    def score(self, length_penalty: float) -> float:
        return self.logprob / len(self.token_ids) ** length_penalty


class BeamSearch:
    """Keeps the `beam_width` likeliest beginnings in each step.

    Of the 2 * beam_width likeliest continuations of all beams, those that end with an end
    token are finished answers, and the first `beam_width` others are the next beams. A beam
    that is continued twice forks, one that isn't is freed.

    Args:
        engine: its pool, model and tokenizer are used. Other requests may be running.
        params: width, length, ranking.
    """

    def __init__(self, engine: Engine, params: BeamSearchParams) -> None:
        self.engine, self.params = engine, params
        self.pool = engine.pool
        self.end_token_ids = set() if params.ignore_eos else engine.eos_token_ids

    def run(self, request_id: str, prompt_token_ids: list[int]) -> RequestOutput:
        """Search for one prompt's answers, best first.

        Raises:
            ValueError: the beams need more blocks than there are, with the numbers.
        """
        self._check_room(len(prompt_token_ids))
        mx.synchronize()
        metrics = RequestMetrics()
        metrics.first_scheduled_time = metrics.arrival_time
        beams = [Beam(Sequence(self.pool.blocks, prompt_token_ids))]
        try:
            logits = self._prefill(beams[0].sequence)
            metrics.first_token_time = time.perf_counter()
            answers = self._search(beams, logits, len(prompt_token_ids))
        finally:
            for beam in beams:
                beam.sequence.free()
        metrics.finished_time = time.perf_counter()
        metrics.num_output_tokens = sum(len(answer.token_ids) for answer in answers)
        outputs = [self._output(i, answer) for i, answer in enumerate(answers)]
        return RequestOutput(request_id, prompt_token_ids, outputs, metrics)

    def _search(self, beams: list[Beam], logits: mx.array, num_prompt_tokens: int) -> list[Answer]:
        """The best answers. `beams` is kept up to date, so that they can be freed."""
        params = self.params
        answers: list[Answer] = []
        for num_tokens in range(1, params.max_tokens + 1):
            live = self._continue(beams, logits, answers, num_prompt_tokens)
            if num_tokens == params.max_tokens or self._is_decided(live, answers, num_tokens):
                break
            beams[:] = self._fork(beams, live)
            logits = self._forward([beam.sequence for beam in beams], 1)
        if num_tokens == params.max_tokens:
            for parent, token_id, logprob in live:
                token_ids = beams[parent].sequence.token_ids[num_prompt_tokens:]
                answers.append(Answer([*token_ids, token_id], logprob, "length"))
        answers.sort(key=lambda answer: answer.score(params.length_penalty), reverse=True)
        return answers[: params.beam_width]

    def _continue(
        self, beams: list[Beam], logits: mx.array, answers: list[Answer], num_prompt_tokens: int
    ) -> list[tuple[int, int, float]]:
        """The next beams as (parent, token id, summed log-probability), likeliest first."""
        logits = logits.astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        sums = (logprobs + mx.array([beam.logprob for beam in beams])[:, None]).flatten()
        ids, best = top_sorted(sums, min(2 * self.params.beam_width, sums.size))
        live: list[tuple[int, int, float]] = []
        at_ids: Any = ids.tolist()
        at_logprobs: Any = best.tolist()
        for at, logprob in zip(at_ids, at_logprobs, strict=True):
            parent, token_id = divmod(at, logits.shape[-1])
            if token_id in self.end_token_ids:
                token_ids = beams[parent].sequence.token_ids[num_prompt_tokens:]
                answers.append(Answer([*token_ids, token_id], logprob, "stop"))
            elif len(live) < self.params.beam_width:
                live.append((parent, token_id, logprob))
        return live

    def _is_decided(
        self, live: list[tuple[int, int, float]], answers: list[Answer], num_tokens: int
    ) -> bool:
        """Whether no running beam can change the best answers, or early stopping says so."""
        width, penalty = self.params.beam_width, self.params.length_penalty
        if len(answers) < width:
            return not live
        if self.params.early_stopping or not live:
            return True
        # A sum only falls, so its best score is at the length that is penalised least.
        length = self.params.max_tokens if penalty > 0 else num_tokens
        worst = sorted((a.score(penalty) for a in answers), reverse=True)[width - 1]
        return live[0][2] / length**penalty <= worst

    def _fork(self, beams: list[Beam], live: list[tuple[int, int, float]]) -> list[Beam]:
        """The next beams' sequences: each parent's own for its first child, forks for others."""
        children: list[Beam] = []
        used: set[int] = set()
        for parent, _, logprob in live:
            sequence = beams[parent].sequence
            children.append(Beam(sequence.fork() if parent in used else sequence, logprob))
            used.add(parent)
        for i, beam in enumerate(beams):
            if i not in used:
                beam.sequence.free()
        for child, (_, token_id, _) in zip(children, live, strict=True):
            child.sequence.token_ids.append(token_id)
        return children

    def _prefill(self, sequence: Sequence) -> mx.array:
        """Logits after the prompt, which is stored in chunks."""
        cache = self.engine.prefix_cache
        chain = cache.index.chain() if cache else None
        if cache and chain:
            match = cache.lookup(sequence, chain)
            self.pool.copy_blocks(cache.attach(sequence, chain, match))
        chunk = self.engine.options.num_batched_tokens
        while sequence.num_cached_tokens < sequence.num_tokens:
            logits = self._forward([sequence], chunk)
        if cache and chain:
            cache.publish(sequence, chain)
        return logits

    def _forward(self, sequences: list[Sequence], max_tokens: int) -> mx.array:
        """Logits after the next tokens of each sequence, at most `max_tokens`."""
        num_new = [min(max_tokens, s.num_tokens - s.num_cached_tokens) for s in sequences]
        return step(self.engine.model, self.pool, sequences, num_new, self.engine.options.attention)

    def _check_room(self, num_prompt_tokens: int) -> None:
        size, width = self.pool.block_size, self.params.beam_width
        num_shared = num_prompt_tokens // size
        num_whole = -(-(num_prompt_tokens + self.params.max_tokens - 1) // size)
        num_needed = num_shared + width * (num_whole - num_shared)
        num_free = self.pool.blocks.num_free_blocks
        if num_needed > num_free:
            raise ValueError(
                f"{width} beams of {num_prompt_tokens} prompt tokens and up to "
                f"{self.params.max_tokens} new ones need up to {num_needed} blocks of {size} "
                f"tokens, and {num_free} are free; lower beam_width or max_tokens, or give the "
                "pool more blocks"
            )

    def _output(self, index: int, answer: Answer) -> CompletionOutput:
        tokenizer = self.engine.tokenizer
        ends = answer.finish_reason == "stop"
        text_ids = answer.token_ids[:-1] if ends else answer.token_ids
        return CompletionOutput(
            index=index,
            text="" if tokenizer is None else tokenizer.decode(text_ids),
            token_ids=answer.token_ids,
            cumulative_logprob=answer.logprob,
            finish_reason=answer.finish_reason,
        )

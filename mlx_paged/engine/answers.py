"""Appends drawn tokens to answers, decides where these end, and turns them into outputs."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx

from mlx_paged.engine.model_runner import Step
from mlx_paged.engine.outputs import Logprob, TokenOutput, request_output
from mlx_paged.engine.penalties import TokenCounts
from mlx_paged.engine.request import Request, Sample
from mlx_paged.engine.sampler import NO_TOKEN, Draw, Drawn, draw_key
from mlx_paged.engine.scheduler import Scheduler
from mlx_paged.engine.text import TextStream, first_token_id


class Answers:
    """What becomes of drawn tokens.

    Args:
        scheduler: takes out samples that have finished.
        tokenizer: mlx-lm's, or None for answers without text.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Any = None) -> None:
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self._unfinished: list[tuple[Sample, TokenOutput]] = []
        self._first_token_id: int | None = None
        if tokenizer is not None:
            self._first_token_id = first_token_id(tokenizer)

    def begin(self, sample: Sample) -> None:
        """Prepare a sample for its first token."""
        request, params = sample.request, sample.request.params
        sample.draw = Draw(
            params,
            draw_key(request.seed, sample.index),
            request.num_prompt_tokens,
            request.end_token_ids,
            TokenCounts(request.prompt_token_ids) if params.has_penalties else None,
            request.grammar.copy() if request.grammar else None,
        )
        if params.num_logprobs is not None:
            sample.logprobs = []
        if params.stop or request.streams:
            sample.text = self._text_stream(request)

    def take(self, step: Step, token_ids: list[int]) -> list[TokenOutput]:
        """Publish what a step stored, append what it drew, finish what has ended.

        Text is left to `complete`, but where it may end an answer.
        """
        self.scheduler.publish(step.plan)
        samples = self._forked(step.draws)
        logprobs = _read_logprobs(step.drawn, samples) if step.drawn else None
        now = time.perf_counter()
        outputs = []
        for i, (sample, token_id) in enumerate(zip(samples, token_ids, strict=True)):
            if sample.is_running:
                output = self._append(sample, token_id, now)
                if logprobs is not None:
                    _add_logprobs(sample, output, logprobs[i])
                outputs.append(output)
        return outputs

    def finish(self, sample: Sample, reason: str, stop_reason: int | str | None = None) -> None:
        """End an answer and give its blocks back."""
        sample.finish_reason, sample.stop_reason = reason, stop_reason
        self.scheduler.remove(sample)
        request = sample.request
        request.num_finished += 1
        request.metrics.num_output_tokens += sample.num_output_tokens
        request.metrics.finished_time = time.perf_counter()

    def complete(self) -> None:
        """Give the tokens taken last their text, and a request's last one the request's output."""
        unfinished, self._unfinished = self._unfinished, []
        for sample, output in unfinished:
            request = sample.request
            if request.streams:
                has_text = output.finish_reason not in ("stop", "error")
                if not request.params.stop and has_text:
                    sample.text.add(output.token_id)
                if output.finish_reason is not None:
                    sample.text.finish()
                output.text = sample.text.take()
        for sample, output in unfinished:
            if output.completes:
                for finished in sample.request.samples:
                    self._complete_text(finished)
                output.request_output = request_output(sample.request)

    def _append(self, sample: Sample, token_id: int, now: float) -> TokenOutput:
        request = sample.request
        output = TokenOutput(request.request_id, sample.index, token_id)
        if request.metrics.first_token_time is None:
            request.metrics.first_token_time = now
        if token_id == NO_TOKEN:
            self._give_up(sample)
        else:
            sample.sequence.token_ids.append(token_id)
            if sample.draw.counts is not None:
                sample.draw.counts.add(token_id)
            self._finish_if_over(sample, token_id)
        if sample.finish_reason is not None:
            output.finish_reason = sample.finish_reason
            output.completes = request.is_finished
        if request.streams or output.completes:
            self._unfinished.append((sample, output))
        return output

    def _finish_if_over(self, sample: Sample, token_id: int) -> None:
        request = sample.request
        if token_id in request.end_token_ids:
            is_own = token_id in request.params.stop_token_ids
            self.finish(sample, "stop", token_id if is_own else None)
        elif request.params.stop:
            may_stop = sample.num_output_tokens >= request.params.min_tokens
            if stop := sample.text.add(token_id, may_stop):
                self.finish(sample, "stop", stop)
        grammar = sample.draw.grammar
        if grammar and sample.finish_reason is None and not grammar.add(token_id):
            self.finish(sample, "error")
        if sample.num_tokens >= sample.max_num_tokens and sample.finish_reason is None:
            self.finish(sample, "length")

    def _give_up(self, sample: Sample) -> None:
        """End an answer whose logits were NaN. No prompt shall find its blocks: they may be why."""
        sample.num_tokens -= 1
        for block_id in sample.sequence.block_table:
            self.scheduler.pool.forget_name(block_id)
        self.finish(sample, "error")

    def _forked(self, draws: list[Sample]) -> list[Sample]:
        """The samples that get the drawn tokens, with those that fork here."""
        if not any(sample.num_forks for sample in draws):
            return draws
        samples = []
        for sample in draws:
            samples.append(sample)
            if not sample.is_running:
                samples += [sample] * sample.num_forks
                continue
            for child in self.scheduler.fork(sample):
                self.begin(child)
                samples.append(child)
        return samples

    def _complete_text(self, sample: Sample) -> None:
        """Make the whole text of an answer that was not streamed."""
        if self.tokenizer is None or sample.request.streams:
            return
        if sample.text is None:
            sample.text = self._text_stream(sample.request)
            token_ids = sample.output_token_ids
            ends = sample.finish_reason == "stop"
            for token_id in token_ids[:-1] if ends else token_ids:
                sample.text.add(token_id)
        sample.text.finish()

    def _text_stream(self, request: Request) -> TextStream | None:
        if self.tokenizer is None:
            return None
        params = request.params
        return TextStream(
            self.tokenizer.detokenizer,
            params.stop,
            params.include_stop_str_in_output,
            self._first_token_id,
        )


def _add_logprobs(sample: Sample, output: TokenOutput, logprobs: dict[int, Logprob] | None) -> None:
    if logprobs is None or sample.logprobs is None:
        return
    sample.logprobs.append(logprobs)
    sample.cumulative_logprob += logprobs[output.token_id].logprob
    if sample.request.params.logprobs is not None:
        output.logprobs = logprobs


def _read_logprobs(drawn: Drawn, samples: list[Sample]) -> list[dict[int, Logprob] | None] | None:
    """Each row's log-probabilities by token id, the chosen token's first."""
    if drawn.logprobs is None or drawn.ranks is None:
        return None
    token_ids, ranks = _to_list(drawn.token_ids), _to_list(drawn.ranks)
    chosen = _to_list(drawn.logprobs)
    top_ids, top = _to_list(drawn.top_ids), _to_list(drawn.top_logprobs)
    found: list[dict[int, Logprob] | None] = []
    for row, sample in enumerate(samples):
        num_top = sample.request.params.num_logprobs
        if num_top is None:
            found.append(None)
            continue
        by_id = {token_ids[row]: Logprob(chosen[row], ranks[row])}
        for i in range(num_top):
            by_id.setdefault(top_ids[row][i], Logprob(top[row][i], i + 1))
        found.append(by_id)
    return found


def _to_list(array: mx.array | None) -> Any:
    return [] if array is None else array.tolist()

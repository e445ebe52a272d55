"""Keeps many requests running in one pool: schedule, batch, model, sample, append or finish."""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_paged.blocks.prefix import BlockIndex, HashIndex
from mlx_paged.blocks.prefix_cache import PrefixCache, PrefixStats
from mlx_paged.blocks.radix import RadixIndex
from mlx_paged.cache import KVPool
from mlx_paged.engine.answers import Answers
from mlx_paged.engine.grammar import GrammarCompiler
from mlx_paged.engine.limits import Limits
from mlx_paged.engine.model_runner import ModelRunner, Step
from mlx_paged.engine.options import EngineOptions
from mlx_paged.engine.outputs import TokenOutput
from mlx_paged.engine.params import SamplingParams
from mlx_paged.engine.pool_size import make_pool, set_wired_limit
from mlx_paged.engine.request import Request
from mlx_paged.engine.schedule import Schedule
from mlx_paged.engine.scheduler import Scheduler
from mlx_paged.engine.stats import Counts, EngineStats

MAX_COPIES_SHOWN = 1000


class Engine:
    """Continuous batching over a paged KV cache. All calls must come from one thread.

    While a step runs, the next one's graph is built; it is dispatched when the step has ended
    and dropped if that changed the batch. So between calls a step may be running, whose tokens
    the next call returns.

    Args:
        model: one of `mlx_paged.models`.
        tokenizer: mlx-lm's, for text, stop strings, end tokens and grammars; None to do without.
        options: see `EngineOptions`.
        dtype: of the pool; the model's by default.
        name: of the model and adapter, kept apart in prefix names.
        texts: False for answers of tokens alone, whose text is made elsewhere.

    Attributes:
        copies: (source, destination) of the blocks copied last, for who wants to see them.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        options: EngineOptions | None = None,
        dtype: mx.Dtype | None = None,
        name: str = "",
        texts: bool = True,
    ) -> None:
        self.options = options = options or EngineOptions()
        self.model, self.tokenizer = model, tokenizer
        args = model.args
        self.vocab_size: int = args.vocab_size
        self.max_model_len: int = options.max_model_len or args.max_position_embeddings or 2**31
        set_wired_limit()
        self.pool = make_pool(model, options, dtype)
        self.prefix_cache = _make_prefix_cache(self.pool, options, name)
        self.scheduler = Scheduler(
            self.pool.blocks,
            self.prefix_cache,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.num_batched_tokens,
            policy=options.policy,
            preemption=options.preemption,
            ageing_steps=options.ageing_steps,
        )
        self.limits = Limits(
            self.vocab_size, self.max_model_len, self.pool.num_blocks * self.pool.block_size
        )
        self.runner = ModelRunner(model, self.pool, options.attention)
        self.answers = Answers(self.scheduler, tokenizer if texts else None)
        self.requests: dict[str, Request] = {}
        self.counts = Counts()
        self.copies: deque[tuple[int, int]] = deque(maxlen=MAX_COPIES_SHOWN)
        self._random = random.Random(options.seed)
        self._in_flight: Step | None = None
        self._grammars: GrammarCompiler | None = None

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        salt: str = "",
        streams: bool = False,
    ) -> Request:
        """Let a request wait for its turn.

        Args:
            request_id: names it in outputs; unique among those that haven't finished.
            prompt_token_ids: at least one.
            params: `SamplingParams()` by default.
            priority: a lower number goes first, under the policy "priority".
            salt: only requests of one salt share cached prefixes.
            streams: whether outputs carry its text as it comes.

        Raises:
            ValueError: it could never run, with the numbers.
        """
        params = params or SamplingParams()
        if request_id in self.requests:
            raise ValueError(f"a request {request_id!r} is running or waiting already")
        if params.stop and self.answers.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the engine has none")
        self.limits.check(prompt_token_ids, params)
        end_token_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            end_token_ids |= self.eos_token_ids
        request = Request(
            request_id,
            list(prompt_token_ids),
            params,
            self.limits.max_tokens(len(prompt_token_ids), params),
            priority,
            frozenset(end_token_ids),
            salt,
            streams,
        )
        request.seed = self._random.getrandbits(64) if params.seed is None else params.seed
        if params.grammar is not None:
            request.grammar = self._grammar_compiler().compile(params.grammar)
        self.scheduler.add(request)
        self.answers.begin(request.samples[0])
        self.requests[request_id] = request
        return request

    def step(self) -> list[TokenOutput]:
        """Run one forward pass and return the tokens that it drew; [] without work."""
        step = self._in_flight or self._start(self.scheduler.schedule())
        self._in_flight = step
        if step is None:
            return []
        ahead = self._build_ahead(step)
        token_ids = self.runner.wait(step)
        self._in_flight = None
        outputs = self.answers.take(step, token_ids)
        if ahead is not None:
            self._in_flight = self._dispatch_or_drop(ahead)
        self.counts.num_generated_tokens += len(outputs)
        self.answers.complete()
        for output in outputs:
            if output.completes:
                del self.requests[output.request_id]
        return outputs

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request, or one sample of it that has a token, and give its blocks back.

        It can be done at any time. Unknown ids are ignored.
        """
        request = self.requests.get(request_id)
        if request is None:
            return
        for sample in request.samples:
            if not sample.is_finished and index in (None, sample.index):
                self.answers.finish(sample, "abort")
        if index is None:
            request.num_finished = request.params.num_samples  # those never forked included
        if request.is_finished:
            del self.requests[request_id]

    def recover(self) -> list[str]:
        """After `step` has raised: drop what was running, so that what waits can go on.

        Returns:
            The ids of the requests dropped.

        Raises:
            RuntimeError: the engine can't go on.
        """
        self._in_flight = None
        self.runner.recover()
        dropped = [
            request
            for request in self.requests.values()
            if any(sample.is_running or sample.is_lost for sample in request.samples)
        ]
        for request in dropped:
            self.abort(request.request_id)
        self.check_integrity()
        return [request.request_id for request in dropped]

    def has_work(self) -> bool:
        """Whether any request is running or waiting."""
        return self.scheduler.has_work()

    @property
    def eos_token_ids(self) -> set[int]:
        return set(self.tokenizer.eos_token_ids) if self.tokenizer is not None else set()

    def stats(self) -> EngineStats:
        """What the engine is doing now, and what it has done."""
        blocks, running = self.pool.blocks, self.scheduler.running
        num_used = blocks.num_blocks - blocks.num_free_blocks
        num_slots = len({b for s in running for b in s.sequence.block_table}) * blocks.block_size
        index = self.prefix_cache.index if self.prefix_cache else ()
        return EngineStats(
            num_running=len(running),
            num_waiting=len(self.scheduler.waiting),
            num_preemptions=self.scheduler.num_preemptions,
            block_size=blocks.block_size,
            num_blocks=blocks.num_blocks,
            num_blocks_used=num_used,
            num_blocks_cached=sum(b in index for b in blocks.free_queue),
            slot_share=self._num_slots_held() / num_slots if num_slots else 1.0,
            pool_nbytes=self.pool.nbytes,
            peak_memory_nbytes=mx.get_peak_memory(),
            counts=self.counts,
            prefix=self.prefix_cache.stats if self.prefix_cache else PrefixStats(),
        )

    def forget_counts(self) -> None:
        """Begin to count anew, after a warm-up."""
        self.counts = Counts()
        self.copies.clear()
        if self.prefix_cache:
            self.prefix_cache.stats = PrefixStats()

    def check_integrity(self) -> None:
        """Raise RuntimeError if blocks, tables, names or queues disagree."""
        self.scheduler.check_integrity()

    def _start(self, plan: Schedule) -> Step | None:
        """Build and dispatch a step while none is running."""
        if not plan:
            return None
        self.runner.move_blocks(plan)
        now = time.perf_counter()
        for sample in plan.samples:
            if sample.request.metrics.first_scheduled_time is None:
                sample.request.metrics.first_scheduled_time = now
        step = self.runner.build(plan)
        return self._dispatch(step)

    def _dispatch(self, step: Step) -> Step:
        counts, blocks = self.counts, self.pool.blocks
        counts.num_steps += 1
        counts.num_copies += len(step.plan.copies)
        self.copies += step.plan.copies
        counts.num_prompt_tokens += step.plan.num_tokens - step.plan.num_decodes
        num_used = blocks.num_blocks - blocks.num_free_blocks
        counts.max_blocks_used = max(counts.max_blocks_used, num_used)
        self.scheduler.advance(step.plan)
        self.runner.dispatch(step)
        return step

    def _build_ahead(self, step: Step) -> Step | None:
        """The next step's graph, if what `step` draws doesn't decide what it is."""
        if any(sample.request.params.depends_on_answer for sample in step.draws):
            return None
        plan = self.scheduler.schedule_next(step.plan)
        return self.runner.build(plan, step) if plan else None

    def _dispatch_or_drop(self, ahead: Step) -> Step | None:
        if all(sample.is_running for sample in ahead.plan.samples):
            return self._dispatch(ahead)
        self.runner.drop()
        self.counts.num_graphs_dropped += 1
        return None

    def _num_slots_held(self) -> int:
        """Slots that hold a token, those of shared blocks counted once."""
        held: dict[int, int] = {}
        block_size = self.pool.block_size
        for sample in self.scheduler.running:
            left = sample.sequence.num_cached_tokens
            for block_id in sample.sequence.block_table:
                held[block_id] = max(held.get(block_id, 0), min(left, block_size))
                left = max(0, left - block_size)
        return sum(held.values())

    def _grammar_compiler(self) -> GrammarCompiler:
        if self._grammars is None:
            if self.tokenizer is None:
                raise ValueError("a grammar needs a tokenizer, and the engine has none")
            self._grammars = GrammarCompiler(self.tokenizer, self.vocab_size)
        return self._grammars


def _make_prefix_cache(pool: KVPool, options: EngineOptions, name: str) -> PrefixCache | None:
    if options.prefix_caching == "off":
        return None
    index: type[BlockIndex] = RadixIndex if options.prefix_caching == "radix" else HashIndex
    return PrefixCache(pool.blocks, index(pool.block_size, (name, str(pool.format))))

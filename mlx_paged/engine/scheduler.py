"""Which samples run in a step, how many tokens of each, and who gives blocks back."""

from __future__ import annotations

from bisect import insort
from typing import Literal, get_args

from mlx_paged.blocks.block_pool import BlockPool, OutOfBlocks
from mlx_paged.blocks.prefix import PrefixMatch
from mlx_paged.blocks.prefix_cache import PrefixCache
from mlx_paged.blocks.sequence import Sequence
from mlx_paged.engine.admission import Admission, Policy
from mlx_paged.engine.request import Request, Sample
from mlx_paged.engine.schedule import Schedule

Preemption = Literal["recompute", "swap"]


class Scheduler:
    """Continuous batching over one pool of blocks.

    Samples run in the order of their sort keys, and the last one is the first to be
    preempted. A key never changes, so who was preempted comes back before any newcomer:

    - "fcfs": by arrival.
    - "priority": by arrival, put back by `ageing_steps` steps per unit of priority. Whoever
      has waited that much longer passes a request of the next better priority.
    - "longest-prefix": by arrival; but of the first `PREFIX_WINDOW` waiting, the one that
      finds most of its tokens cached is admitted first, or whoever has waited for
      `ageing_steps`.

    Args:
        pool: gives and takes back blocks.
        prefix_cache: shares blocks between sequences that begin alike; None for none.
        max_num_seqs: samples that run at once.
        max_num_batched_tokens: tokens of a step. Decoding samples take one each; what is left
            goes to prompts, in chunks.
        policy: who is admitted first.
        preemption: "recompute" computes a preempted sample's K/V again, "swap" keeps them
            outside the pool.
        ageing_steps: see above.
    """

    def __init__(
        self,
        pool: BlockPool,
        prefix_cache: PrefixCache | None = None,
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        policy: Policy = "fcfs",
        preemption: Preemption = "recompute",
        ageing_steps: int = 100,
    ) -> None:
        for name, value, choices in (
            ("policy", policy, get_args(Policy)),
            ("preemption", preemption, get_args(Preemption)),
        ):
            if value not in choices:
                raise ValueError(f"{name} is one of {', '.join(choices)}, not {value!r}")
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ValueError(
                f"each of the {max_num_seqs} running sequences must get a token in a step of "
                f"{max_num_batched_tokens} tokens; raise max_num_batched_tokens"
            )
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.preemption = preemption
        self.admission = Admission(pool, prefix_cache, policy, ageing_steps)
        self.waiting: list[Sample] = []
        self.running: list[Sample] = []
        self.num_steps = 0
        self.num_preemptions = 0
        self._num_requests = 0
        self._num_blocks_awaited = 0

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_seqs(self) -> int:
        """Samples that run, or will once the running ones have forked."""
        return len(self.running) + sum(sample.num_forks for sample in self.running)

    def num_blocks_needed(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Blocks of a sequence at its greatest length. The last token's K/V are never stored."""
        return -(-(num_prompt_tokens + max_tokens - 1) // self.pool.block_size)

    def add(self, request: Request) -> None:
        """Let a request wait for its turn.

        Raises:
            ValueError: it could never run, with the numbers.
        """
        num_needed = self.num_blocks_needed(request.num_prompt_tokens, request.max_tokens)
        if num_needed > self.pool.num_blocks:
            raise ValueError(
                f"the request needs {num_needed} blocks of {self.pool.block_size} tokens for its "
                f"{request.num_prompt_tokens} prompt tokens and up to {request.max_tokens} new "
                f"ones, and the pool has {self.pool.num_blocks}; lower max_tokens, shorten the "
                "prompt, or give the pool more blocks"
            )
        num_samples = request.params.num_samples
        if num_samples > self.max_num_seqs:
            raise ValueError(
                f"the request asks for {num_samples} samples, and at most {self.max_num_seqs} "
                "sequences run at once; ask for fewer or raise max_num_seqs"
            )
        sequence = Sequence(self.pool, request.prompt_token_ids)
        chain = self.prefix_cache.index.chain(request.salt) if self.prefix_cache else None
        sample = Sample(request, 0, sequence, chain)
        sample.num_forks = num_samples - 1
        sample.sort_key = self.admission.sort_key(
            self.num_steps, request.priority, self._num_requests
        )
        self._num_requests += 1
        self._num_blocks_awaited = 0
        insort(self.waiting, sample, key=_sort_key)

    def fork(self, sample: Sample) -> list[Sample]:
        """The other samples of a request whose prompt has just been stored."""
        children = []
        for index in range(1, sample.num_forks + 1):
            chain = sample.chain.copy() if sample.chain else None
            child = Sample(sample.request, index, sample.sequence.fork(), chain)
            child.sort_key = (*sample.sort_key[:2], index)
            child.num_tokens = sample.num_tokens
            child.is_running = True
            insort(self.running, child, key=_sort_key)
            children.append(child)
        sample.num_forks = 0
        return children

    def remove(self, sample: Sample) -> None:
        """Take a sample out, finished or aborted, with all its blocks."""
        queue = self.running if sample.is_running else self.waiting
        queue.remove(sample)
        sample.is_running = False
        sample.stored = None
        self._free(sample)

    def schedule(self) -> Schedule:
        """Plan the next step: running answers first, then running prompts, then newcomers."""
        plan = Schedule()
        prefills: list[Sample] = []
        self._continue_decodes(plan)
        self._continue_prefills(plan, prefills)
        if not plan.preempted:
            self._admit_waiting(plan, prefills)
        plan.samples += sorted(prefills, key=lambda sample: sample.num_scheduled_tokens > 1)
        return plan

    def schedule_next(self, plan: Schedule) -> Schedule | None:
        """The step after `plan`, if it is sure to be plain decoding.

        It can be asked for while `plan` runs, with `advance(plan)` done: which tokens were
        drawn doesn't matter. Dropping the answer is free, as blocks reserved for it are used
        by the next plan.
        """
        if len(plan.samples) != len(self.running) or plan.preempted:
            return None
        block_size = self.pool.block_size
        samples, growing = [], []
        for sample in plan.samples:
            sequence = sample.sequence
            num_cached = sequence.num_cached_tokens
            has_drawn = sample.num_tokens > len(sequence.token_ids)
            if not has_drawn or sample.num_forks:
                return None
            if sample.num_tokens < sample.max_num_tokens:
                samples.append(sample)
                if num_cached == len(sequence.block_table) * block_size:
                    growing.append(sequence)
        if len(growing) > self.pool.num_free_blocks or not samples:
            return None
        if self.waiting and (len(samples) < len(plan.samples) or self._may_admit()):
            return None
        for sequence in growing:
            sequence.reserve(1)
        for sample in samples:
            sample.num_scheduled_tokens = 1
        return Schedule(samples)

    def advance(self, plan: Schedule) -> None:
        """Count the step's tokens as stored, and the tokens that it draws as there."""
        self.num_steps += 1
        for sample in plan.samples:
            sequence = sample.sequence
            sequence.num_cached_tokens += sample.num_scheduled_tokens
            if sequence.num_cached_tokens == sample.num_tokens:
                sample.num_tokens += 1

    def publish(self, plan: Schedule) -> None:
        """Let others find the blocks that the step has filled. It must have ended."""
        if self.prefix_cache is None:
            return
        block_size = self.pool.block_size
        for sample in plan.samples:
            chain, sequence = sample.chain, sample.sequence
            assert chain is not None
            if sequence.num_cached_tokens >= (chain.num_published + 1) * block_size:
                self.prefix_cache.publish(sequence, chain)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless tables, counts, names and queues agree."""
        tables = [sample.sequence.block_table for sample in self.running]
        self.pool.check_integrity(tables)
        if self.prefix_cache:
            self.prefix_cache.index.check_integrity()
        for sample in self.waiting:
            num_published = sample.chain.num_published if sample.chain else 0
            if sample.sequence.block_table or sample.is_running or num_published:
                raise RuntimeError(f"{sample} is waiting and holds blocks")
        for sample in self.running:
            self._check_writable(sample.sequence)
        if sorted(self.running, key=_sort_key) != self.running:
            raise RuntimeError("running samples are out of order")

    def _check_writable(self, sequence: Sequence) -> None:
        """No block that will be written is shared or named, but one to be copied first."""
        first = sequence.num_cached_tokens // self.pool.block_size
        for i, block_id in enumerate(sequence.block_table[first:]):
            to_be_copied = i == 0 and sequence.num_cached_tokens % self.pool.block_size
            if self.pool.is_shared(block_id) and not to_be_copied:
                raise RuntimeError(f"block {block_id} can be written by two sequences")
            if self.prefix_cache and block_id in self.prefix_cache.index:
                raise RuntimeError(f"block {block_id} has a name and can be written")

    def _continue_decodes(self, plan: Schedule) -> None:
        running = self.running
        i = 0
        while i < len(running):
            sample = running[i]
            if sample.is_decoding and self._reserve_or_preempt(sample, plan):
                sample.num_scheduled_tokens = 1
                plan.samples.append(sample)
            i += 1

    def _reserve_or_preempt(self, sample: Sample, plan: Schedule) -> bool:
        """Make room for one token, at the cost of the youngest samples; False if that is it."""
        while True:
            try:
                plan.copies += sample.sequence.reserve(1)
                return True
            except OutOfBlocks:
                # Rows are planned oldest first, so the youngest has none in this plan yet.
                victim = self.running[-1]
                self._preempt(victim, plan)
                if victim is sample:
                    return False

    def _preempt(self, sample: Sample, plan: Schedule) -> None:
        sequence = sample.sequence
        if self.preemption == "swap" and sample.is_decoding:
            plan.swapped_out.append((sample, sequence.block_table[: sequence.num_cached_blocks]))
            sample.num_stored_tokens = sequence.num_cached_tokens
        self.running.remove(sample)
        sample.is_running = False
        self._free(sample)
        sample.num_preemptions += 1
        sample.request.metrics.num_preemptions += 1
        self.num_preemptions += 1
        plan.preempted.append(sample)
        insort(self.waiting, sample, key=_sort_key)

    def _free(self, sample: Sample) -> None:
        sample.sequence.free()
        if sample.chain:
            sample.chain.unpublish()

    def _continue_prefills(self, plan: Schedule, prefills: list[Sample]) -> None:
        budget = self.max_num_batched_tokens - len(plan.samples)
        for sample in self.running:
            num_left = sample.num_tokens - sample.sequence.num_cached_tokens
            if num_left > 1 and budget > 0:
                sample.num_scheduled_tokens = min(num_left, budget)
                budget -= sample.num_scheduled_tokens
                prefills.append(sample)

    def _admit_waiting(self, plan: Schedule, prefills: list[Sample]) -> None:
        budget = self.max_num_batched_tokens - len(plan.samples)
        budget -= sum(sample.num_scheduled_tokens for sample in prefills)
        num_seqs = self.num_seqs
        self._num_blocks_awaited = 0
        for sample in self.admission.candidates(self.waiting, self.num_steps, self.max_num_seqs):
            num_seqs += 1 + sample.num_forks
            if budget <= 0 or num_seqs > self.max_num_seqs:
                return
            match = self.admission.match(sample)
            if self.admission.is_being_computed(sample, match, self.running):
                num_seqs -= 1 + sample.num_forks
                continue
            num_needed = self.admission.num_blocks(sample, match, self.num_seqs)
            if num_needed > self.pool.num_free_blocks:
                self._num_blocks_awaited = num_needed
                return
            self._start(sample, match, plan)
            num_left = sample.num_tokens - sample.sequence.num_cached_tokens
            sample.num_scheduled_tokens = min(num_left, budget)
            budget -= sample.num_scheduled_tokens
            prefills.append(sample)

    def _may_admit(self) -> bool:
        """Whether there may be room by now for the sample that found none."""
        return (
            self.num_seqs < self.max_num_seqs
            and self._num_blocks_awaited <= self.pool.num_free_blocks
        )

    def _start(self, sample: Sample, match: PrefixMatch, plan: Schedule) -> None:
        """Give a sample the blocks of all its known tokens, and let it run."""
        sequence = sample.sequence
        if sample.num_stored_tokens:
            sequence.reserve(sample.num_stored_tokens)
            sequence.num_cached_tokens = sample.num_stored_tokens
            sample.num_stored_tokens = 0
            plan.swapped_in.append(sample)
        elif self.prefix_cache:
            assert sample.chain is not None
            plan.copies += self.prefix_cache.attach(sequence, sample.chain, match)
        if sample.num_preemptions == 0:
            sample.request.metrics.num_cached_tokens = sequence.num_cached_tokens
        sequence.reserve(sample.num_tokens - sequence.num_cached_tokens)
        self.waiting.remove(sample)
        insort(self.running, sample, key=_sort_key)
        sample.is_running = True


def _sort_key(sample: Sample) -> tuple[float, ...]:
    return sample.sort_key

"""The scheduler with a model made of integers: slots hold what the tokens up to them hash to.

A step reads every slot that its rows attend to, so a block that is stale, missing, shared with
a writer or copied too late is noticed at once.
"""

from mlx_paged.blocks import BlockPool
from mlx_paged.blocks.prefix import HashIndex
from mlx_paged.blocks.prefix_cache import PrefixCache
from mlx_paged.blocks.radix import RadixIndex
from mlx_paged.engine.params import SamplingParams
from mlx_paged.engine.request import Request
from mlx_paged.engine.scheduler import Scheduler

INDEXES = {"hash": HashIndex, "radix": RadixIndex}
END = 0


def prefix_hashes(token_ids, salt=""):
    """What the slot of each token holds."""
    hashes, h = [], len(salt)
    for token_id in token_ids:
        h = hash((h, token_id))
        hashes.append(h)
    return hashes


def next_token(request, token_ids, index):
    """What follows: `END` once in a while, if the request can end early."""
    drawn = hash((prefix_hashes(token_ids, request.salt)[-1], index)) % 7
    return END if drawn == 0 and END in request.end_token_ids else 1 + drawn % 3


def answer(request, index):
    """A sample's tokens, computed alone."""
    token_ids = list(request.prompt_token_ids)
    while True:
        token_ids.append(next_token(request, token_ids, index))
        num_output = len(token_ids) - request.num_prompt_tokens
        if token_ids[-1] == END or num_output == request.max_tokens:
            return token_ids[request.num_prompt_tokens :]


class SimulatedEngine:
    """Schedule, compute, draw, append or finish, with steps planned ahead as the engine does."""

    def __init__(self, num_blocks=16, block_size=4, prefix_caching="hash", ends=False, **options):
        self.end_token_ids = frozenset({END} if ends else ())
        self.pool = BlockPool(num_blocks, block_size)
        index = INDEXES.get(prefix_caching)
        cache = PrefixCache(self.pool, index(block_size)) if index else None
        self.scheduler = Scheduler(self.pool, cache, **options)
        self.slots = {}
        self.requests = []
        self.plans = []
        self.in_flight = None

    def add(self, prompt, max_tokens=8, n=1, priority=0, salt=""):
        params = SamplingParams(n=n, max_tokens=max_tokens)
        name = str(len(self.requests))
        request = Request(
            name, list(prompt), params, max_tokens, priority, self.end_token_ids, salt
        )
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self):
        plan = self.in_flight
        if plan is None:
            plan = self.scheduler.schedule()
            self._start(plan)
        self.in_flight = None
        if not plan:
            return plan
        self._compute(plan)
        ahead = self.scheduler.schedule_next(plan)
        self._take(plan)
        if ahead and all(sample.is_running for sample in ahead.samples):
            self.in_flight = ahead
            self._start(ahead)
        self.scheduler.check_integrity()
        return plan

    def run(self, max_steps=2000):
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError(f"still running after {max_steps} steps")

    def abort(self, request):
        for sample in request.samples:
            if not sample.is_finished:
                self._finish(sample, "abort")
        self.scheduler.check_integrity()

    def _start(self, plan):
        self.plans.append(plan)
        self._move_blocks(plan)
        self.draws = [sample for sample in plan.samples if sample.draws]
        self.rows = [
            (s, s.sequence.num_cached_tokens, s.num_scheduled_tokens) for s in plan.samples
        ]
        assert sum(n for _, _, n in self.rows) <= self.scheduler.max_num_batched_tokens
        assert len(self.scheduler.running) <= self.scheduler.max_num_seqs
        ones = [n == 1 for _, _, n in self.rows]
        assert ones == sorted(ones, reverse=True)
        # What the sampler draws may be needed by the next plan before it is appended.
        self.tables = [list(s.sequence.block_table) for s in plan.samples]
        self.scheduler.advance(plan)

    def _move_blocks(self, plan):
        size = self.pool.block_size
        for sample, block_ids in plan.swapped_out:
            sample.stored = [self.slots.get(b * size + i) for b in block_ids for i in range(size)]
        read = {
            (to, i): self.slots.get(source * size + i)
            for source, to in plan.copies
            for i in range(size)
        }
        for (to, i), content in read.items():
            self.slots[to * size + i] = content
        for sample in plan.swapped_in:
            for i, content in enumerate(sample.stored):
                block_id = sample.sequence.block_table[i // size]
                self.slots[block_id * size + i % size] = content
            sample.stored = None

    def _compute(self, plan):
        size = self.pool.block_size
        self.drawn = {}
        written = set()
        for (sample, start, num_new), table in zip(self.rows, self.tables, strict=True):
            request = sample.request
            hashes = prefix_hashes(sample.sequence.token_ids, request.salt)
            stop = start + num_new
            assert stop <= len(hashes)
            for i in range(start, stop):
                slot = table[i // size] * size + i % size
                assert slot not in written, "two rows write one slot"
                written.add(slot)
                self.slots[slot] = hashes[i]
        for (sample, start, num_new), table in zip(self.rows, self.tables, strict=True):
            hashes = prefix_hashes(sample.sequence.token_ids, sample.request.salt)
            for i in range(start + num_new):
                assert self.slots[table[i // size] * size + i % size] == hashes[i]
            if start + num_new == len(hashes):
                self.drawn[sample] = [
                    next_token(sample.request, sample.sequence.token_ids, index)
                    for index in range(sample.index, sample.index + sample.num_forks + 1)
                ]

    def _take(self, plan):
        self.scheduler.publish(plan)
        assert set(self.drawn) == set(self.draws)
        for sample in self.draws:
            if not sample.is_running:
                continue
            targets = [sample, *self.scheduler.fork(sample)]
            for target, token_id in zip(targets, self.drawn[sample], strict=True):
                target.sequence.token_ids.append(token_id)
                if token_id == END:
                    self._finish(target, "stop")
                elif target.num_tokens >= target.max_num_tokens:
                    self._finish(target, "length")

    def _finish(self, sample, reason):
        sample.finish_reason = reason
        sample.request.num_finished += 1
        self.scheduler.remove(sample)

"""Names of blocks: what is found, what isn't, and what must never be."""

from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_paged.blocks import BlockPool, OutOfBlocks, Sequence
from mlx_paged.blocks.prefix import HashIndex, encode_tokens
from mlx_paged.blocks.prefix_cache import PrefixCache
from mlx_paged.blocks.radix import RadixIndex

INDEXES = [HashIndex, RadixIndex]


def make_cache(index_type, num_blocks=32, block_size=4, **kwargs):
    pool = BlockPool(num_blocks, block_size)
    return PrefixCache(pool, index_type(block_size, **kwargs))


def serve(cache, token_ids, salt=""):
    """Look a prompt up, compute the rest, publish it. Returns the sequence and what it found."""
    sequence, chain = Sequence(cache.pool, token_ids), cache.index.chain(salt)
    cache.attach(sequence, chain, cache.lookup(sequence, chain))
    num_found = sequence.num_cached_tokens
    sequence.reserve(len(token_ids) - num_found)
    sequence.num_cached_tokens = len(token_ids)
    cache.publish(sequence, chain)
    cache.index.check_integrity()
    return SimpleNamespace(sequence=sequence, chain=chain, num_found=num_found)


@pytest.mark.parametrize(("index_type", "found"), [(HashIndex, 80), (RadixIndex, 85)])
def test_a_prompt_that_parts_inside_a_block(index_type, found):
    """The text's prefix.py: B shares 85 of A's 96 tokens, C shares 3, block 16."""
    cache = make_cache(index_type, block_size=16)
    a = list(range(96))
    b = a[:85] + [200 + i for i in range(11)]
    c = a[:3] + [300 + i for i in range(107)]
    assert [serve(cache, prompt).num_found for prompt in (a, b)] == [0, found]
    assert serve(cache, c).num_found == (3 if index_type is RadixIndex else 0)


@pytest.mark.parametrize("index_type", INDEXES)
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 7, 8])
def test_a_prompt_seen_before_still_has_its_last_token_to_compute(index_type, num_tokens):
    cache = make_cache(index_type)
    prompt = list(range(num_tokens))
    first = serve(cache, prompt)
    table = list(first.sequence.block_table)
    again = serve(cache, prompt)
    assert again.num_found <= num_tokens - 1
    assert again.num_found // 4 == (num_tokens - 1) // 4
    # Where the last token is written, nobody else reads.
    last = again.sequence.block_table[(num_tokens - 1) // 4]
    assert last not in table
    assert cache.pool.ref_count(last) == 1


@pytest.mark.parametrize("index_type", INDEXES)
def test_a_reused_block_is_no_longer_found_by_its_old_name(index_type):
    """Pool of one block: X, then Y in its place, then X again."""
    cache = make_cache(index_type, num_blocks=2)
    x, y = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10]
    serve(cache, x).sequence.free()
    other = serve(cache, y)
    assert other.num_found == 0
    other.sequence.free()
    assert serve(cache, x).num_found == 0


@pytest.mark.parametrize("index_type", INDEXES)
def test_names_differ_by_model_adapter_dtype_and_salt(index_type):
    cache = make_cache(index_type, extra_keys=("model", "float16"))
    other = index_type(4, extra_keys=("model", "float32"))
    assert cache.index.chain().root != other.chain().root
    assert index_type(4, ("ab", "c")).chain().root != index_type(4, ("a", "bc")).chain().root
    prompt = list(range(9))
    assert serve(cache, prompt, salt="me").num_found == 0
    assert serve(cache, prompt, salt="you").num_found == 0
    assert serve(cache, prompt, salt="me").num_found == 8


@pytest.mark.parametrize("digest", [lambda _: b"one name for all", lambda data: data[-4:]])
def test_prefixes_of_one_hash_are_told_apart_by_their_content(digest):
    """With one hash for all, or for all blocks with the same tokens after other parents."""
    cache = make_cache(HashIndex, digest=digest)
    assert serve(cache, [1, 2, 3, 4, 5, 6, 7, 8, 0]).num_found == 0
    assert serve(cache, [9, 9, 9, 9, 5, 6, 7, 8, 0]).num_found == 0
    assert serve(cache, [5, 6, 7, 8, 0]).num_found == 0


@pytest.mark.parametrize("index_type", INDEXES)
def test_least_recently_used_goes_first_and_tails_before_heads(index_type):
    cache = make_cache(index_type, num_blocks=6)
    old, new = [1] * 12, [2] * 12
    first, second = serve(cache, old), serve(cache, new)
    tables = first.sequence.block_table + second.sequence.block_table
    first.sequence.free()
    second.sequence.free()
    assert cache.pool.free_queue == [2, 1, 0, 5, 4, 3]
    assert sorted(tables) == [0, 1, 2, 3, 4, 5]
    assert serve(cache, [3] * 8).num_found == 0
    assert cache.lookup(Sequence(cache.pool, old), cache.index.chain()).block_ids == [0]
    serve(cache, old[:5]).sequence.free()
    assert cache.pool.free_queue[-1] == 0


@pytest.mark.parametrize("index_type", INDEXES)
def test_blocks_in_use_are_never_evicted(index_type):
    cache = make_cache(index_type, num_blocks=4)
    serve(cache, list(range(8)))
    serve(cache, list(range(50, 58)))
    with pytest.raises(OutOfBlocks):
        serve(cache, list(range(100, 104)))
    assert len(cache.index) == 4


def test_a_tree_that_lost_a_block_is_rebuilt_by_who_still_holds_a_copy():
    """Two sequences compute the same tokens at once; the one whose blocks are named goes."""
    cache = make_cache(RadixIndex, num_blocks=6)
    twins = [SimpleNamespace(s=Sequence(cache.pool, [1] * 12), c=cache.index.chain()) for _ in "ab"]
    for twin in twins:
        twin.s.reserve(8)
        twin.s.num_cached_tokens = 8
        cache.publish(twin.s, twin.c)
    twins[0].s.free()
    cache.pool.release(cache.pool.allocate()[0])
    cache.pool.release(cache.pool.allocate()[0])
    taken = cache.pool.allocate(4)
    assert len(cache.index) == 0
    cache.pool.release(taken[0])
    twins[1].s.reserve(4)
    twins[1].s.num_cached_tokens = 12
    cache.publish(twins[1].s, twins[1].c)
    cache.index.check_integrity()
    assert sorted(b for b in range(6) if b in cache.index) == sorted(twins[1].s.block_table)


def test_tokens_sort_as_their_bytes_do():
    ids = [[0, 255], [0, 256], [1, 0], [256, 0], [65536, 3]]
    assert sorted(ids, key=encode_tokens) == ids


class IndexMachine(RuleBasedStateMachine):
    """Random prompts over two tokens, against a list of everything that blocks hold.

    The model keeps, for each block, the tokens up to its end that its slots were computed
    from, and which blocks were published.
    """

    index_type = HashIndex

    def __init__(self):
        super().__init__()
        self.cache = make_cache(self.index_type, num_blocks=7, block_size=2)
        self.held = {}
        self.live = []

    @rule(
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        salt=st.sampled_from(["", "", "x"]),
    )
    def serve(self, token_ids, salt):
        cache, pool = self.cache, self.cache.pool
        sequence, chain = Sequence(pool, token_ids), cache.index.chain(salt)
        match = cache.lookup(sequence, chain)
        self.check_match(match, token_ids, salt)
        need = -(-len(token_ids) // 2) - len(match.block_ids) + cache.num_blocks_taken(match)
        if need > pool.num_free_blocks:
            return
        copies = cache.attach(sequence, chain, match)
        for source, _ in copies:
            assert self.held[source][1][: match.num_tokens(2)] == token_ids[: match.num_tokens(2)]
        before = set(sequence.block_table[: len(match.block_ids)])
        sequence.reserve(len(token_ids) - sequence.num_cached_tokens)
        sequence.num_cached_tokens = len(token_ids)
        for i, block_id in enumerate(sequence.block_table):
            if block_id not in before:
                self.held[block_id] = (salt, token_ids[: 2 * i + 2])
        cache.publish(sequence, chain)
        self.live.append((sequence, chain))

    def check_match(self, match, token_ids, salt):
        for i, block_id in enumerate(match.block_ids):
            assert self.held[block_id] == (salt, token_ids[: 2 * i + 2])
        assert match.num_tokens(2) < len(token_ids)
        if match.partial:
            block_id, _ = match.partial
            assert self.held[block_id][0] == salt

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data):
        sequence, chain = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        sequence.free()
        chain.unpublish()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token_id=st.integers(0, 1))
    def grow(self, data, token_id):
        sequence, chain = self.live[data.draw(st.integers(0, len(self.live) - 1))]
        salt = self.held[sequence.block_table[0]][0]
        try:
            sequence.reserve(1)
        except OutOfBlocks:
            return
        sequence.token_ids.append(token_id)
        sequence.num_cached_tokens += 1
        self.held[sequence.block_table[-1]] = (salt, list(sequence.token_ids))
        self.cache.publish(sequence, chain)

    @invariant()
    def agrees(self):
        self.cache.index.check_integrity()
        self.cache.pool.check_integrity(s.block_table for s, _ in self.live)
        for block_id in range(7):
            if block_id in self.cache.index:
                assert len(self.held[block_id][1]) % 2 == 0

    @invariant()
    def finds_the_longest_chain_of_named_blocks(self):
        """By trying every named block at every place."""
        named = {}
        for block_id in range(7):
            if block_id in self.cache.index:
                salt, token_ids = self.held[block_id]
                named[salt, tuple(token_ids)] = block_id
        for (salt, token_ids), block_id in named.items():
            chain = self.cache.index.chain(salt)
            prefixes = [token_ids[: 2 * i + 2] for i in range(len(token_ids) // 2)]
            expected = []
            for prefix in prefixes:
                if (salt, prefix) not in named:
                    break
                expected.append(named[salt, prefix])
            sequence = Sequence(self.cache.pool, [*token_ids, 0])
            assert self.cache.lookup(sequence, chain).block_ids == expected
            if self.index_type is RadixIndex:
                assert block_id in expected


class RadixMachine(IndexMachine):
    index_type = RadixIndex


TestHashIndex = IndexMachine.TestCase
TestRadixIndex = RadixMachine.TestCase
TestHashIndex.settings = TestRadixIndex.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None
)

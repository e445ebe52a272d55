"""Prefix caches of many sizes: the library's against a list of blocks, the oracle against all."""

import itertools
import json
import random
from collections import OrderedDict

import _scripts  # noqa: F401
import pytest
from measurements import lengths, prefix_caches, visits
from measurements.visits import Visit, Workload


def random_trace(rng, num_visits, num_names, longest):
    """Visits to the paths of a random tree, a name a node."""
    parents = [None] + [rng.randrange(i) for i in range(1, num_names)]
    paths = []
    for node in range(num_names):
        path, at = [], node
        while at is not None:
            path.append(at)
            at = parents[at]
        paths.append(path[::-1][:longest])
    chosen = [rng.choice(paths) for _ in range(num_visits)]
    return Workload([Visit(p, len(p), len(p), 10 * len(p), (p,)) for p in chosen], 10)


def least_recently_used(workload, num_blocks):
    """Blocks found by a list ordered by last use."""
    cached, found = OrderedDict(), 0
    for visit in workload.visits:
        hits = list(itertools.takewhile(cached.__contains__, visit.names))
        found += len(hits)
        for name in visit.names:
            cached.pop(name, None)
        while len(cached) + len(visit.names) > num_blocks:
            cached.popitem(last=False)
        # The tail is used first, so that it goes first.
        cached.update(dict.fromkeys(reversed(visit.names)))
    return found


def most_that_can_be_found(workload, num_blocks):
    """Blocks found by the best of all ways to evict, tried out."""
    best = {frozenset(): 0}
    for visit in workload.visits:
        after = {}
        for cached, found in best.items():
            hits = len(list(itertools.takewhile(cached.__contains__, visit.names)))
            others = cached - set(visit.names)
            room = min(num_blocks - len(visit.names), len(others))
            for kept in itertools.combinations(sorted(others), room):
                state = frozenset(kept) | frozenset(visit.names)
                after[state] = max(after.get(state, 0), found + hits)
        best = after
    return max(best.values())


@pytest.mark.parametrize("seed", range(8))
def test_library_and_simulated_lru_find_what_a_plain_list_finds(seed):
    rng = random.Random(seed)
    workload = random_trace(rng, 200, 40, 6)
    for num_blocks in (6, 9, 17, 60):
        expected = 10 * least_recently_used(workload, num_blocks)
        assert prefix_caches.tokens_found(workload, num_blocks, "lru") == expected
        assert prefix_caches.library_tokens_found(workload, num_blocks) == expected
        assert expected <= prefix_caches.tokens_found(workload, num_blocks, "oracle")


@pytest.mark.parametrize("seed", range(8))
def test_no_way_to_evict_finds_more_than_the_oracle(seed):
    rng = random.Random(seed)
    workload = random_trace(rng, 12, 9, 3)
    for num_blocks in (3, 4, 5):
        found = prefix_caches.tokens_found(workload, num_blocks, "oracle")
        assert found == 10 * most_that_can_be_found(workload, num_blocks)


CONVERSATIONS = [[(10, 7), (3, 20), (8, 9)], [(30, 5)], [(6, 6), (5, 40), (1, 1), (9, 2)]]


def test_turns_find_what_came_before_in_whole_blocks():
    workload = visits.conversation_visits(CONVERSATIONS, 4, 6, num_active=1)
    expected = -(6 // 4) * 4  # the very first turn finds nothing
    for pairs in CONVERSATIONS:
        before = 6
        for turn, (prompt, answer) in enumerate(pairs):
            stored = before - 1 if turn else before
            expected += min(stored, before + prompt - 1) // 4 * 4
            before += prompt + answer
    assert prefix_caches.library_tokens_found(workload, 500, "hash") == expected
    assert prefix_caches.tokens_found(workload, 500, "oracle") == expected
    exact = visits.num_exactly_reused(CONVERSATIONS, 6)
    by_tree = prefix_caches.library_tokens_found(workload, 500, "radix")
    # The tree finds the rest of the system prompt too, in each first turn but the very first.
    assert by_tree == expected + 2 * (6 % 4)
    single = visits.conversation_visits(CONVERSATIONS, 1, 6, num_active=1)
    assert exact == prefix_caches.library_tokens_found(single, 2000, "hash")


def test_names_differ_wherever_tokens_do():
    workload = visits.conversation_visits(CONVERSATIONS, 4, 6, num_active=3, seed=1)
    contents = {}
    for visit in workload.visits:
        token_ids = [token_id for piece in visit.tokens for token_id in piece]
        assert len(visit.names) == len(token_ids) // 4
        assert visit.num_blocks == -(-len(token_ids) // 4)
        for i, name in enumerate(visit.names):
            assert contents.setdefault(name, token_ids[: 4 * i + 4]) == token_ids[: 4 * i + 4]
    assert len(contents) == workload.num_names == len(set(map(tuple, contents.values())))


def test_turns_come_in_order_with_so_many_conversations_under_way():
    num_turns = [random.Random(i).randrange(1, 12) for i in range(2000)]
    order = visits.order_turns(num_turns, num_active=30)
    seen, active, total = {}, 0, 0
    for conversation, turn in order:
        assert seen.get(conversation, -1) == turn - 1
        seen[conversation] = turn
        active += (turn == 0) - (turn == num_turns[conversation] - 1)
        total += active
    assert len(order) == sum(num_turns)
    # Turns sample longer conversations more often, hence the room.
    assert total / len(order) == pytest.approx(30, rel=0.2)


def test_a_trace_of_names_is_read_with_room_for_answers(tmp_path):
    file = tmp_path / "trace.jsonl"
    lines = [
        {"input_length": 1000, "output_length": 300, "hash_ids": [0, 1]},
        {"input_length": 700, "output_length": 30, "hash_ids": [0, 2]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    workload = visits.read_trace_visits(file)
    assert [visit.num_blocks for visit in workload.visits] == [3, 2]
    assert prefix_caches.library_tokens_found(workload, 5) == 512
    assert visits.read_trace_visits(file, 1).num_prompt_tokens == 1000
    file.write_text('{"input_length": 3}\n')
    with pytest.raises(ValueError, match="line 1"):
        visits.read_trace_visits(file)


def test_conversations_are_cut_at_the_context():
    assert visits.within(CONVERSATIONS, 40) == [[(10, 7), (3, 20)], [(30, 5)], [(6, 6)]]
    assert visits.within(CONVERSATIONS, 12) == [[(6, 6)]]


def test_committed_conversations_are_read():
    conversations = lengths.read_conversations(lengths.DATA / "sharegpt_multiturn.json")
    assert len(conversations) == 1000
    assert conversations[0] == [(881, 254), (363, 364)]


def test_a_pool_smaller_than_a_request_is_refused():
    workload = visits.conversation_visits(CONVERSATIONS, 4, 6, num_active=1)
    with pytest.raises(ValueError, match="the pool has 3"):
        prefix_caches.tokens_found(workload, 3)

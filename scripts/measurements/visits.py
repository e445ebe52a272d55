"""Requests that begin alike: turns of conversations, and a trace with prefix structure."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from measurements.lengths import Pair

# Conversation c's own tokens begin at c * SPACE, so no two tokens of two of them are equal.
SPACE = 2**20


@dataclass(frozen=True)
class Visit:
    """A request as a prefix cache sees it.

    Attributes:
        names: one for each block that is full at the end, different whenever the tokens in the
            block or before it are.
        num_findable: leading names that may be found, the last token being computed anyway.
        num_blocks: that the request holds at its end.
        num_prompt_tokens: of which those found need not be computed.
        tokens: prompt and answer but for its last token, in pieces. A trace that has only the
            names of its blocks has these for tokens.
        conversation: that the visit is a turn of; -1 for none.
    """

    names: Sequence[int]
    num_findable: int
    num_blocks: int
    num_prompt_tokens: int
    tokens: tuple[Sequence[int], ...]
    conversation: int = -1


@dataclass(frozen=True)
class Workload:
    """Visits in the order of time, with blocks of `block_tokens` tokens."""

    visits: list[Visit]
    block_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        return sum(visit.num_prompt_tokens for visit in self.visits)

    @property
    def most_blocks(self) -> int:
        """Blocks of the largest request."""
        return max(visit.num_blocks for visit in self.visits)

    @property
    def num_names(self) -> int:
        """Blocks that would hold everything for ever."""
        return len({name for visit in self.visits for name in visit.names})


def order_turns(num_turns: list[int], num_active: float, seed: int = 0) -> list[tuple[int, int]]:
    """(conversation, turn) in order of time.

    Conversations begin at random, one a unit of time, and pause at random between turns, so
    that `num_active` of them are under way on average.
    """
    rng = random.Random(seed)
    num_pauses = sum(num_turns) - len(num_turns)
    pause = num_active * len(num_turns) / max(1, num_pauses)
    times, begin = [], 0.0
    for conversation, turns in enumerate(num_turns):
        begin += rng.expovariate(1)
        time = begin
        for turn in range(turns):
            times.append((time, conversation, turn))
            time += rng.expovariate(1 / pause)
    return [(conversation, turn) for _, conversation, turn in sorted(times)]


def conversation_visits(
    conversations: list[list[Pair]],
    block_size: int,
    num_system_tokens: int,
    num_active: float,
    seed: int = 0,
) -> Workload:
    """Each turn's prompt holds all that was said before; all begin with one system prompt."""
    visits: list[Visit] = []
    num_shared = num_system_tokens // block_size
    for conversation, turn in order_turns([len(c) for c in conversations], num_active, seed):
        pairs = conversations[conversation]
        num_before = num_system_tokens + sum(p + a for p, a in pairs[:turn])
        prompt, answer = pairs[turn]
        num_prompt = num_before + prompt
        num_stored = num_prompt + answer - 1
        own = (conversation + 1) * SPACE
        num_full = num_stored // block_size
        names = [*range(num_shared), *range(own + num_shared, own + num_full)]
        tokens = range(num_system_tokens), range(own, own + num_stored - num_system_tokens)
        visits.append(
            Visit(
                names=names[:num_full],
                num_findable=(num_prompt - 1) // block_size,
                num_blocks=-(-num_stored // block_size),
                num_prompt_tokens=num_prompt,
                tokens=tokens,
                conversation=conversation,
            )
        )
    return Workload(visits, block_size)


def within(conversations: list[list[Pair]], num_tokens: int) -> list[list[Pair]]:
    """Each conversation's turns up to a length of so many tokens; those without any left out."""
    kept = []
    for pairs in conversations:
        total, turns = 0, []
        for prompt, answer in pairs:
            total += prompt + answer
            if total > num_tokens:
                break
            turns.append((prompt, answer))
        if turns:
            kept.append(turns)
    return kept


def num_exactly_reused(conversations: list[list[Pair]], num_system_tokens: int) -> int:
    """Tokens found if all were kept, and found up to the last one that agrees.

    A later turn finds all before it but the last answer's last token, which is never stored;
    a first turn finds the system prompt, but for the very first.
    """
    num_found = -num_system_tokens
    for pairs in conversations:
        num_before = num_system_tokens
        num_found += num_before
        for prompt, answer in pairs[:-1]:
            num_before += prompt + answer
            num_found += num_before - 1
    return num_found


def read_trace_visits(
    file: Path, num_requests: int | None = None, block_tokens: int = 512
) -> Workload:
    """JSON lines (.gz or not) with input_length, output_length and hash_ids, one a block.

    Raises:
        ValueError: a line is no request.
    """
    opened = gzip.open if file.suffix == ".gz" else open
    visits: list[Visit] = []
    try:
        with opened(file, "rt") as lines:
            for number, line in enumerate(lines, 1):
                if num_requests is not None and len(visits) == num_requests:
                    break
                visits.append(_visit(file, number, line, block_tokens))
    except OSError as error:
        raise ValueError(f"{file} can't be read: {error}") from error
    return Workload(visits, block_tokens)


def _visit(file: Path, number: int, line: str, block_tokens: int) -> Visit:
    try:
        row = json.loads(line)
        names, num_input, num_output = row["hash_ids"], row["input_length"], row["output_length"]
        num_blocks = max(len(names), -(-(num_input + num_output) // block_tokens))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"line {number} of {file} is no request; expected are input_length, output_length "
            f"and hash_ids ({error!r})"
        ) from error
    return Visit(names, len(names), num_blocks, num_input, (names,))

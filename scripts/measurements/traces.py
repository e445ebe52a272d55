"""When requests come: all at once, at random, or as in a recorded trace."""

from __future__ import annotations

import csv
import gzip
import random
from pathlib import Path

from measurements.lengths import Pair
from measurements.serving import Arrival


def at_once(pairs: list[Pair]) -> list[Arrival]:
    """All wait from the first step on."""
    return [Arrival(0, prompt, answer) for prompt, answer in pairs]


def poisson(pairs: list[Pair], load: float, seed: int = 0) -> list[Arrival]:
    """Independent arrivals at a constant rate.

    Args:
        load: requests that would run at once on average, if memory had no end: the rate in
            requests per step, times the mean answer's steps.
    """
    rng = random.Random(seed)
    rate = load / _mean_answer(pairs)
    time, arrivals = 0.0, []
    for prompt, answer in pairs:
        time += rng.expovariate(rate)
        arrivals.append(Arrival(time, prompt, answer))
    return arrivals


def at_load(trace: list[Arrival], load: float) -> list[Arrival]:
    """The trace's own arrivals, with times stretched to a load as in `poisson`."""
    answers = sum(arrival.answer for arrival in trace)
    steps = answers / load / (trace[-1].time - trace[0].time)
    return [Arrival((a.time - trace[0].time) * steps, a.prompt, a.answer) for a in trace]


def read_trace(file: Path) -> list[Arrival]:
    """A CSV file (.gz or not) of arrival_s, prompt_tokens, output_tokens; times are in seconds.

    Raises:
        ValueError: a column is missing or a line is no request.
    """
    opened = gzip.open if file.suffix == ".gz" else open
    try:
        with opened(file, "rt", newline="") as lines:
            rows = list(csv.DictReader(lines))
    except OSError as error:
        raise ValueError(f"{file} can't be read: {error}") from error
    arrivals = []
    for number, row in enumerate(rows, 2):
        try:
            time, prompt, answer = (
                float(row["arrival_s"]),
                int(row["prompt_tokens"]),
                int(row["output_tokens"]),
            )
        except (KeyError, ValueError, TypeError) as error:
            raise ValueError(
                f"line {number} of {file} is no request; expected are the columns arrival_s, "
                f"prompt_tokens, output_tokens ({error!r})"
            ) from error
        if prompt > 0 and answer > 0:
            arrivals.append(Arrival(time, prompt, answer))
    if len(arrivals) < 2:
        raise ValueError(f"{file} holds fewer than two requests")
    return sorted(arrivals, key=lambda arrival: arrival.time)


def _mean_answer(pairs: list[Pair]) -> float:
    return sum(answer for _, answer in pairs) / len(pairs)

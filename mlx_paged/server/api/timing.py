"""When a request's tokens came."""

from __future__ import annotations

import time
from collections.abc import Mapping

from mlx_paged.server.api.metrics import Metrics


class Timing:
    """Observes one HTTP request's times, from now on, in the metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began = time.perf_counter()
        self._has_token: set[int] = set()
        self._last: dict[tuple[int, int], float] = {}

    def tokens(self, prompt_index: int, num_new: Mapping[int, int]) -> None:
        """Some tokens of a prompt's samples have come together.

        Args:
            num_new: how many, by sample.
        """
        now, metrics = time.perf_counter(), self._metrics
        if num_new and prompt_index not in self._has_token:
            self._has_token.add(prompt_index)
            metrics.first_token_seconds.observe(now - self._began)
        for index, num_tokens in num_new.items():
            metrics.generation_tokens.inc(num_tokens)
            last = self._last.get((prompt_index, index))
            if last is not None:
                for _ in range(num_tokens):
                    metrics.token_seconds.observe((now - last) / num_tokens)
            self._last[prompt_index, index] = now

    def end(self) -> None:
        """All answers are complete."""
        self._metrics.request_seconds.observe(time.perf_counter() - self._began)

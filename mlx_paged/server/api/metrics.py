"""What Prometheus can ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlx_paged.engine.stats import EngineStats

if TYPE_CHECKING:
    from mlx_paged.server.engine_client import EngineClient

FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_SECONDS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
REQUEST_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)

disable_created_metrics()


class Metrics:
    """Counts what goes through the HTTP side, and reads the engine's own counts.

    All names begin with `mlx_paged_`.
    """

    def __init__(self, client: EngineClient) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(EngineCollector(client))
        self.http_requests = Counter(
            "mlx_paged_http_requests",
            "HTTP requests, by route and status; 499 is a client that left",
            ["method", "route", "status"],
            registry=registry,
        )
        self.finished = Counter(
            "mlx_paged_answers",
            "Answers that ended, by reason",
            ["reason"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "mlx_paged_prompt_tokens", "Tokens of prompts taken in", registry=registry
        )
        self.generation_tokens = Counter(
            "mlx_paged_generation_tokens", "Tokens of answers sent", registry=registry
        )
        self.first_token_seconds = Histogram(
            "mlx_paged_time_to_first_token_seconds",
            "From sending a prompt to the engine to its first token",
            buckets=FIRST_TOKEN_SECONDS,
            registry=registry,
        )
        self.token_seconds = Histogram(
            "mlx_paged_inter_token_seconds",
            "Between two tokens of one answer",
            buckets=TOKEN_SECONDS,
            registry=registry,
        )
        self.request_seconds = Histogram(
            "mlx_paged_request_seconds",
            "From sending a request to the engine to the end of its answers",
            buckets=REQUEST_SECONDS,
            registry=registry,
        )

    def render(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)


class EngineCollector(Collector):
    """Reads the engine's state when it is asked for."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def describe(self) -> list[Metric]:
        """Nothing: names are not known to clash."""
        return []

    def collect(self) -> Iterator[Metric]:
        client = self._client
        ready = client.not_ready is None
        yield _gauge("engine_ready", "Whether the engine makes progress", int(ready))
        yield _counter("engine_restarts", "Times that it was started anew", client.num_restarts)
        yield _gauge("requests_open", "Requests that have not ended", client.num_open)
        yield _gauge("requests_queued", "Those without their first token", client.num_waiting)
        if client.stats is not None:
            yield from _engine_metrics(client.stats)


def _engine_metrics(stats: EngineStats) -> Iterator[Metric]:
    used, cached = stats.num_blocks_used, stats.num_blocks_cached
    yield _gauge("samples_running", "Answers that the engine works on", stats.num_running)
    yield _gauge("samples_waiting", "Answers waiting for room", stats.num_waiting)
    blocks = GaugeMetricFamily(
        "mlx_paged_pool_blocks", "Blocks of the pool, by state", labels=["state"]
    )
    for state, value in (
        ("used", used),
        ("cached", cached),
        ("free", stats.num_blocks - used - cached),
    ):
        blocks.add_metric([state], value)
    yield blocks
    yield _gauge("pool_block_size_tokens", "Tokens per block", stats.block_size)
    yield _gauge("pool_bytes", "Memory of the pool", stats.pool_nbytes)
    yield _gauge(
        "pool_slot_share", "Share of used blocks' slots that hold a token", stats.slot_share
    )
    yield _gauge("peak_memory_bytes", "Most memory that MLX has held", stats.peak_memory_nbytes)
    yield _counter("preemptions", "Answers that gave back their blocks", stats.num_preemptions)
    yield _counter("copies", "Blocks copied on write", stats.counts.num_copies)
    yield _counter("steps", "Forward passes", stats.counts.num_steps)
    yield _counter("prefill_tokens", "Tokens computed in prefills", stats.counts.num_prompt_tokens)
    yield _counter(
        "prefix_query_tokens", "Tokens looked up in the prefix cache", stats.prefix.num_query_tokens
    )
    yield _counter("prefix_hit_tokens", "Tokens found there", stats.prefix.num_saved_tokens)
    yield _gauge("prefix_hit_rate", "Share of tokens that were found", stats.prefix.hit_rate)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"mlx_paged_{name}", text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"mlx_paged_{name}", text, value)

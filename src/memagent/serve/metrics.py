"""Counters and gauges of the server, in Prometheus' formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from memagent.types import Usage

if TYPE_CHECKING:  # torch is not needed to count
    from memagent.engines.local.engine import EngineLoad

Measure = tuple[str, str, float]
"""Name, meaning and value of a metric."""


class Metrics(Collector):
    """What happened since the server started, and how busy it is.

    Each server has its own registry, so that several can run in one process.
    """

    def __init__(
        self,
        gauges: Callable[[], Iterable[Measure]],
        counters: Callable[[], Iterable[Measure]] = tuple,
    ) -> None:
        """`gauges` and further `counters` are read when the metrics are."""
        self._requests: Counter[tuple[str, int]] = Counter()
        self._usage = Usage()
        self._gauges = gauges
        self._counters = counters
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def count_request(self, path: str, status: int) -> None:
        """Count a request and the status of its response."""
        self._requests[path, status] += 1

    def count_tokens(self, usage: Usage) -> None:
        """Count the tokens of completed replies."""
        self._usage += usage

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics and their content type, in the format that an Accept header asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """The metrics, as the registry reads them."""
        requests = CounterMetricFamily(
            "memagent_requests", "Requests by path and status.", labels=("path", "status")
        )
        for (path, status), count in sorted(self._requests.items()):
            requests.add_metric((path, str(status)), count)
        yield requests
        used = self._usage
        for name, text, value in (
            ("replies", "Completed replies.", used.calls),
            ("prompt_tokens", "Tokens of prompts.", used.prompt_tokens),
            ("completion_tokens", "Tokens of replies.", used.completion_tokens),
            (
                "prefix_cache_hit_tokens",
                "Tokens of prompts found in the cache.",
                used.cached_tokens,
            ),
            *self._counters(),
        ):
            yield CounterMetricFamily(f"memagent_{name}", text, value=value)
        for name, text, value in self._gauges():
            yield GaugeMetricFamily(f"memagent_{name}", text, value=value)


def load_gauges(load: EngineLoad) -> list[Measure]:
    """How busy a local engine is."""
    return [
        ("requests_running", "Replies being generated.", load.num_running),
        ("requests_waiting", "Replies waiting for slots.", load.num_waiting),
        ("cache_slots", "Capacity of the cache in tokens.", load.num_slots),
        ("cache_slots_used", "Tokens in the cache, in use or kept.", load.num_used_slots),
    ]

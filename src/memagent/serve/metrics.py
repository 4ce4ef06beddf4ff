"""What a server reports: counters and gauges in Prometheus' formats, and a line for each request; never text.

    127.0.0.1 POST /v1/chat/completions 200, 31 + 10 tokens, 0.42 s, req_5f0c...

Successful requests for /health and /metrics, which monitors send all the time, are no lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.types import Scope

from memagent.types import Usage

if TYPE_CHECKING:  # torch is not needed to count
    from memagent.types import EngineLoad

Measure = tuple[str, str, float]
"""Name, meaning and value of a metric."""
PROBES = ("/health", "/metrics")
MAX_PATH = 200
"""Characters of a path that a line shows; clients choose them."""


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


# --- the lines of requests ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A request that has ended."""

    client: str
    method: str
    path: str
    """As it was sent, percent-encoded."""
    status: int
    seconds: float
    usage: Usage
    """Tokens of the replies that were completed."""
    request_id: str
    """As the client gets it in the header `x-request-id`."""
    is_cut: bool
    """True if the shutdown of the server ended it."""

    @property
    def is_probe(self) -> bool:
        """Whether it is a monitor's request, and succeeded."""
        return self.path in PROBES and self.status == 200

    def __str__(self) -> str:
        path = self.path if len(self.path) <= MAX_PATH else f"{self.path[:MAX_PATH]}..."
        used = self.usage
        tokens = f", {used.prompt_tokens:,} + {used.completion_tokens:,} tokens"
        cut = ", cut off by the shutdown" if self.is_cut else ""
        return (
            f"{self.client} {self.method} {path} {self.status}{tokens if used.calls else ''}, "
            f"{self.seconds:.2f} s, {self.request_id}{cut}"
        )


OnRequest = Callable[[RequestRecord], None]


def path_of(scope: Scope) -> str:
    """The path of a request as it was sent, in visible ASCII."""
    raw = scope.get("raw_path") or scope["path"].encode()
    return "".join(chr(byte) if 32 < byte < 127 else f"%{byte:02X}" for byte in raw)


def client_of(scope: Scope) -> str:
    """The address of the client."""
    client = scope.get("client")
    return str(client[0]) if client else "-"

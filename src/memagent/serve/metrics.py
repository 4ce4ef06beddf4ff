"""Counters of the server, written as Prometheus reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from memagent.engines.local.engine import EngineLoad
from memagent.types import Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """What happened since the server started."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._usage = Usage()

    def count_request(self, path: str, status: int) -> None:
        """A request was answered."""
        self._requests[path, status] += 1

    def count_tokens(self, usage: Usage) -> None:
        """Replies were generated to the end."""
        self._usage += usage

    def render(self, load: EngineLoad) -> str:
        """The page that Prometheus reads."""
        lines = [*self._request_lines(), *self._token_lines(), *_load_lines(load)]
        return "\n".join(lines) + "\n"

    def _request_lines(self) -> Iterator[str]:
        yield from _head("memagent_requests_total", "counter", "Requests by address and status.")
        for (path, status), count in sorted(self._requests.items()):
            yield f'memagent_requests_total{{path="{path}",status="{status}"}} {count}'

    def _token_lines(self) -> Iterator[str]:
        used = self._usage
        yield from _one("replies_total", "counter", "Replies generated to their end.", used.calls)
        yield from _one("prompt_tokens_total", "counter", "Tokens of prompts.", used.prompt_tokens)
        yield from _one(
            "completion_tokens_total", "counter", "Tokens of replies.", used.completion_tokens
        )
        yield from _one(
            "prefix_cache_hit_tokens_total",
            "counter",
            "Tokens of prompts that were in the cache.",
            used.cached_tokens,
        )


def _load_lines(load: EngineLoad) -> Iterator[str]:
    yield from _one("requests_running", "gauge", "Replies being generated.", load.num_running)
    yield from _one("requests_waiting", "gauge", "Replies waiting for room.", load.num_waiting)
    yield from _one("cache_slots", "gauge", "Tokens that the cache can hold.", load.num_slots)
    yield from _one(
        "cache_slots_used", "gauge", "Tokens in the cache, in use or kept.", load.num_used_slots
    )


def _one(name: str, kind: str, text: str, value: int) -> Iterator[str]:
    yield from _head(f"memagent_{name}", kind, text)
    yield f"memagent_{name} {value}"


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"

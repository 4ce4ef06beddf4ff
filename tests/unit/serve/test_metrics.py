"""The page that Prometheus reads."""

from __future__ import annotations

from memagent.engines.local.engine import EngineLoad
from memagent.serve.metrics import Metrics
from memagent.types import Usage

LOAD = EngineLoad(num_running=2, num_waiting=3, num_slots=100, num_used_slots=40)


def values(page: str) -> dict[str, str]:
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    return {name: value for name, _, value in (line.rpartition(" ") for line in lines)}


def test_everything_is_counted() -> None:
    metrics = Metrics()
    metrics.count_request("/health", 200)
    metrics.count_request("/v1/completions", 400)
    metrics.count_request("/health", 200)
    metrics.count_tokens(Usage(calls=1, prompt_tokens=10, completion_tokens=4, cached_tokens=6))
    metrics.count_tokens(Usage(calls=1, prompt_tokens=1, completion_tokens=2))
    assert values(metrics.render(LOAD)) == {
        'memagent_requests_total{path="/health",status="200"}': "2",
        'memagent_requests_total{path="/v1/completions",status="400"}': "1",
        "memagent_replies_total": "2",
        "memagent_prompt_tokens_total": "11",
        "memagent_completion_tokens_total": "6",
        "memagent_prefix_cache_hit_tokens_total": "6",
        "memagent_requests_running": "2",
        "memagent_requests_waiting": "3",
        "memagent_cache_slots": "100",
        "memagent_cache_slots_used": "40",
    }


def test_every_series_has_its_type_and_the_page_ends_with_a_line_break() -> None:
    page = Metrics().render(LOAD)
    assert page.endswith("\n")
    for name in values(page):
        assert f"# TYPE {name} " in page

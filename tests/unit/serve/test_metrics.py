"""The metrics page for Prometheus."""

from memagent.serve.guard import Metrics, load_gauges
from memagent.types import EngineLoad, Usage

LOAD = EngineLoad(num_running=2, num_waiting=3, num_slots=100, num_used_slots=40)


def page(metrics: Metrics) -> str:
    return metrics.render()[0].decode()


def values(page: str) -> dict[str, float]:
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_everything_is_counted() -> None:
    metrics = Metrics(lambda: load_gauges(LOAD))
    metrics.count_request("/health", 200)
    metrics.count_request("/v1/completions", 400)
    metrics.count_request("/health", 200)
    metrics.count_tokens(Usage(calls=1, prompt_tokens=10, completion_tokens=4, cached_tokens=6))
    metrics.count_tokens(Usage(calls=1, prompt_tokens=1, completion_tokens=2))
    assert values(page(metrics)) == {
        'memagent_requests_total{path="/health",status="200"}': 2,
        'memagent_requests_total{path="/v1/completions",status="400"}': 1,
        "memagent_replies_total": 2,
        "memagent_prompt_tokens_total": 11,
        "memagent_completion_tokens_total": 6,
        "memagent_prefix_cache_hit_tokens_total": 6,
        "memagent_requests_running": 2,
        "memagent_requests_waiting": 3,
        "memagent_cache_slots": 100,
        "memagent_cache_slots_used": 40,
    }


def test_servers_in_one_process_count_separately() -> None:
    first, second = Metrics(lambda: load_gauges(LOAD)), Metrics(lambda: load_gauges(LOAD))
    first.count_request("/health", 200)
    assert "/health" in page(first)
    assert "/health" not in page(second)


def test_the_format_follows_the_accept_header() -> None:
    metrics = Metrics(lambda: load_gauges(LOAD))
    assert metrics.render()[1].startswith("text/plain; version=0.0.4")
    text, content_type = metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")

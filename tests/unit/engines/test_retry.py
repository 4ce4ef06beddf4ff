"""Backoff: jittered, bounded, obedient to the server, and over when patience is."""

from email.utils import formatdate

import pytest

from memagent.engines import limit
from memagent.engines.limit import Failure, Patience, retry_after


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(limit.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(limit.time, "time", lambda: now[0])
    return now


def delays(kind: str, seconds: float, clock: list[float], *, answered: bool = True) -> list[float]:
    patience = Patience(seconds)
    failure = Failure(kind=kind, reason="x")  # type: ignore[arg-type]
    found = []
    while (delay := patience.delay(failure, has_answered=answered)) is not None:
        found.append(delay)
        clock[0] += delay
    return found


def test_delays_double_with_jitter_up_to_a_longest_one(clock: list[float]) -> None:
    found = delays("failed", 60, clock)
    for number, delay in enumerate(found):
        full = min(5.0, 0.25 * 2**number)
        assert 0.5 * full <= delay <= full


def test_an_endpoint_that_is_down_is_tried_again_every_two_seconds_at_least(
    clock: list[float],
) -> None:
    found = delays("unreachable", 60, clock)
    assert max(found) <= 2.0
    assert 55 <= sum(found) <= 60


def test_an_address_that_never_answered_is_retried_for_a_shorter_time(clock: list[float]) -> None:
    assert sum(delays("unreachable", 600, clock, answered=False)) <= 20
    assert sum(delays("failed", 600, clock, answered=False)) > 500


def test_an_answer_to_another_call_ends_the_shorter_time(clock: list[float]) -> None:
    patience = Patience(600)
    gone = Failure(kind="unreachable", reason="x")
    patience.delay(gone, has_answered=False)
    clock[0] += 30
    assert patience.delay(gone, has_answered=True) is not None
    assert patience.delay(gone, has_answered=False) is None


def test_the_servers_word_comes_before_our_own(clock: list[float]) -> None:
    patience = Patience(60)
    delay = patience.delay(Failure(kind="busy", reason="x", retry_after=7), has_answered=True)
    assert delay is not None
    assert 7 <= delay <= 7.7


def test_a_server_that_asks_for_short_waits_is_asked_once_a_second_in_the_end(
    clock: list[float],
) -> None:
    patience = Patience(60)
    failure = Failure(kind="busy", reason="x", retry_after=0.25)
    found = [patience.delay(failure, has_answered=True) for _ in range(5)]
    for delay, floor in zip(found, (0.25, 0.5, 1.0, 1.0, 1.0), strict=True):
        assert delay is not None
        assert floor <= delay <= floor * 1.1


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "-3"}, 0.25),
        ({"retry-after-ms": "250"}, 0.25),
        ({"retry-after": "soon"}, None),
        ({"retry-after": formatdate(1030.0, usegmt=True)}, 30.0),
        ({"retry-after": formatdate(10.0, usegmt=True)}, 0.25),
    ],
)
def test_retry_after_is_seconds_or_a_date(
    headers: dict[str, str], seconds: float | None, clock: list[float]
) -> None:
    assert retry_after(headers) == seconds

"""Limits: reached, never passed."""

import pytest

from memagent.agent.model_call import Limits
from memagent.errors import ConfigError, LimitReached
from memagent.types import Prices, Usage

PRICES = Prices(prompt=1_000_000, completion=2_000_000)  # one per prompt token, two per completion


def test_calls_stop_at_the_limit() -> None:
    limits = Limits(max_calls=2)
    limits.reserve(prompt_tokens=1, completion_tokens=1)
    limits.reserve(prompt_tokens=1, completion_tokens=1)
    with pytest.raises(LimitReached, match="stopped after 2 calls"):
        limits.reserve(prompt_tokens=1, completion_tokens=1)


def test_one_call_is_not_calls() -> None:
    limits = Limits(max_calls=1)
    limits.reserve(prompt_tokens=1, completion_tokens=1)
    with pytest.raises(LimitReached, match="stopped after 1 call: "):
        limits.reserve(prompt_tokens=1, completion_tokens=1)


def test_a_call_that_could_pass_the_cost_does_not_leave() -> None:
    limits = Limits(max_cost=100, prices=PRICES)
    first = limits.reserve(prompt_tokens=40, completion_tokens=20)
    assert limits.cost == 80
    with pytest.raises(LimitReached):
        limits.reserve(prompt_tokens=10, completion_tokens=6)
    limits.settle(first, Usage(calls=1, prompt_tokens=40, completion_tokens=1))
    assert limits.cost == 42
    limits.reserve(prompt_tokens=10, completion_tokens=6)


def test_a_failed_call_gives_its_room_back() -> None:
    limits = Limits(max_calls=1, max_cost=100, prices=PRICES)
    limits.release(limits.reserve(prompt_tokens=40, completion_tokens=20))
    assert (limits.num_calls, limits.cost) == (0, 0)


def test_what_was_used_before_counts() -> None:
    limits = Limits(max_calls=3, max_cost=10, prices=PRICES)
    limits.count(Usage(calls=3, prompt_tokens=4, completion_tokens=1))
    assert limits.cost == 6
    with pytest.raises(LimitReached):
        limits.reserve(prompt_tokens=0, completion_tokens=0)


def test_a_cost_limit_needs_prices() -> None:
    with pytest.raises(ConfigError, match="`price_in`"):
        Limits(max_cost=1)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e308, -1.0])
def test_limits_and_prices_are_sensible_numbers(number: float) -> None:
    with pytest.raises(ConfigError, match=r"`max_cost=.*` must be a finite number"):
        Limits(max_cost=number, prices=PRICES)
    with pytest.raises(ConfigError, match=r"`max_calls=.*`"):
        Limits(max_calls=number)  # type: ignore[arg-type]
    for name, prices in (
        ("price_in", Prices(prompt=number, completion=1.0)),
        ("price_out", Prices(prompt=1.0, completion=number)),
    ):
        with pytest.raises(ConfigError, match=rf"`{name}=.*` must be a finite number"):
            Limits(max_cost=1.0, prices=prices)

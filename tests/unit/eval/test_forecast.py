"""Time left of an evaluation: from calls as they are answered, not from whole items."""

import pytest

from memagent.agent.work import Work
from memagent.eval.calls import CallDone
from memagent.eval.forecast import EvalForecast, Remaining
from memagent.eval.items import EvalPlan, Item, ItemSource
from tests.support.eval_runs import item as record_of

TOKENS = 40_000
CALLS = 10


def forecast_of(num: int, **tokens: float) -> EvalForecast:
    """So many items of one task; each method's prompt tokens for one of them."""
    items = tuple(
        Item(
            source=ItemSource(task="t"),
            position=index,
            task="t",
            target_tokens=TOKENS,
            index=index,
            num_tokens=TOKENS,
        )
        for index in range(num)
    )
    works = {
        method: {("t", TOKENS): Work(num_calls=CALLS, prompt_tokens=value)}
        for method, value in tokens.items()
    }
    plan = EvalPlan(items=items, files={}, tokenizers=())
    return EvalForecast(plan=plan, samples=1, works=works)


def call(method: str, prompt_tokens: int, seconds: float, in_flight: int = 1) -> CallDone:
    return CallDone(method, prompt_tokens, seconds, in_flight)


def test_calls_in_flight_together_count_before_an_item_is_finished() -> None:
    """64 items of 10 calls of a second, 16 at once, take 40 s; by finished items it looked like 640 s."""
    remaining = Remaining(forecast_of(64, reader=TOKENS))
    assert remaining.seconds(0.5) is None
    for _ in range(16):
        remaining.call(call("reader", TOKENS // CALLS, 1.0))
    assert remaining.seconds(1.0) == pytest.approx(39.0)
    for _ in range(9 * 16):
        remaining.call(call("reader", TOKENS // CALLS, 1.0))
    remaining.finish(record_of("t", "reader", TOKENS, 0, prompt_tokens=TOKENS))
    assert remaining.seconds(10.0) == pytest.approx(30.0)


def test_the_first_of_many_calls_in_flight_does_not_count_as_the_only_one() -> None:
    """Of eight calls that are computed together, the first is finished after 80 s: 8 items of one call each."""
    remaining = Remaining(forecast_of(8, direct=8000))
    remaining.call(call("direct", 8000, 80.0, in_flight=8))
    assert remaining.seconds(80.0) == pytest.approx(70.0)  # by finished calls alone: 560 s


def test_each_method_has_its_own_speed() -> None:
    """A direct call of 8,000 tokens takes 0.1 s, ten calls of the reader 10 s: 4 items, one at a time."""
    remaining = Remaining(forecast_of(4, reader=TOKENS, direct=8000))
    remaining.call(call("direct", 8000, 0.1))
    for _ in range(CALLS):
        remaining.call(call("reader", TOKENS // CALLS, 1.0))
    assert remaining.seconds(10.1) == pytest.approx(3 * 10.1)


def test_what_a_finished_item_used_beyond_the_forecast_is_not_taken_from_the_others() -> None:
    remaining = Remaining(forecast_of(10, reader=TOKENS))
    for _ in range(20):
        remaining.call(call("reader", TOKENS // CALLS, 1.0))
    remaining.finish(record_of("t", "reader", TOKENS, 0, prompt_tokens=2 * TOKENS))
    assert remaining.seconds(20.0) == pytest.approx(90.0)


def test_items_of_before_are_left_out_and_an_unknown_forecast_gives_no_time() -> None:
    remaining = Remaining(forecast_of(4, reader=TOKENS))
    for index in range(2):
        remaining.finish(record_of("t", "reader", TOKENS, index))
    remaining.finish(record_of("t", "reader", TOKENS, 99))  # not planned
    remaining.finish(record_of("another", "reader", TOKENS, 0))
    for _ in range(CALLS):
        remaining.call(call("reader", TOKENS // CALLS, 1.0))
    assert remaining.seconds(10.0) == pytest.approx(10.0)
    assert (remaining.num_calls, remaining.call_seconds) == (CALLS, 10.0)
    unknown = Remaining(None)
    unknown.call(call("reader", 10, 1.0))
    unknown.finish(record_of("t", "reader", TOKENS, 0))
    assert unknown.seconds(1.0) is None

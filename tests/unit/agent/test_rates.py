"""Rates of calls: fitted to what a run measured, kept for the next estimate."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from memagent.agent import rates
from memagent.agent.plan import ReadingPlan
from memagent.agent.rates import CallRate, CallTimes, Work, measure
from memagent.documents.tokenizers import ByteTokenizer
from memagent.engines.scripted import ScriptedEngine
from memagent.errors import EngineError
from memagent.types import Message, Sampling


def fitted(seconds: Callable[[int, int], float], *, parallel: float = 1.0) -> CallRate:
    """The rate of 60 calls that took so long."""
    rng, times = random.Random(4), CallTimes()
    for _ in range(60):
        prompt, reply = rng.randint(400, 6000), rng.randint(5, 500)
        times.add(
            prompt_tokens=prompt,
            completion_tokens=reply,
            limit=1000,
            seconds=seconds(prompt, reply),
        )
    rate = times.rate(wall_seconds=times.seconds / parallel)
    assert rate is not None
    return rate


@pytest.mark.parametrize(
    ("per_call", "per_prompt", "per_reply"),
    [(0.05, 0, 0), (0, 0.0005, 0.02), (0.3, 0.0005, 0.02), (0, 0.001, 0), (0.1, 0, 0.03)],
)
def test_what_a_call_takes_is_found_whatever_it_depends_on(
    per_call: float, per_prompt: float, per_reply: float
) -> None:
    rate = fitted(lambda prompt, reply: per_call + per_prompt * prompt + per_reply * reply)
    found = (rate.per_call, rate.per_prompt_token, rate.per_reply_token)
    assert found == pytest.approx((per_call, per_prompt, per_reply), abs=1e-9)


def test_no_part_is_negative_and_all_calls_together_are_met_under_noise() -> None:
    rng = random.Random(5)
    for _ in range(30):
        times = CallTimes()
        calls = [(rng.randint(1, 9000), rng.randint(0, 900), rng.random()) for _ in range(8)]
        for prompt, reply, seconds in calls:
            times.add(prompt_tokens=prompt, completion_tokens=reply, limit=1000, seconds=seconds)
        rate = times.rate(wall_seconds=1.0)
        assert rate is not None
        assert min(rate.per_call, rate.per_prompt_token, rate.per_reply_token) >= 0
        again = rate.call_seconds(
            num_calls=8,
            prompt_tokens=sum(call[0] for call in calls),
            completion_tokens=sum(call[1] for call in calls),
        )
        assert again == pytest.approx(sum(call[2] for call in calls))


def test_equal_calls_are_extrapolated_by_their_tokens() -> None:
    times = CallTimes()
    for _ in range(3):
        times.add(prompt_tokens=1000, completion_tokens=10, limit=100, seconds=2.0)
    rate = times.rate(wall_seconds=6.0)
    assert rate is not None
    assert rate.call_seconds(num_calls=1, prompt_tokens=5000, completion_tokens=50) == 10.0
    assert CallTimes().rate(wall_seconds=1.0) is None


def test_merged_times_are_those_of_all_calls() -> None:
    whole, one, other = CallTimes(), CallTimes(), CallTimes()
    for number in range(8):
        for times in (whole, one if number % 2 else other):
            times.add(
                prompt_tokens=100 * number, completion_tokens=number, limit=9, seconds=0.1 * number
            )
    one.merge(other)
    assert one.rate(wall_seconds=2.0) == whole.rate(wall_seconds=2.0)


def test_an_estimate_divides_by_calls_at_once_and_uses_the_length_of_replies() -> None:
    rate = fitted(lambda prompt, reply: prompt / 1000 + reply / 10, parallel=4.0)
    work = Work(num_calls=10, prompt_tokens=8000, max_completion_tokens=1000)
    share = rate.reply_share
    assert share is not None
    assert 0.2 < share < 0.3
    expected = 8 + 1000 * share / 10
    assert work.seconds(rate) == pytest.approx((expected / 4, expected / 4))
    assert work.seconds(rate, lanes=2) == pytest.approx((expected / 2, expected / 2))


async def test_a_model_in_this_process_is_measured_by_two_short_calls() -> None:
    asked: list[tuple[int, int]] = []

    def reply(messages: Sequence[Message], sampling: Sampling) -> str:
        asked.append((len(messages[0]["content"]), sampling.max_tokens))
        return "x"

    rate = await measure(ScriptedEngine(reply), ByteTokenizer(), prompt_tokens=9000)
    assert rate is not None
    assert [limit for _, limit in asked] == [1, rates.PROBE_REPLY]
    assert all(500 <= num <= 520 for num, _ in asked)
    work = Work(num_calls=1, prompt_tokens=100, max_completion_tokens=50)
    low, high = work.seconds(rate)
    assert 0 < low < high

    def fail(messages: Sequence[Message], sampling: Sampling) -> str:
        raise EngineError("no")

    assert await measure(ScriptedEngine(fail), ByteTokenizer(), prompt_tokens=9) is None


def test_rates_are_kept_by_model_and_a_damaged_file_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    one, other = ScriptedEngine(["x"], model="one"), ScriptedEngine(["x"], model="other")
    rate = fitted(lambda prompt, reply: 1.0)
    assert rates.recall(one) is None
    rates.remember(one, rate)
    rates.remember(other, None)
    assert (rates.recall(one), rates.recall(other)) == (rate, None)
    file = tmp_path / "memagent" / "rates.json"
    for damaged in (b"{", b"[]", b'{"ScriptedEngine one": {"per_call": 1}}', b"\xff"):
        file.write_bytes(damaged)
        assert rates.recall(one) is None
    rates.remember(one, rate)
    assert rates.recall(one) == rate


def test_a_reading_in_this_process_takes_as_long_as_its_tokens_whatever_was_in_flight() -> None:
    plan = ReadingPlan(
        num_questions=2,
        num_chunks=4,
        num_calls=10,
        max_calls=10,
        calls_at_once=2,
        prompt_tokens=8000,
        max_memory_tokens=0,
        max_completion_tokens=0,
        is_exact=True,
    )
    rate = fitted(lambda prompt, reply: prompt / 100, parallel=8.0)  # eight calls slowed each other
    assert plan.seconds(rate, is_shared=True) == pytest.approx((10.0, 10.0))
    assert plan.seconds(rate) == pytest.approx((40.0, 40.0))  # two questions at once

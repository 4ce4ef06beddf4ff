"""Planned work: its cost, and its time at the speed of the last run."""

from pathlib import Path

import pytest

from memagent.agent.work import ReadingPlan, Speed, Work, recall, remember
from memagent.engines.scripted import ScriptedEngine
from memagent.types import Prices


def test_cost_lies_between_empty_replies_and_replies_at_their_limit() -> None:
    work = Work(num_calls=2, prompt_tokens=1000, max_memory_tokens=500, max_completion_tokens=100)
    assert work.cost(Prices(prompt=2e6, completion=1e6)) == (2000.0, 3100.0)
    assert (work + work).cost(Prices(prompt=1e6, completion=0.0)) == (2000.0, 3000.0)
    assert work * 3 == work + work + work


def test_the_speed_of_a_run_is_kept_by_model_and_a_damaged_file_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    one, other = ScriptedEngine(["x"], model="one"), ScriptedEngine(["x"], model="other")
    assert recall(one) is None
    remember(one, prompt_tokens=1000, call_seconds=20.0, seconds=5.0)
    remember(other, prompt_tokens=0, call_seconds=0.0, seconds=1.0)
    assert (recall(one), recall(other)) == (Speed(0.02, 0.005), None)
    file = tmp_path / "memagent" / "rates.json"
    for damaged in (b"{", b"[]", b'{"ScriptedEngine one": [1.0, "x"]}', b"\xff"):
        file.write_bytes(damaged)
        assert recall(one) is None
    remember(one, prompt_tokens=1000, call_seconds=10.0, seconds=5.0)
    assert recall(one) == Speed(0.01, 0.005)


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
    speed = Speed(of_calls=0.01, of_run=0.00125)  # eight calls slowed each other
    assert plan.seconds(speed) == pytest.approx(10.0)
    assert plan.seconds(speed, lanes=plan.calls_at_once) == pytest.approx(
        40.0
    )  # two questions at once

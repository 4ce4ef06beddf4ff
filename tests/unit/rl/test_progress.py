"""Names of checkpoints, and the time that is left."""

import pytest

from memagent.errors import ConfigError
from memagent.rl import trainer as progress
from memagent.rl.trainer import Pace, TimeLimit, TrainProgress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress, "perf_counter", lambda: now[0])
    return now


def test_a_checkpoint_has_the_number_of_its_step() -> None:
    assert TrainProgress(warm_step=140).checkpoint == "warm-000140"
    assert TrainProgress(warm_step=140, step=7).checkpoint == "step-000007"


def test_the_time_left_follows_the_last_steps(clock: list[float]) -> None:
    pace = Pace()
    for seconds in (10.0, 20.0):
        clock[0] += seconds
        pace.step()
    assert pace.seconds_for(4) == 60.0
    for _ in range(progress.PACE_STEPS):
        clock[0] += 2.0
        pace.step()
    assert pace.seconds_for(4) == 8.0


def test_no_more_time_is_left_than_the_limit_leaves(clock: list[float]) -> None:
    limit = TimeLimit(2.0)
    clock[0] += 90.0
    assert limit.limited(1000.0) == 30.0
    assert limit.limited(10.0) == 10.0
    clock[0] += 90.0
    assert limit.limited(1000.0) == 0.0
    assert TimeLimit(None).limited(1000.0) == 1000.0


@pytest.mark.parametrize("minutes", [float("nan"), float("inf"), -1.0])
def test_a_time_limit_is_a_sensible_number(minutes: float) -> None:
    with pytest.raises(ConfigError, match=r"`max_minutes=.*` must be a finite number"):
        TimeLimit(minutes)

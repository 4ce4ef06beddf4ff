"""Lines of a training run on the console."""

import pytest

from memagent.cli.shared import progress
from memagent.cli.shared.console import CommandConsole
from memagent.cli.train.progress import TrainConsole
from memagent.rl.rollouts.collect import RolloutStats
from memagent.types import Usage


def lines(capsys: pytest.CaptureFixture[str], kind: str, **metrics: float) -> str:
    with TrainConsole(CommandConsole(is_quiet=False)) as console:
        console.on_step(kind, 3, {"time/step": 1.0, **metrics})
    return capsys.readouterr().err


def test_a_step_always_shows_the_count_of_failures(capsys: pytest.CaptureFixture[str]) -> None:
    assert "failed 0" in lines(capsys, "train", reward=0.5, num_failed=0, num_failed_policy=0)
    shown = lines(capsys, "train", reward=0.5, num_failed=5, num_failed_policy=4)
    assert "failed 5  by the policy 4" in shown


def test_a_validation_always_shows_the_count_of_failures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    numbers = {"reward": 0.5, "reward_low": 0.4, "reward_high": 0.6, "num_attempts": 64}
    assert lines(capsys, "validation", num_failed=0, **numbers).rstrip().endswith("failed 0 of 64")
    assert lines(capsys, "validation", num_failed=3, **numbers).rstrip().endswith("failed 3 of 64")


def test_a_step_shows_the_time_left_until_the_last_one(capsys: pytest.CaptureFixture[str]) -> None:
    with TrainConsole(CommandConsole(is_quiet=False)) as console:
        console.on_phase("train", num_done=0, num_steps=4)
        for step, left in ((3, 7500.0), (4, 0.0)):
            console.on_step("train", step, {"time/step": 30.0, "time/left": left, "reward": 0.5})
    before, last = capsys.readouterr().err.splitlines()
    assert before.endswith("30 s  left 2 h 5 min")
    assert last.endswith("30 s")


@pytest.mark.parametrize(
    ("num_rollouts", "line"), [(1, "1 of 64 rollouts"), (32, "32 of 64 rollouts, 30 tokens/s")]
)
def test_no_speed_is_shown_while_nearly_all_rollouts_are_under_way(
    num_rollouts: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    usage = Usage(calls=1, prompt_tokens=5, completion_tokens=60)
    stats = RolloutStats(num_rollouts=num_rollouts, usage=usage, seconds=2.0)
    with TrainConsole(CommandConsole(is_quiet=False)) as console:
        console.on_rollout(stats, num_wanted=64)
    assert line in capsys.readouterr().err.splitlines()

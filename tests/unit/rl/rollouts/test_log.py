"""Finished rollouts on disk: each alone, or in waves; a torn line or wave does not count."""

from __future__ import annotations

from pathlib import Path

from memagent.rl.rollouts.log import RolloutLog, forget_rollouts
from memagent.rl.types import Rollout, Sample


def rollout(task: str, index: int) -> Rollout:
    sample = Sample(
        ids=(1, 2, 3),
        is_sampled=(False, True, True),
        logprobs=(0.0, -0.1, -1 / 3),
        policy_version=2,
    )
    return Rollout(task_id=task, index=index, samples=(sample,), reward=0.5, metrics={"calls": 1.0})


def path_of(run: Path) -> Path:
    return next((run / "rollouts").iterdir())


def test_rollouts_come_back_as_they_were(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, 7)
    assert log.finished == []
    for index in range(3):
        log.add(rollout("a", index))
    assert RolloutLog(tmp_path, 7).finished == [rollout("a", index) for index in range(3)]
    assert RolloutLog(tmp_path, 8).finished == []


def test_a_torn_line_does_not_count(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, 7)
    log.add(rollout("a", 0))
    log.add(rollout("a", 1))
    path = path_of(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    again = RolloutLog(tmp_path, 7)
    assert again.finished == [rollout("a", 0)]
    again.add(rollout("a", 1))
    assert len(RolloutLog(tmp_path, 7).finished) == 2


def test_a_torn_wave_does_not_count_and_is_replaced(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, 1)
    log.add_wave([rollout("a", 0), rollout("a", 1)])
    log.add_wave([rollout("b", 0), rollout("b", 1)])
    path = path_of(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]))  # the second wave lacks a rollout and its end
    again = RolloutLog(tmp_path, 1)
    assert again.waves == [[rollout("a", 0), rollout("a", 1)]]
    again.add_wave([rollout("b", 0), rollout("b", 1)])
    assert path.read_bytes() == b"".join(lines)
    assert again.waves[0] == [rollout("a", 0), rollout("a", 1)]


def test_what_was_learnt_from_is_forgotten(tmp_path: Path) -> None:
    for step in (3, 4, 5):
        RolloutLog(tmp_path, step).add(rollout("a", 0))
    forget_rollouts(tmp_path, until=4)
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step-000005.jsonl"]

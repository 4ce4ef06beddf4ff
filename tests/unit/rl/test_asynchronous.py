"""Asynchronous training: the steps of the synchronous one where nothing may be stale, and bounds elsewhere."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from memagent.errors import ConfigError
from memagent.rl.settings import parse_config
from memagent.rl.trainer import TrainingCallbacks, open_training, resume_training
from memagent.runs import MANIFEST
from memagent.tracking import comparable, read_metrics
from tests.support.tiny_training import tiny_run

STEPS = 6


def config_of(folder: Path, *, max_staleness: int = 0, **rollout: Any) -> dict[str, Any]:
    """An adapter, so that the engine has its own copy of the weights."""
    values = tiny_run(folder, steps=STEPS, warm_start=None, validation=None)
    values["model"]["lora_rank"] = 4
    values["rollout"] = {"prompts": 3, "group_size": 4, "merged": True, **rollout}
    values["objective"] = {"max_staleness": max_staleness}
    values["logging"]["rollouts"] = 1000
    return values


class Stop(TrainingCallbacks):
    """Cancels the run at a step, in the middle of what follows."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        if step == self._step:
            current = asyncio.current_task()
            assert current is not None
            asyncio.get_running_loop().call_later(0.15, current.cancel)


def train(values: dict[str, Any], run: Path, callbacks: TrainingCallbacks | None = None) -> None:
    async def once() -> None:
        if (run / MANIFEST).exists():
            opened = resume_training(run, callbacks=callbacks)
        else:
            opened = open_training(parse_config(values), run, callbacks=callbacks)
        async with opened as trainer:
            await trainer.train()

    asyncio.run(once())


def tasks_by_step(run: Path) -> dict[int, set[str]]:
    return {
        int(path.stem.removeprefix("step-")): {
            json.loads(line)["task_id"] for line in path.read_bytes().splitlines()
        }
        for path in sorted((run / "samples").glob("step-*.jsonl"))
    }


def test_without_staleness_the_metrics_are_those_of_the_synchronous_run(tmp_path: Path) -> None:
    """One rollout at a time, so that the engine's batches do not depend on timing."""
    for name in ("synchronous", "asynchronous"):
        values = config_of(tmp_path, concurrency=1, asynchronous=name == "asynchronous")
        values["rollout"] |= {"prompts": 2, "group_size": 2}
        values["objective"]["dynamic_sampling"] = True
        values["steps"] = 3
        train(values, tmp_path / name)
    first, second = (
        [comparable(record) for record in read_metrics(tmp_path / name)]
        for name in ("synchronous", "asynchronous")
    )
    assert len(first) == 3
    assert first == second
    assert {record["staleness_max"] for record in first} == {0.0}


def test_a_run_that_is_interrupted_trains_on_every_task_once_and_on_nothing_too_old(
    tmp_path: Path,
) -> None:
    values = config_of(tmp_path, max_staleness=2, asynchronous=True)
    with pytest.raises(asyncio.CancelledError):
        train(values, tmp_path / "run", Stop(3))
    train(values, tmp_path / "run")
    records = read_metrics(tmp_path / "run")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert all(record["staleness_max"] <= 2 for record in records)
    assert max(record["staleness_max"] for record in records) > 0, "rollouts were ahead"
    assert {record["num_groups"] for record in records} == {3.0}
    taken = Counter(task for tasks in tasks_by_step(tmp_path / "run").values() for task in tasks)
    assert len(taken) == 3 * STEPS
    assert set(taken.values()) == {1}
    drawn = sorted(int(task.rpartition("/")[2]) for task in taken)
    assert drawn == list(range(3 * STEPS)), "no task was left out"
    assert not list((tmp_path / "run" / "rollouts").iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": {}}, "set `objective.max_staleness`"),
        (
            {"rollout": {"asynchronous": True, "driver": "lockstep"}},
            'needs `rollout.driver="free"`',
        ),
        ({"rollout": {"asynchronous": True, "merged": False}}, "its own copy of the weights"),
        (
            {"rollout": {"asynchronous": True, "engine": "openai:m", "sync": "none"}},
            'remove `rollout.sync="none"`',
        ),
    ],
)
def test_what_asynchronous_training_needs_is_said(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    values = config_of(tmp_path, max_staleness=1, asynchronous=True)
    with pytest.raises(ConfigError, match=message):
        parse_config({**values, **changes})

"""Training runs on a cluster, and how close their metrics are to those of one process."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from memagent.rl.settings import parse_config
from memagent.rl.trainer import Trainer, TrainingCallbacks, open_training, resume_training
from memagent.runs import MANIFEST
from memagent.tracking import comparable, read_metrics

TOLERANCE = 1e-4
"""Relative difference of metrics: ranks add up in another order than one process, in float32."""
NOISE = 1e-6
"""Of log-probabilities in float32: the difference of two may be as small."""
EXACT = ("reward", "best_reward", "pass_at_1", "signal", "num_groups", "rows", "sampled_tokens")

OnTrainStep = Callable[[Trainer, int], None]


class Watch(TrainingCallbacks):
    """Keeps notes, and calls a function after each step of reinforcement learning."""

    def __init__(self, on_train_step: OnTrainStep | None = None) -> None:
        self.notes: list[str] = []
        self.steps: list[int] = []
        self.trainer: Trainer | None = None
        self._on_train_step = on_train_step

    def on_note(self, text: str) -> None:
        self.notes.append(text)

    def on_step(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        if kind != "train":
            return
        self.steps.append(step)
        if self._on_train_step is not None:
            assert self.trainer is not None
            self._on_train_step(self.trainer, step)


def train(
    config: dict[str, Any],
    folder: Path,
    on_train_step: OnTrainStep | None = None,
    *,
    changes: Sequence[str] = (),
) -> Watch:
    """Start or resume a run, to its end or to its cancellation."""
    watch = Watch(on_train_step)

    async def run() -> None:
        if (folder / MANIFEST).exists():
            opened = resume_training(folder, changes=changes, callbacks=watch)
        else:
            opened = open_training(parse_config(config), folder, callbacks=watch)
        async with opened as trainer:
            watch.trainer = trainer
            await trainer.train()

    async def cancellable() -> None:
        task = asyncio.create_task(run(), name="the run")
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    asyncio.run(cancellable())
    return watch


def cancel(trainer: Trainer, step: int) -> None:
    """Cancel the run, from inside it."""
    next(task for task in asyncio.all_tasks() if task.get_name() == "the run").cancel()


def assert_same_training(folder: Path, expected: Path, *, tolerance: float = TOLERANCE) -> None:
    """Whether a run has the steps, the rewards and the metrics of another."""
    ours, theirs = ([comparable(one) for one in read_metrics(run)] for run in (folder, expected))
    assert [(one["kind"], one["step"]) for one in ours] == [
        (one["kind"], one["step"]) for one in theirs
    ]
    for our, their in zip(ours, theirs, strict=True):
        assert our.keys() == their.keys()
        exact = {name: their[name] for name in EXACT if name in their}
        assert {name: our[name] for name in exact} == exact, our["step"]
        numbers = [name for name in their if name != "kind"]
        assert {name: our[name] for name in numbers} == pytest.approx(
            {name: their[name] for name in numbers}, rel=tolerance, abs=NOISE
        )

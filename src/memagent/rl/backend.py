"""What the training loop needs of the processes that train; there is one loop, with two backends.

    Trainer ──▶ LocalBackend ──▶ Learner                                 this process
            └─▶ RankGroup    ──▶ Learner, Learner, ...  on a Ray cluster (rl/distributed)

    backend.facts                                   what is trained
    await backend.load(checkpoint, with_optimizer=True)
    await backend.begin(config.optim, num_steps=60)
    await backend.keep_reference(path)              for the KL term
    await backend.update(groups, policy_version=12)
    await backend.weights()                         to publish
    await backend.save(folder)
    await backend.restart()                         after `RanksLost`; then load again

A call is finished before the next one is made. Calls that change the weights are never left half done: a
cancellation takes effect after them.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from memagent.errors import ClusterError
from memagent.rl.settings import OptimSettings
from memagent.rl.types import Group
from memagent.rl.update.learner import Learner
from memagent.rl.update.packing import Pack
from memagent.rl.update.rows import TrainingRow
from memagent.rl.weights.models import Trained

Metrics = dict[str, float]
T = TypeVar("T")


class RanksLost(ClusterError):
    """A trainer rank has ended. The others are of no use without it; `restart` replaces all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What is trained, and where."""

    num_parameters: int
    num_trained: int
    has_adapter: bool
    vocabulary: int
    """Number of tokens that have an embedding."""
    device: str
    """Where the weights are, such as cpu, or 2 ranks on cuda."""

    @classmethod
    def of(cls, trained: Trained, *, device: str | None = None) -> Self:
        return cls(
            num_parameters=trained.num_parameters,
            num_trained=trained.num_trained,
            has_adapter=trained.has_adapter,
            vocabulary=trained.model.get_input_embeddings().num_embeddings,
            device=device or str(trained.model.device),
        )


class TrainerBackend(ABC):
    """The processes that train: their model, optimizer and reference. A call is made on the `Learner` of each."""

    facts: ModelFacts
    """What is trained, and where."""

    @abstractmethod
    async def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Make a call on all learners; the result of the first one."""

    async def load(self, checkpoint: Path, *, with_optimizer: bool) -> None:
        """Take the weights of a checkpoint, and for the next `begin` the state of its optimizer."""
        await self._call("load", checkpoint, with_optimizer=with_optimizer)

    async def begin(self, settings: OptimSettings, *, num_steps: int) -> int:
        """Start or continue a phase with its own optimizer; the position in its learning-rate schedule."""
        return int(await self._call("begin", settings, num_steps=num_steps))

    async def end(self) -> None:
        """End a phase."""
        await self._call("end")

    async def keep_reference(self, path: Path) -> None:
        """Keep the values in a file, or if there is none today's, as the reference of the KL term."""
        await self._call("keep_reference", path)

    async def fit(self, rows: Sequence[TrainingRow], *, min_schedule_step: int = 0) -> Metrics:
        """A step of supervised fine-tuning."""
        metrics: Metrics = await self._call("fit", rows, min_schedule_step=min_schedule_step)
        return metrics

    async def update(self, groups: Sequence[Group], *, policy_version: int) -> Metrics:
        """A step of reinforcement learning; `policy_version` is that of the weights before it."""
        metrics: Metrics = await self._call("update", groups, policy_version=policy_version)
        return metrics

    async def score(self, packs: Sequence[Pack]) -> list[list[float]]:
        """Log-probabilities of the targets of packs."""
        scores: list[list[float]] = await self._call("score", packs)
        return scores

    async def weights(self) -> Mapping[str, torch.Tensor]:
        """The whole trainable parameters by name, to give to engines; in this process the parameters themselves."""
        found: Mapping[str, torch.Tensor] = await self._call("weights")
        return found

    async def save(self, folder: Path) -> None:
        """Write weights and optimizer into the folder of a new checkpoint."""
        await self._call("save", folder)

    async def restart(self) -> None:
        """Replace processes that were lost. The weights are those of the start until `load`."""
        raise NotImplementedError("this process is never lost")


class LocalBackend(TrainerBackend):
    """Training in this process. The engine may run on the same parameters."""

    def __init__(self, learner: Learner, *, in_thread: bool = False) -> None:
        """`in_thread` lets the event loop go on during updates, for rollouts that do not wait for them."""
        self.learner = learner
        self.facts = ModelFacts.of(learner.trained)
        self._in_thread = in_thread

    async def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        work = partial(getattr(self.learner, method), *arguments, **options)
        if self._in_thread and method == "update":
            return await to_its_end(asyncio.to_thread(work))
        return work()


async def to_its_end(work: Awaitable[T]) -> T:
    """Await work that cannot be interrupted; a cancellation takes effect afterwards."""
    running = asyncio.ensure_future(work)
    is_cancelled = False
    while not running.done():
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            is_cancelled = True
    current = asyncio.current_task()
    if is_cancelled and current is not None:
        current.cancel()  # at its next await
    return running.result()

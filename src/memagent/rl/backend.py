"""What the training loop needs of the processes that train; there is one loop, with two backends.

    Trainer ──▶ LocalBackend ──▶ Learner                                 this process
            └─▶ RankGroup    ──▶ Learner, Learner, ...  on a Ray cluster (rl/distributed)

    backend.facts                                   what is trained
    await backend.load(checkpoint, with_optimizer=True)
    await backend.begin(config.optim, num_steps=60, num_done=0)
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
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, TypeVar

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
    """Of the weights, such as cpu, or 2 ranks on cuda."""

    @classmethod
    def of(cls, trained: Trained, *, device: str | None = None) -> Self:
        return cls(
            num_parameters=trained.num_parameters,
            num_trained=trained.num_trained,
            has_adapter=trained.has_adapter,
            vocabulary=trained.model.get_input_embeddings().num_embeddings,
            device=device or str(trained.model.device),
        )


class TrainerBackend(Protocol):
    """The processes that train: their model, optimizer and reference."""

    @property
    def facts(self) -> ModelFacts:
        """What is trained, and where."""
        ...

    async def load(self, checkpoint: Path, *, with_optimizer: bool) -> None:
        """Take the weights of a checkpoint, and for the next `begin` the state of its optimizer."""
        ...

    async def begin(self, settings: OptimSettings, *, num_steps: int, num_done: int) -> int:
        """Start or continue a phase with its own optimizer; the position in its learning-rate schedule."""
        ...

    async def end(self) -> None:
        """End a phase."""
        ...

    async def keep_reference(self, path: Path) -> None:
        """Keep the values in a file, or if there is none today's, as the reference of the KL term."""
        ...

    async def fit(self, rows: Sequence[TrainingRow], *, min_schedule_step: int = 0) -> Metrics:
        """A step of supervised fine-tuning."""
        ...

    async def update(self, groups: Sequence[Group], *, policy_version: int) -> Metrics:
        """A step of reinforcement learning; `policy_version` is that of the weights before it."""
        ...

    async def score(self, packs: Sequence[Pack]) -> list[list[float]]:
        """Log-probabilities of the targets of packs."""
        ...

    async def weights(self) -> Mapping[str, torch.Tensor]:
        """The whole trainable parameters by name, to give to engines."""
        ...

    async def save(self, folder: Path) -> None:
        """Write weights and optimizer into the folder of a new checkpoint."""
        ...

    async def restart(self) -> None:
        """Replace processes that were lost. The weights are those of the start until `load`."""
        ...


class LocalBackend:
    """Training in this process. The engine may run on the same parameters."""

    def __init__(self, learner: Learner, *, in_thread: bool = False) -> None:
        """`in_thread` lets the event loop go on during updates, for rollouts that do not wait for them."""
        self.learner = learner
        self.facts = ModelFacts.of(learner.trained)
        self._in_thread = in_thread

    async def load(self, checkpoint: Path, *, with_optimizer: bool) -> None:
        """See `TrainerBackend`."""
        self.learner.load(checkpoint, with_optimizer=with_optimizer)

    async def begin(self, settings: OptimSettings, *, num_steps: int, num_done: int) -> int:
        """See `TrainerBackend`."""
        return self.learner.begin(settings, num_steps=num_steps, num_done=num_done)

    async def end(self) -> None:
        """See `TrainerBackend`."""
        self.learner.end()

    async def keep_reference(self, path: Path) -> None:
        """See `TrainerBackend`."""
        self.learner.keep_reference(path)

    async def fit(self, rows: Sequence[TrainingRow], *, min_schedule_step: int = 0) -> Metrics:
        """See `TrainerBackend`."""
        return self.learner.fit(rows, min_schedule_step=min_schedule_step)

    async def update(self, groups: Sequence[Group], *, policy_version: int) -> Metrics:
        """See `TrainerBackend`."""
        if not self._in_thread:
            return self.learner.update(groups, policy_version=policy_version)
        return await to_its_end(
            asyncio.to_thread(self.learner.update, groups, policy_version=policy_version)
        )

    async def score(self, packs: Sequence[Pack]) -> list[list[float]]:
        """See `TrainerBackend`."""
        return self.learner.score(packs)

    async def weights(self) -> Mapping[str, torch.Tensor]:
        """The parameters themselves."""
        return self.learner.weights()

    async def save(self, folder: Path) -> None:
        """See `TrainerBackend`."""
        self.learner.save(folder)

    async def restart(self) -> None:
        """This process is never lost."""


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

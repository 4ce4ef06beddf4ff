"""One process of training: the model or its shard, the optimizer, the reference, and what is done with them.

    learner = Learner(config, trained)                # alone; one of four has ranks=Ranks(rank=1, num=4)
    learner.load(checkpoint, with_optimizer=True)     # of a run that is resumed
    learner.begin(config.optim, num_steps=config.steps, num_done=12)
    metrics = learner.update(groups, policy_version=12)
    learner.save(folder)

Every rank is given the same calls in the same order; each does its share. The loop (`rl/trainer.py`) reaches
learners through a backend (`rl/backend.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from memagent.errors import RunError
from memagent.foreign import foreign_file
from memagent.rl.settings import OptimSettings, TrainConfig
from memagent.rl.types import Group
from memagent.rl.update.loss import summary
from memagent.rl.update.optim import Optimizer
from memagent.rl.update.packing import Pack, num_row_tokens
from memagent.rl.update.policy import Policy, score
from memagent.rl.update.ranks import ALONE, Ranks
from memagent.rl.update.rows import TrainingRow
from memagent.rl.update.step import memory_errors, packed, update
from memagent.rl.warmstart.rows import accumulate_sft
from memagent.rl.weights.checkpoint import (
    load_weights,
    read_optimizer,
    write_optimizer,
    write_shards,
    write_weights,
)
from memagent.rl.weights.models import Snapshot, Trained, save_values
from memagent.rl.weights.shards import gathered, whole


class Learner:
    """Trains a model, alone or as one of several ranks."""

    def __init__(
        self,
        config: TrainConfig,
        trained: Trained,
        *,
        policy: Policy | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`policy` runs the model of `trained`; ranks have a sharded one."""
        self.config = config
        self.trained = trained
        self.policy = policy or open_policy(config, trained)
        self.ranks = ranks
        self._optimizer: Optimizer | None = None
        self._reference: Snapshot | None = None
        self._checkpoint: Path | None = None
        """Has the optimizer's state for the next phase."""

    def load(self, checkpoint: Path, *, with_optimizer: bool) -> None:
        """Take the weights of a checkpoint; with its optimizer, the next phase continues there."""
        load_weights(self.trained.model, checkpoint)
        self._checkpoint = checkpoint if with_optimizer else None

    def begin(self, settings: OptimSettings, *, num_steps: int, num_done: int) -> int:
        """Start or continue a phase, with its own optimizer; the position in its learning-rate schedule.

        `num_done` steps of the phase are in the checkpoint that was loaded.
        """
        self.end()
        optimizer = Optimizer(self.trained.parameters, settings, num_steps=num_steps)
        if self._checkpoint is not None:
            state = read_optimizer(self._checkpoint, optimizer.state_like)
            # checkpoints of earlier versions have no counter of the schedule: it was the number of steps
            state.setdefault("schedule_step", torch.tensor(num_done))
            state.pop("num_done", None)
            optimizer.load_state_dict(state)
            self._checkpoint = None
        self._optimizer = optimizer
        return optimizer.schedule_step

    def end(self) -> None:
        """End a phase; its optimizer releases the gradients."""
        if self._optimizer is not None:
            self._optimizer.close()
            self._optimizer = None

    def keep_reference(self, path: Path) -> None:
        """Have the values in a file as the reference of the KL term; if there is none, write today's."""
        cluster = self.config.cluster
        offload = cluster is not None and cluster.offload
        if not path.exists():
            save_values(self.trained, path, is_writer=self.ranks.is_first)
            self.ranks.wait()
        with foreign_file(path, "is damaged", error=RunError):
            self._reference = Snapshot.read(path, self.trained, offload=offload)

    def fit(self, rows: Sequence[TrainingRow], *, min_schedule_step: int = 0) -> dict[str, float]:
        """A step of supervised fine-tuning; its metrics."""
        optimizer = self._current
        optimizer.schedule_step = max(optimizer.schedule_step, min_schedule_step)
        packs = packed(rows, self.config.update)
        with memory_errors():
            stats = accumulate_sft(self.policy, self.ranks.share(packs), scale=self.ranks.num)
            stepped = optimizer.step()
        optimizer.advance_schedule()
        num_tokens = sum(one.num_tokens for one in packs)
        return {
            **summary(self.ranks.merged(stats)),
            **stepped,
            "packed_tokens": float(num_tokens),
            "sharing": num_row_tokens(rows) / num_tokens,
        }

    def update(self, groups: Sequence[Group], *, policy_version: int) -> dict[str, float]:
        """A step of reinforcement learning on groups; its metrics."""
        with memory_errors():
            metrics = update(
                self.config,
                self.policy,
                self.trained,
                groups,
                self._current,
                self._reference,
                policy_version=policy_version,
                ranks=self.ranks,
            )
        self._current.advance_schedule()
        return metrics

    def score(self, packs: Sequence[Pack]) -> list[list[float]]:
        """Log-probabilities of the targets of packs. All ranks compute all of them."""
        return [logprobs.tolist() for logprobs in score(self.policy, packs)]

    def weights(self) -> dict[str, torch.Tensor]:
        """The whole trainable parameters by name; empty on all ranks but the first."""
        return gathered(self.trained.parameters, is_kept=self.ranks.is_first)

    def each_weight(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole trainable parameters one after the other, on their device; all ranks must take all of them."""
        for name, parameter in self.trained.parameters:
            yield name, whole(parameter.detach())

    def save(self, folder: Path) -> None:
        """Write weights and optimizer into the folder of a new checkpoint."""
        trained = self.trained
        write_weights(
            trained.model, trained.loaded.tokenizer, folder, is_writer=self.ranks.is_first
        )
        if self.ranks.num == 1:
            write_optimizer(self._current.state_dict(), folder)
        else:
            write_shards(self._current.state_dict(gathered=False), folder)

    @property
    def _current(self) -> Optimizer:
        assert self._optimizer is not None, "no phase has begun"
        return self._optimizer


def open_policy(config: TrainConfig, trained: Trained, *, device: str | None = None) -> Policy:
    """The policy of a run on the model in training; `device` as for `Policy`."""
    return Policy(
        trained.model,
        temperature=config.rollout.temperature,
        checkpointing=config.update.checkpointing,
        compiled=config.update.compiled,
        device=device,
    )

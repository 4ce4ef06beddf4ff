"""One process of training: the model or its shard, the optimizer, the reference, and what is done with them.

    learner = Learner(config, trained)                # alone; one of four has ranks=Ranks(rank=1, num=4)
    learner.load(checkpoint, with_optimizer=True)     # of a run that is resumed
    learner.begin(config.optim, num_steps=config.steps)
    metrics = learner.update(groups, policy_version=12)
    learner.save(folder)

Every rank is given the same calls in the same order; each does its share. The loop (`rl/trainer.py`) reaches
learners through a backend (`rl/backend.py`).

    groups ──▶ split ──▶ rows_of ──▶ pack ──▶ share ──▶ accumulate ──▶ optimizer.step      once per update

A loss is a sum whose weights are known beforehand, so the packs of an update may be on any rank: gradients and
statistics add up to those of one process. FSDP2 averages gradients; losses are multiplied by the number of ranks. The
old and reference log-probabilities of all updates are computed before the first one changes the weights. Statistics are
over all tokens: of rows without a gradient, which no update needs, a sample is scored and counted for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
import torch.distributed as dist

from memagent.engines.local.loading import is_out_of_memory
from memagent.errors import ConfigError, RunError
from memagent.foreign import foreign_file
from memagent.rl.settings import OptimSettings, TrainConfig, UpdateSettings
from memagent.rl.types import Group
from memagent.rl.update.loss import LossStats, merged, scaled, summary, without_mismatch
from memagent.rl.update.optim import Optimizer
from memagent.rl.update.packing import Pack, num_row_tokens, pack, share_out
from memagent.rl.update.policy import Policy, accumulate, measure, score
from memagent.rl.update.rows import StepRows, TrainingRow, rows_of, split_groups
from memagent.rl.weights.checkpoint import (
    load_weights,
    read_optimizer,
    write_optimizer,
    write_shards,
    write_weights,
)
from memagent.rl.weights.models import Snapshot, Trained, gathered, save_values, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """One of several processes that train together."""

    rank: int = 0
    num: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this one writes what is written once."""
        return self.rank == 0

    def share(self, packs: Sequence[Pack]) -> list[Pack]:
        """The packs of this rank; every rank has the same number of them."""
        return list(packs) if self.num == 1 else share_out(packs, self.num)[self.rank]

    def merged(self, stats: LossStats) -> LossStats:
        """The statistics of all ranks together. All of them must call it."""
        if self.num == 1:
            return stats
        everyone: list[dict[str, float] | None] = [None] * self.num
        dist.all_gather_object(everyone, {name: value.item() for name, value in stats.items()})
        return merged(
            {name: torch.tensor(value, dtype=torch.float64) for name, value in one.items()}
            for one in everyone
            if one is not None
        )

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.num > 1:
            dist.barrier()


ALONE = Ranks()
"""A process that trains by itself."""


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

    def begin(self, settings: OptimSettings, *, num_steps: int) -> int:
        """Start or continue a phase, with its own optimizer; the position in its learning-rate schedule."""
        self.end()
        optimizer = Optimizer(self.trained.parameters, settings, num_steps=num_steps)
        if self._checkpoint is not None:
            optimizer.load_state_dict(read_optimizer(self._checkpoint, optimizer.state_like))
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
        packs = pack(rows, max_tokens=self.config.update.max_tokens)
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


def accumulate_sft(policy: Policy, packs: Sequence[Pack], *, scale: float = 1.0) -> LossStats:
    """Add the gradient of some packs of a step to the parameters; their statistics.

    The loss of a step is minus `logprob`, the mean over its tokens. `scale` as for `accumulate`.
    """
    found: list[LossStats] = []
    for one in packs:
        logprobs = policy(one).logprobs
        weights = torch.from_numpy(one.targets.weights).to(logprobs)
        torch.autograd.backward((-scale * weights * logprobs).sum())
        found.append(
            {
                "num_tokens": weights.new_tensor(float(len(weights))),
                "logprob": logprobs.detach().sum(),
            }
        )
    return merged(found)


# --- the updates of a step ------------------------------------------------------------------------

IDLE_SHARE = 0.1
"""Tokens of rows without a gradient that are scored for statistics, per token that is trained on."""


def update(
    config: TrainConfig,
    policy: Policy,
    trained: Trained,
    groups: Sequence[Group],
    optimizer: Optimizer,
    reference: Snapshot | None,
    *,
    policy_version: int,
    ranks: Ranks = ALONE,
) -> dict[str, float]:
    """Train on the groups of a step; its metrics. `policy_version` is that of the weights before it.

    All `ranks` are called with the same groups, and each runs its share of the packs.
    """
    objective, settings = config.objective, config.update
    parts = split_groups(groups, min(settings.updates, len(groups))) if groups else []
    steps = [rows_of(part, objective, policy_version=policy_version) for part in parts]
    plans = [_Packs.of(step, settings) for step in steps]
    batches = [ranks.share(plan.trained) for plan in plans]
    idle = [ranks.share(plan.idle) for plan in plans]
    everything = [[*packs, *some] for packs, some in zip(batches, idle, strict=True)]
    old = scored = start = None
    if objective.old_logprobs == "recompute":
        old = [score(policy, packs) for packs in everything]
    elif objective.mask is not None and len(batches) > 1:
        start = [score(policy, packs) for packs in everything]
    if reference is not None:
        with reference.in_place(trained):
            scored = [score(policy, packs) for packs in batches]
    stats: list[LossStats] = []
    stepped: list[dict[str, float]] = []
    for number, packs in enumerate(batches):
        is_comparable = not stepped or old is not None or start is not None
        own_old, own_start = (None if some is None else some[number] for some in (old, start))
        found = []
        if packs:
            found.append(
                accumulate(
                    policy,
                    packs,
                    objective,
                    old=own_old,
                    reference=None if scored is None else scored[number],
                    start=own_start,
                    with_entropy=True,
                    scale=ranks.num,
                )
            )
        if idle[number]:
            measured = measure(
                policy,
                idle[number],
                objective,
                old=None if own_old is None else own_old[len(packs) :],
                start=None if own_start is None else own_start[len(packs) :],
            )
            found.append(scaled(measured, plans[number].idle_factor))
        stats += found if is_comparable else map(without_mismatch, found)
        if packs:
            stepped.append(optimizer.step())
    num_rows = sum(num_row_tokens(step.rows) for step in steps)
    num_packed = sum(one.num_tokens for plan in plans for one in plan.trained)
    return {
        **(summary(ranks.merged(merged(stats))) if stats else {}),
        **{name: fmean(one[name] for one in stepped) for name in (stepped[0] if stepped else ())},
        "num_updates": float(len(stepped)),
        "num_stale": float(sum(step.num_stale for step in steps)),
        "packed_tokens": float(sum(plan.num_tokens for plan in plans)),
        "sharing": num_rows / num_packed if num_packed else 1.0,
    }


class _Packs(NamedTuple):
    """The packs of an update, of all ranks."""

    trained: list[Pack]
    idle: list[Pack]
    """Packs of some of the rows without a gradient."""
    idle_factor: float
    """How many tokens of such rows there are for each one in `idle`."""

    @property
    def num_tokens(self) -> int:
        return sum(one.num_tokens for one in (*self.trained, *self.idle))

    @classmethod
    def of(cls, step: StepRows, settings: UpdateSettings) -> _Packs:
        """Packs of a step; of the idle rows some, at most `IDLE_SHARE` of the tokens trained on, but at least one pack."""
        most = max(int(IDLE_SHARE * num_row_tokens(step.rows)), settings.max_tokens)
        some = sample_turns(step.idle, most)
        num_all, num_some = (
            sum(row.sample.num_sampled for row in rows) for rows in (step.idle, some)
        )
        factor = num_all / num_some if num_some else 1.0
        most_tokens = settings.max_tokens
        return cls(
            pack(step.rows, max_tokens=most_tokens), pack(some, max_tokens=most_tokens), factor
        )


def sample_turns(rows: Sequence[TrainingRow], max_tokens: int) -> list[TrainingRow]:
    """Rows of whole turns of groups, which share their prompts, at even distances; all of them if they fit."""
    turns: dict[tuple[int, int], list[TrainingRow]] = {}
    for row in rows:
        turns.setdefault((row.group, row.turn), []).append(row)
    stride = max(1, -(-num_row_tokens(rows) // max_tokens))
    return [row for key in sorted(turns)[::stride] for row in turns[key]]


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn an out-of-memory error into one that names the remedies."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            "the update does not fit the memory of the device; lower `update.max_tokens`, set "
            "`update.checkpointing=true`, or lower `rollout.engine_settings.cache_gb`, and resume the run"
        ) from None

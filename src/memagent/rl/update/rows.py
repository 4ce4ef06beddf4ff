"""From groups to the rows of one optimizer step, each with its advantage and its weight.

    Group* ─▶ split_groups ─▶ Group* of one step ─▶ rows_of ─▶ TrainingRow* ─▶ packing ─▶ loss

The weight of a row is the weight of each of its sampled tokens in the loss. It is computed here, once, from
counts over the whole step. The loss is then a plain weighted sum: it does not depend on how rows are packed,
split into micro-batches, ordered, or distributed over processes.

    token       1 / tokens of the step
    group       1 / (groups of the step x tokens of the group)
    rollout     1 / (rollouts of the step x tokens of the rollout)
    a number    1 / (rollouts of the step x the number)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp
from typing import NamedTuple

from memagent.errors import ConfigError
from memagent.rl.settings import ObjectiveSettings
from memagent.rl.types import Group, Rollout, Sample
from memagent.rl.update.advantages import group_advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """One sample, as an update uses it."""

    sample: Sample
    group: int
    """Index of its group in the step; rows of one group may share a prefix."""
    rollout: int
    """Index of its rollout in the step."""
    advantage: float
    """The same for all rows of a rollout."""
    weight: float
    """Weight of each sampled token in the loss."""
    turn: int = 0
    """Index of the sample in its rollout; rows of one turn of a group often share most of their prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rows of one optimizer step."""

    rows: tuple[TrainingRow, ...]
    """Only rows with a gradient."""
    idle: tuple[TrainingRow, ...]
    """Rows whose gradient is zero, or negligible with `objective.skip_certain`: their group has no signal or the
    reply was certain, and there is no KL term."""
    num_stale: int
    """Rows that are masked because the weights that sampled them are too old."""


def rows_of(
    groups: Sequence[Group], objective: ObjectiveSettings, *, policy_version: int = 0
) -> StepRows:
    """The rows of one optimizer step. `policy_version` is that of the weights before the step.

    Rows without a gradient stay in the counts that weights are computed from.
    """
    counts = _Counts.of(groups)
    rows: list[TrainingRow] = []
    idle: list[TrainingRow] = []
    num_stale = number = 0
    for position, group in enumerate(groups):
        advantages_G = group_advantages(group, scale_by_std=objective.scale_by_std)
        for rollout, advantage in zip(group.rollouts, advantages_G, strict=True):
            if advantage is None or not rollout.num_sampled:
                continue
            weight = _weight(rollout, group, objective, counts)
            for turn, sample in enumerate(rollout.samples):
                if not sample.num_sampled:
                    continue
                if is_stale(sample, policy_version, max_staleness=objective.max_staleness):
                    num_stale += 1
                    continue
                (rows if _has_gradient(sample, advantage, objective) else idle).append(
                    TrainingRow(
                        sample=sample,
                        group=position,
                        rollout=number,
                        advantage=advantage,
                        weight=weight,
                        turn=turn,
                    )
                )
            number += 1
    return StepRows(rows=tuple(rows), idle=tuple(idle), num_stale=num_stale)


def _has_gradient(sample: Sample, advantage: float, objective: ObjectiveSettings) -> bool:
    """Whether a row is worth training on.

    The gradient of log p with respect to the logits has the L1 norm 2 (1 - p), and 1 - p <= -log p: over a row
    these sum to at most -2 log P of its reply.
    """
    if objective.kl_coef != 0.0:
        return True
    is_certain = exp(sum(sample.logprobs)) >= 1.0 - objective.skip_certain
    return advantage != 0.0 and not (objective.skip_certain and is_certain)


def is_stale(sample: Sample, policy_version: int, *, max_staleness: int | None) -> bool:
    """Whether a row was sampled by weights that are too old."""
    return max_staleness is not None and policy_version - sample.policy_version > max_staleness


def split_groups(groups: Sequence[Group], num_steps: int) -> list[list[Group]]:
    """The groups of each of `num_steps` optimizer steps: whole groups, in order, evenly split."""
    if not 1 <= num_steps <= len(groups):
        raise ConfigError(
            f"{len(groups)} groups cannot be split into {num_steps} updates; "
            f"use between 1 and {len(groups)} updates per batch"
        )
    edges = [len(groups) * step // num_steps for step in range(num_steps + 1)]
    return [list(groups[a:b]) for a, b in pairwise(edges)]


class _Counts(NamedTuple):
    """Counts over a whole step, of scored rollouts that sampled something."""

    groups: int
    rollouts: int
    tokens: int

    @classmethod
    def of(cls, groups: Sequence[Group]) -> _Counts:
        tokens = [_num_sampled(group) for group in groups]
        counted = [one for group in groups for one in group.scored if one.num_sampled]
        return cls(groups=sum(num > 0 for num in tokens), rollouts=len(counted), tokens=sum(tokens))


def _num_sampled(group: Group) -> int:
    return sum(rollout.num_sampled for rollout in group.scored)


def _weight(rollout: Rollout, group: Group, objective: ObjectiveSettings, counts: _Counts) -> float:
    if objective.loss_mean == "token":
        return 1.0 / counts.tokens
    if objective.loss_mean == "group":
        return 1.0 / (counts.groups * _num_sampled(group))
    if objective.loss_mean == "rollout":
        return 1.0 / (counts.rollouts * rollout.num_sampled)
    return 1.0 / (counts.rollouts * objective.loss_mean)

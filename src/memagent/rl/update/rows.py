"""From groups to the rows of one optimizer step, each with its advantage and its weight.

    Group* ─▶ split_groups ─▶ Group* of one step ─▶ rows_of ─▶ TrainingRow* ─▶ packing ─▶ loss

The weight of a row is what each of its sampled tokens counts for. It is computed here, once, from
counts over the whole step. The loss is then a plain weighted sum, so it does not matter how rows are
packed, split into micro-batches, reordered, or shared between processes.

    token       1 / tokens of the step
    rollout     1 / (rollouts of the step x tokens of the rollout)
    constant    1 / (rollouts of the step x constant)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from memagent.errors import ConfigError
from memagent.rl.settings import ObjectiveSettings
from memagent.rl.types import Group, Rollout, Sample
from memagent.rl.update.advantages import group_advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """One sample as the update sees it."""

    sample: Sample
    group: int
    """Number of its group in the step; rows of one group may share a prefix."""
    rollout: int
    """Number of its rollout in the step."""
    advantage: float
    """The same for all rows of a rollout."""
    weight: float
    """What each sampled token counts for in the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rows of one optimizer step, and what was counted on the way."""

    rows: tuple[TrainingRow, ...]
    """Only those that can change the weights."""
    num_rollouts: int
    """Rollouts with at least one sampled token; the ones that are averaged over."""
    num_tokens: int
    """Their sampled tokens, rows left out below included: nothing leaves a denominator."""
    num_failed: int
    """Rollouts that failed."""
    num_stale: int
    """Rows left out because the weights that drew them are too old."""
    num_idle: int
    """Rows left out because they have no advantage and there is no KL, so their gradient is zero."""
    num_flat: int
    """Groups whose rewards are all the same."""


def rows_of(
    groups: Sequence[Group], objective: ObjectiveSettings, *, policy_version: int = 0
) -> StepRows:
    """The rows of one optimizer step. `policy_version` is that of the weights before the step."""
    taught = [_teaching(group) for group in groups]
    num_rollouts = sum(len(rollouts) for rollouts in taught)
    num_tokens = sum(rollout.num_sampled for rollouts in taught for rollout in rollouts)
    rows: list[TrainingRow] = []
    num_stale = num_idle = num_flat = number = 0
    for position, (group, rollouts) in enumerate(zip(groups, taught, strict=True)):
        found = group_advantages(group, scale_by_std=objective.scale_by_std)
        num_flat += not found.has_signal
        advantage_of = dict(zip(map(id, group.rollouts), found.advantages, strict=True))
        for rollout in rollouts:
            advantage = advantage_of[id(rollout)]
            assert advantage is not None
            weight = _weight(rollout, objective, num_rollouts=num_rollouts, num_tokens=num_tokens)
            for sample in rollout.samples:
                if not sample.num_sampled:
                    continue
                if advantage == 0.0 and objective.kl_coef == 0.0:
                    num_idle += 1
                elif is_stale(sample, policy_version, max_staleness=objective.max_staleness):
                    num_stale += 1
                else:
                    rows.append(
                        TrainingRow(
                            sample=sample,
                            group=position,
                            rollout=number,
                            advantage=advantage,
                            weight=weight,
                        )
                    )
            number += 1
    return StepRows(
        rows=tuple(rows),
        num_rollouts=num_rollouts,
        num_tokens=num_tokens,
        num_failed=sum(group.num_failed for group in groups),
        num_stale=num_stale,
        num_idle=num_idle,
        num_flat=num_flat,
    )


def is_stale(sample: Sample, policy_version: int, *, max_staleness: int | None) -> bool:
    """Whether a row was drawn by weights that are too old to learn from."""
    return max_staleness is not None and policy_version - sample.policy_version > max_staleness


def split_groups(groups: Sequence[Group], num_steps: int) -> list[list[Group]]:
    """The groups of each of `num_steps` optimizer steps: whole groups, in order, as even as can be."""
    if not 1 <= num_steps <= len(groups):
        raise ConfigError(
            f"{len(groups)} groups cannot be split into {num_steps} updates; "
            f"use between 1 and {len(groups)} updates per batch"
        )
    edges = [len(groups) * step // num_steps for step in range(num_steps + 1)]
    return [list(groups[a:b]) for a, b in pairwise(edges)]


def _teaching(group: Group) -> list[Rollout]:
    return [rollout for rollout in group.ok if rollout.num_sampled]


def _weight(
    rollout: Rollout, objective: ObjectiveSettings, *, num_rollouts: int, num_tokens: int
) -> float:
    if objective.loss_mean == "token":
        return 1.0 / num_tokens
    if objective.loss_mean == "rollout":
        return 1.0 / (num_rollouts * rollout.num_sampled)
    assert objective.constant_tokens is not None
    return 1.0 / (num_rollouts * objective.constant_tokens)

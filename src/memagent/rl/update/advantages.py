"""How much better than its group each rollout did.

    rewards of a group     1.0   0.0   0.0   1.0      mean 0.5
    advantages             0.5  -0.5  -0.5   0.5      for every sampled token of every row

Statistics are over rollouts, never over rows: a rollout that made more calls counts no more. Failed
rollouts are in no statistic and get no advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from memagent.errors import ConfigError
from memagent.rl.objective import ObjectiveConfig
from memagent.rl.types import Group

STD_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """What one group teaches."""

    advantages: tuple[float | None, ...]
    """One per rollout, in the group's order; None for those that failed."""
    has_signal: bool
    """False when rewards are all the same, or fewer than two rollouts count: nothing to learn."""


def check_group_size(group_size: int) -> None:
    """Refuse groups that cannot teach anything, before the first rollout."""
    if group_size < 2:
        raise ConfigError(
            f"group_size={group_size} gives no one to compare with, so every advantage is 0; use at least 2"
        )


def group_advantages(group: Group, *, scale_by_std: bool = False) -> GroupAdvantages:
    """Advantages of one group's rollouts. A group of one is refused."""
    check_group_size(len(group.rollouts))
    centered = iter(advantages_of([r.reward for r in group.ok], scale_by_std=scale_by_std))
    return GroupAdvantages(
        advantages=tuple(next(centered) if r.is_ok else None for r in group.rollouts),
        has_signal=has_signal(group),
    )


def advantages_of(rewards_G: Sequence[float], *, scale_by_std: bool = False) -> list[float]:
    """Rewards around their mean. Equal rewards give exact zeros."""
    if not rewards_G or min(rewards_G) == max(rewards_G):
        return [0.0] * len(rewards_G)
    mean = fmean(rewards_G)
    centered_G = [reward - mean for reward in rewards_G]
    if not scale_by_std:
        return centered_G
    spread = pstdev(rewards_G) + STD_EPSILON
    return [value / spread for value in centered_G]


def has_signal(group: Group) -> bool:
    """Whether a group teaches anything; dynamic sampling draws another one where it does not."""
    rewards = {rollout.reward for rollout in group.ok}
    return len(rewards) > 1


def overlong_penalty(
    num_tokens: int, *, max_tokens: int, soft_tokens: int, penalty: float = 1.0
) -> float:
    """What to add to the reward of a reply: 0 until the last `soft_tokens` of its limit, then down.

        reward     0 ─────────────┐
                                   ╲
                  -penalty          ┘
        tokens     0   max - soft   max

    A reply that reached the limit loses the whole penalty.
    """
    if soft_tokens > max_tokens:
        raise ConfigError(
            f"overlong_tokens={soft_tokens} is more than the {max_tokens} tokens a reply may have; lower it"
        )
    over = num_tokens - (max_tokens - soft_tokens)
    return -penalty * min(max(over / soft_tokens, 0.0), 1.0)


def overlong_shaping(objective: ObjectiveConfig, replies: Sequence[tuple[int, int]]) -> float:
    """What the lengths of a rollout's replies, each with its limit, add to its reward: the worst counts.

    Where half of a limit is shorter than `overlong_tokens`, the penalty begins at half.
    """
    assert objective.overlong_tokens is not None
    return min(
        (
            overlong_penalty(
                num_tokens,
                max_tokens=max_tokens,
                soft_tokens=min(objective.overlong_tokens, max(1, max_tokens // 2)),
                penalty=objective.overlong_penalty,
            )
            for num_tokens, max_tokens in replies
        ),
        default=0.0,
    )

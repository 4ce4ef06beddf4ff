"""Advantages: the reward of each rollout relative to its group.

    rewards of a group     1.0   0.0   0.0   1.0      mean 0.5
    advantages             0.5  -0.5  -0.5   0.5      for every sampled token of every row

Statistics are over rollouts, never over rows: a rollout with more calls has no more weight. Failed
rollouts without a reward for failing are in no statistic and get no advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

from memagent.errors import ConfigError
from memagent.rl.types import Group

STD_EPSILON = 1e-6


def check_group_size(group_size: int) -> None:
    """Refuse groups of one: their advantage is always 0."""
    if group_size < 2:
        raise ConfigError(
            f"`group_size={group_size}` leaves no rollout to compare with, so every advantage is 0; use at "
            "least 2"
        )


def group_advantages(group: Group, *, scale_by_std: bool = False) -> tuple[float | None, ...]:
    """The advantage of each rollout of a group; None for those whose reward does not count. A group of one is refused."""
    check_group_size(len(group.rollouts))
    advantages = iter(advantages_of([r.reward for r in group.scored], scale_by_std=scale_by_std))
    return tuple(next(advantages) if rollout.is_scored else None for rollout in group.rollouts)


def advantages_of(rewards_G: Sequence[float], *, scale_by_std: bool = False) -> list[float]:
    """Rewards minus their mean. Equal rewards give exact zeros."""
    if not rewards_G or min(rewards_G) == max(rewards_G):
        return [0.0] * len(rewards_G)
    mean = fmean(rewards_G)
    centered_G = [reward - mean for reward in rewards_G]
    if not scale_by_std:
        return centered_G
    spread = pstdev(rewards_G) + STD_EPSILON
    return [value / spread for value in centered_G]


def has_signal(group: Group) -> bool:
    """Whether scores of a group differ; dynamic sampling replaces groups where they do not.

    Penalties for length do not count: they would be all that such a group is trained on.
    """
    return len({rollout.score for rollout in group.scored}) > 1


def overlong_penalty(
    num_tokens: int, *, max_tokens: int, soft_tokens: int, penalty: float = 1.0
) -> float:
    """Added to the reward for the length of a reply: 0 up to the last `soft_tokens` of its limit, then less.

        reward     0 ─────────────┐
                                   ╲
                  -penalty          ┘
        tokens     0   max - soft   max

    A reply that reached the limit loses the whole penalty.
    """
    if soft_tokens > max_tokens:
        raise ConfigError(
            f"`overlong_tokens={soft_tokens}` is more than the {max_tokens} tokens of a reply; lower it"
        )
    over = num_tokens - (max_tokens - soft_tokens)
    return -penalty * min(max(over / soft_tokens, 0.0), 1.0)


def overlong_shaping(
    replies: Sequence[tuple[int, int]], *, soft_tokens: int, penalty: float = 1.0
) -> float:
    """Added to the reward of a rollout for the lengths of its replies, each with its limit; the lowest counts.

    Where half of a limit is shorter than `soft_tokens`, the penalty begins at half.
    """
    return min(
        (
            overlong_penalty(
                num_tokens,
                max_tokens=max_tokens,
                soft_tokens=min(soft_tokens, max(1, max_tokens // 2)),
                penalty=penalty,
            )
            for num_tokens, max_tokens in replies
        ),
        default=0.0,
    )

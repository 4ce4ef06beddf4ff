"""Metrics of a step from its groups.

reward            mean over rollouts, as it is trained on; of failed ones, those that `on_failure` gives a reward
num_failed        failed rollouts; num_failed_policy: those that the policy's replies made fail
best_reward       highest reward of each group, mean over groups
pass_at_K         probability that one of K attempts is right (a score of at least 1), unbiased, mean over
                  groups; for K = 1, 2, 4, ... up to the group size
group_std         standard deviation of rewards within a group, mean over groups
signal            fraction of groups whose rewards, before penalties for length, differ
staleness         training steps between the weights that sampled a token and those that are trained, mean over
                  tokens; staleness_max: the largest
agent/NAME        metrics of agents, mean over rollouts: lengths of memories, turns, errors
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import repeat
from math import comb
from statistics import fmean, pstdev

from memagent.rl.types import Group
from memagent.rl.update.advantages import has_signal
from memagent.tracking import TIMING_PREFIXES

FULL_SCORE = 1.0
"""Score of a right answer, as graders have it."""


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of the groups of a step. Failed rollouts are counted; penalised ones are in means."""
    rollouts = [rollout for group in groups for rollout in group.scored]
    rewards_EG = [[rollout.reward for rollout in group.scored] for group in groups if group.scored]
    found = {
        "num_groups": float(len(groups)),
        "num_failed": float(sum(group.num_failed for group in groups)),
        "num_failed_policy": float(
            sum(rollout.failed_by == "policy" for group in groups for rollout in group.rollouts)
        ),
    }
    if not rollouts:
        return found
    own: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            if not name.startswith(TIMING_PREFIXES):
                own[name].append(value)
    rows = [sample for rollout in rollouts for sample in rollout.samples]
    return {
        **found,
        "reward": fmean(rollout.reward for rollout in rollouts),
        "group_std": fmean(pstdev(rewards) for rewards in rewards_EG),
        "best_reward": fmean(max(rewards) for rewards in rewards_EG),
        **passes([[rollout.score for rollout in group.scored] for group in groups]),
        "signal": fmean(has_signal(group) for group in groups),
        "rows": float(len(rows)),
        "sampled_tokens": float(sum(sample.num_sampled for sample in rows)),
        "row_tokens_max": float(max((len(sample.ids) for sample in rows), default=0)),
        **{f"agent/{name}": fmean(values) for name, values in sorted(own.items())},
    }


def staleness_metrics(groups: Sequence[Group], *, policy_version: int) -> dict[str, float]:
    """Age of the weights that sampled the tokens of a step, in steps: mean and maximum."""
    ages: list[int] = []
    for group in groups:
        for rollout in group.scored:
            for sample in rollout.samples:
                versions = sample.token_versions or repeat(sample.policy_version)
                pairs = zip(versions, sample.is_sampled, strict=False)
                ages += [policy_version - version for version, is_sampled in pairs if is_sampled]
    if not ages:
        return {}
    return {"staleness": fmean(ages), "staleness_max": float(max(ages))}


def pass_at_k(num: int, num_right: int, k: int) -> float:
    """Probability that `k` of `num` attempts, drawn without replacement, include a right one."""
    return 1.0 - comb(num - num_right, k) / comb(num, k)


def passes(scores_EG: Sequence[Sequence[float]]) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, ... from the scores of the attempts at each task, mean over tasks."""
    largest = max(len(scores) for scores in scores_EG)
    found = {}
    for k in (1 << power for power in range(largest.bit_length())):
        some = [scores for scores in scores_EG if len(scores) >= k]
        found[f"pass_at_{k}"] = fmean(
            pass_at_k(len(scores), sum(score >= FULL_SCORE for score in scores), k)
            for scores in some
        )
    return found


def task_metrics(groups: Sequence[Group], kinds: Mapping[str, str]) -> dict[str, float]:
    """Mean reward of each kind of task, if there are several. `kinds` maps task ids to kinds."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        rewards[kinds[group.task_id]] += [rollout.reward for rollout in group.scored]
    if len(rewards) < 2:
        return {}
    return {f"{kind}/reward": fmean(some) for kind, some in sorted(rewards.items()) if some}

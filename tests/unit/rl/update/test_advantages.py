"""Advantages, worked by hand."""

from dataclasses import replace
from functools import partial

import pytest

from memagent.errors import ConfigError
from memagent.rl.settings import PRESETS, ObjectiveSettings
from memagent.rl.types import Group, Rollout, Sample
from memagent.rl.update.advantages import (
    advantages_of,
    check_group_size,
    group_advantages,
    has_signal,
    overlong_penalty,
    overlong_shaping,
)
from memagent.rl.update.rows import is_stale, rows_of, split_groups
from memagent.types import AttemptStatus


def sample(num_sampled: int = 1, *, policy_version: int = 0, logprob: float = -1.0) -> Sample:
    """A prompt of one token and a reply."""
    return Sample(
        ids=tuple(range(num_sampled + 1)),
        is_sampled=(False, *[True] * num_sampled),
        logprobs=(0.0, *[logprob] * num_sampled),
        policy_version=policy_version,
    )


def group_of(*rewards: float, task_id: str = "a", failed: tuple[int, ...] = ()) -> Group:
    statuses: list[AttemptStatus] = ["failed" if n in failed else "ok" for n in range(len(rewards))]
    return Group(
        task_id=task_id,
        rollouts=tuple(
            Rollout(task_id=task_id, index=n, samples=(sample(),), reward=reward, status=status)
            for n, (reward, status) in enumerate(zip(rewards, statuses, strict=True))
        ),
    )


def test_the_mean_of_the_group_is_subtracted() -> None:
    # (1 + 0 + 0 + 1) / 4 = 0.5
    assert advantages_of([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]
    # (1 + 0 + 0 + 0) / 4 = 0.25
    assert advantages_of([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]


def test_scaling_divides_by_the_standard_deviation() -> None:
    # mean 1, deviations -1 -1 2, variance (1 + 1 + 4) / 3 = 2
    found = advantages_of([0.0, 0.0, 3.0], scale_by_std=True)
    assert found == pytest.approx([-1 / 2**0.5, -1 / 2**0.5, 2 / 2**0.5], rel=1e-5)


@pytest.mark.parametrize("scale_by_std", [False, True])
def test_equal_rewards_give_exact_zeros(scale_by_std: bool) -> None:
    # the mean of 0.1, 0.1, 0.1 is not 0.1 in floating point
    assert advantages_of([0.1, 0.1, 0.1], scale_by_std=scale_by_std) == [0.0, 0.0, 0.0]


def test_failed_rollouts_are_in_no_statistic() -> None:
    # the middle one failed: (1 + 0) / 2 = 0.5
    group = group_of(1.0, 0.0, 0.0, failed=(1,))
    assert group_advantages(group) == (0.5, None, -0.5)
    assert has_signal(group)


def test_a_group_with_one_rollout_left_has_no_signal() -> None:
    group = group_of(1.0, 0.0, failed=(1,))
    assert group_advantages(group) == (0.0, None)
    assert not has_signal(group)


def test_a_group_that_failed_altogether_has_no_signal() -> None:
    group = group_of(0.0, 0.0, failed=(0, 1))
    assert group_advantages(group) == (None, None)
    assert not has_signal(group)


def test_a_group_of_one_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"group_size=1` .* use at least 2"):
        check_group_size(1)
    with pytest.raises(ConfigError, match="use at least 2"):
        group_advantages(group_of(1.0))


def test_dynamic_sampling_keeps_groups_with_different_rewards() -> None:
    groups = [group_of(1.0, 1.0), group_of(1.0, 0.0), group_of(0.0, 0.0)]
    assert [has_signal(group) for group in groups] == [False, True, False]


def test_a_penalty_for_length_alone_is_no_signal() -> None:
    rewards = [1.0] * 15 + [1.0 - 2 / 256]
    group = group_of(*rewards)
    shaped = [replace(one, metrics={"unshaped_reward": 1.0}) for one in group.rollouts]
    assert not has_signal(replace(group, rollouts=tuple(shaped)))
    assert has_signal(group), "without an unshaped reward the reward decides"
    shaped[3] = replace(shaped[3], reward=1.0, metrics={"unshaped_reward": 0.5})
    assert has_signal(replace(group, rollouts=tuple(shaped)))


def test_overlong_replies_lose_reward_over_the_last_part_of_their_limit() -> None:
    def penalty(num_tokens: int) -> float:
        return overlong_penalty(num_tokens, max_tokens=100, soft_tokens=20, penalty=0.5)

    # 80 is free; 90 is half way through the last 20; 100 is the limit
    assert [penalty(n) for n in (0, 80, 90, 100, 120)] == [0, 0, -0.25, -0.5, -0.5]


def test_an_overlong_part_longer_than_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="overlong_tokens=200` is more than the 100 tokens"):
        overlong_penalty(0, max_tokens=100, soft_tokens=200)


# --- rows of a step -------------------------------------------------------------------------------


def rollout(index: int, reward: float, *lengths: int) -> Rollout:
    samples = tuple(sample(length) for length in lengths)
    return Rollout(task_id="a", index=index, samples=samples, reward=reward)


UNEVEN = Group(task_id="a", rollouts=(rollout(0, 1.0, 1, 3), rollout(1, 0.0, 2)))
"""Six sampled tokens: a rollout of two rows with four, and one of one row with two."""


def test_all_rows_of_a_rollout_have_its_advantage() -> None:
    # over rollouts the mean is 1/2; over rows it would be 2/3
    rows = rows_of([UNEVEN], ObjectiveSettings()).rows
    assert [(row.rollout, row.advantage) for row in rows] == [(0, 0.5), (0, 0.5), (1, -0.5)]


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({"loss_mean": "token"}, [1 / 6, 1 / 6, 1 / 6]),
        ({"loss_mean": "rollout"}, [1 / 8, 1 / 8, 1 / 4]),
        ({"loss_mean": 10}, [1 / 20, 1 / 20, 1 / 20]),
    ],
)
def test_weights_follow_from_the_counts_of_the_step(
    settings: dict[str, object], weights: list[float]
) -> None:
    step = rows_of([UNEVEN], ObjectiveSettings.parse(settings))
    assert [row.weight for row in step.rows] == pytest.approx(weights)


def test_each_group_has_the_same_weight_with_the_mean_of_the_papers_formula() -> None:
    # 1 / G times 1 / tokens of the group: six tokens in one group, two in the other
    other = group_of(1.0, 0.0, task_id="b")
    step = rows_of([UNEVEN, other], ObjectiveSettings(loss_mean="group"))
    assert [row.weight for row in step.rows] == pytest.approx([1 / 12] * 3 + [1 / 4] * 2)
    failed = group_of(1.0, 1.0, task_id="c", failed=(0, 1))
    step = rows_of([UNEVEN, failed], ObjectiveSettings(loss_mean="group"))
    assert [row.weight for row in step.rows] == pytest.approx([1 / 6] * 3)


def test_groups_without_signal_have_no_rows_but_stay_in_the_denominator() -> None:
    flat = group_of(1.0, 1.0, task_id="b")
    step = rows_of([UNEVEN, flat], ObjectiveSettings())
    assert {row.group for row in step.rows} == {0}
    assert {row.group for row in step.idle} == {1}
    assert step.rows[0].weight == pytest.approx(1 / 8)


def test_groups_without_signal_have_rows_for_the_kl_term() -> None:
    flat = group_of(1.0, 1.0, task_id="b")
    step = rows_of([UNEVEN, flat], ObjectiveSettings(kl_coef=1e-3))
    assert [row.advantage for row in step.rows] == [0.5, 0.5, -0.5, 0.0, 0.0]


def test_replies_that_were_certain_are_not_trained_on_but_stay_in_the_denominator() -> None:
    sure, unsure = sample(logprob=-0.0004), sample(logprob=-0.7)
    rollouts = (
        Rollout(task_id="a", index=0, samples=(sure, unsure), reward=0.0),
        Rollout(task_id="a", index=1, samples=(unsure,), reward=1.0),
    )
    groups = [Group(task_id="a", rollouts=rollouts)]
    step = rows_of(groups, ObjectiveSettings(skip_certain=1e-3))
    assert [row.sample for row in step.rows] == [unsure, unsure]
    assert [row.sample for row in step.idle] == [sure]
    assert {row.weight for row in step.rows} == {1 / 3}
    assert len(rows_of(groups, ObjectiveSettings(skip_certain=1e-4)).rows) == 3
    assert len(rows_of(groups, ObjectiveSettings()).rows) == 3
    assert len(rows_of(groups, ObjectiveSettings(skip_certain=1e-3, kl_coef=0.1)).rows) == 3


def test_failed_rollouts_have_no_rows_and_no_weight() -> None:
    step = rows_of([group_of(1.0, 0.0, 0.0, failed=(2,))], ObjectiveSettings())
    assert [(row.rollout, row.weight) for row in step.rows] == [(0, 1 / 2), (1, 1 / 2)]


def test_rows_of_stale_weights_are_masked_and_stay_in_the_denominator() -> None:
    old, new = sample(policy_version=3), sample(policy_version=5)
    assert is_stale(old, 5, max_staleness=1)
    assert not is_stale(old, 5, max_staleness=2)
    assert not is_stale(old, 5, max_staleness=None)
    rollouts = (
        Rollout(task_id="a", index=0, samples=(old,), reward=0.0),
        Rollout(task_id="a", index=1, samples=(new,), reward=1.0),
    )
    objective = ObjectiveSettings(max_staleness=1)
    step = rows_of([Group(task_id="a", rollouts=rollouts)], objective, policy_version=5)
    assert [row.sample for row in step.rows] == [new]
    assert (step.num_stale, [row.weight for row in step.rows]) == (1, [1 / 2])


def test_a_batch_is_split_into_updates_of_whole_groups() -> None:
    groups = [group_of(1.0, 0.0, task_id=str(n)) for n in range(5)]
    parts = split_groups(groups, 2)
    assert [[group.task_id for group in part] for part in parts] == [["0", "1"], ["2", "3", "4"]]
    with pytest.raises(ConfigError, match="5 groups cannot be split into 6 updates"):
        split_groups(groups, 6)


# --- settings and records -------------------------------------------------------------------------


def test_presets_are_the_published_recipes() -> None:
    paper, dapo = (
        ObjectiveSettings.parse(PRESETS[name]["objective"]) for name in ("paper", "dapo")
    )
    assert (paper.clip_low, paper.clip_high, paper.kl_coef) == (0.2, 0.2, 1e-3)
    assert not paper.scale_by_std
    assert (dapo.clip_low, dapo.clip_high, dapo.kl_coef) == (0.2, 0.28, 0.0)
    assert dapo.dynamic_sampling


@pytest.mark.parametrize("mask", [(1.1, 2.0), (0.5, 0.9), (-1.0, 2.0)])
def test_a_mask_is_a_range_around_one(mask: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match=r"such as \[0.5, 2.0\]"):
        ObjectiveSettings.parse({"mask": mask})


def test_a_sample_whose_parts_differ_in_length_is_refused() -> None:
    with pytest.raises(ValueError, match="3 ids, 3 marks and 2 logprobs"):
        Sample(ids=(1, 2, 3), is_sampled=(False, False, True), logprobs=(0.0, 0.0))


def test_a_first_token_cannot_be_sampled() -> None:
    with pytest.raises(ValueError, match="no prompt to be sampled from"):
        Sample(ids=(1,), is_sampled=(True,), logprobs=(-1.0,))


def test_the_longest_reply_decides_the_overlong_penalty() -> None:
    shaping = partial(overlong_shaping, soft_tokens=20, penalty=0.5)
    assert shaping([(10, 100), (80, 100)]) == 0.0
    assert shaping([(10, 100), (90, 100), (85, 100)]) == pytest.approx(-0.25)
    assert shaping([(100, 100), (3, 100)]) == -0.5
    assert shaping([(12, 16)]) == pytest.approx(-0.25)  # begins at 8 of 16
    assert shaping([]) == 0.0

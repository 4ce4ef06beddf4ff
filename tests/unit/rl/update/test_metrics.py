"""Metrics of a step, worked by hand."""

from itertools import combinations

import pytest

from memagent.rl.types import Group, Rollout, Sample
from memagent.rl.update.metrics import group_metrics, pass_at_k, task_metrics


def rollout(
    reward: float, *, memory: float = 0.0, failed: bool = False, length: int = 2
) -> Rollout:
    sample = Sample(
        ids=tuple(range(length + 1)),
        is_sampled=(False, *[True] * length),
        logprobs=(0.0, *[-1.0] * length),
    )
    return Rollout(
        task_id="t",
        index=0,
        samples=() if failed else (sample,),
        reward=reward,
        status="failed" if failed else "ok",
        metrics={} if failed else {"memory_tokens": memory, "time/agent": 3.0},
    )


def test_metrics_of_two_groups() -> None:
    groups = [
        Group(
            task_id="a",
            rollouts=(rollout(1.0, memory=10), rollout(0.0, memory=20), rollout(0.0, failed=True)),
        ),
        Group(task_id="b", rollouts=(rollout(0.0, memory=30), rollout(0.0, memory=40, length=5))),
    ]
    found = group_metrics(groups)
    assert found["reward"] == pytest.approx(0.25)  # of four: the failed one is in no mean
    assert found["num_failed"] == 1
    assert found["group_std"] == pytest.approx(0.25)  # (0.5 + 0) / 2
    assert found["best_reward"] == pytest.approx(0.5)
    assert found["pass_at_1"] == pytest.approx(0.25)
    assert found["pass_at_2"] == pytest.approx(0.5)
    assert "pass_at_g" not in found
    assert found["signal"] == pytest.approx(0.5)
    assert found["sampled_tokens"] == 2 + 2 + 2 + 5
    assert found["row_tokens_max"] == 6
    assert found["agent/memory_tokens"] == pytest.approx(25)
    assert not any("time" in name for name in found)


@pytest.mark.parametrize("num_right", range(9))
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_attempt(num_right: int, k: int) -> None:
    is_right = [number < num_right for number in range(8)]
    subsets = list(combinations(is_right, k))
    expected = sum(any(some) for some in subsets) / len(subsets)
    assert pass_at_k(8, num_right, k) == pytest.approx(expected)


def test_partial_rewards_raise_the_best_reward_and_are_no_pass() -> None:
    found = group_metrics([Group(task_id="a", rollouts=(rollout(0.9), rollout(0.2)))])
    assert found["best_reward"] == pytest.approx(0.9)
    assert (found["pass_at_1"], found["pass_at_2"]) == (0.0, 0.0)


def test_groups_that_failed_altogether_are_counted() -> None:
    group = Group(task_id="a", rollouts=(rollout(0.0, failed=True), rollout(0.0, failed=True)))
    assert group_metrics([group]) == {
        "num_groups": 1.0,
        "num_failed": 2.0,
        "num_failed_policy": 0.0,
    }


def test_rewards_of_each_kind_of_task() -> None:
    groups = [
        Group(task_id="a", rollouts=(rollout(1.0), rollout(0.0))),
        Group(task_id="b", rollouts=(rollout(0.0), rollout(0.5, failed=True))),
        Group(task_id="c", rollouts=(rollout(1.0), rollout(1.0))),
    ]
    assert task_metrics(groups, {"a": "x", "b": "y", "c": "x"}) == {
        "x/reward": 0.75,
        "y/reward": 0.0,
    }
    assert task_metrics(groups, dict.fromkeys("abc", "x")) == {}

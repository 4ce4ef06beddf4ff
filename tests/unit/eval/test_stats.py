"""Intervals in cases worked by hand, and their coverage in simulations."""

import math
import random
from statistics import fmean

import pytest

from memagent.eval.stats import (
    Interval,
    bounded,
    by_depth,
    compare,
    mean_interval,
    paired_mean,
    sign_test,
    wilson,
)


def share_covered(intervals: list[Interval], truth: float) -> float:
    return fmean(interval.low <= truth <= interval.high for interval in intervals)


# --- Wilson ---------------------------------------------------------------------------------------


def test_wilson_agrees_with_the_formula_worked_by_hand() -> None:
    interval = wilson(8, 10)
    assert interval.value == 0.8
    assert interval.low == pytest.approx(0.49016, abs=1e-5)
    assert interval.high == pytest.approx(0.94332, abs=1e-5)


def test_wilson_does_not_collapse_at_the_ends() -> None:
    none, every = wilson(0, 20), wilson(20, 20)
    assert (none.low, every.high) == (0.0, 1.0)
    assert none.high == pytest.approx(0.16113, abs=1e-5)
    assert every.low == pytest.approx(1 - 0.16113, abs=1e-5)


@pytest.mark.parametrize(("right", "num"), [(1, 0), (-1, 5), (6, 5), (0, 0)])
def test_an_impossible_proportion_is_refused(right: int, num: int) -> None:
    with pytest.raises(ValueError, match="not a proportion"):
        wilson(right, num)


@pytest.mark.parametrize(("num", "share"), [(30, 0.5), (128, 0.8), (128, 0.97)])
def test_wilson_covers_the_truth_19_times_in_20(num: int, share: float) -> None:
    """By the exact binomial distribution, not by chance."""
    covered = sum(
        math.comb(num, right) * share**right * (1 - share) ** (num - right)
        for right in range(num + 1)
        if wilson(right, num).low <= share <= wilson(right, num).high
    )
    assert 0.93 <= covered <= 0.975


def test_more_confidence_is_wider() -> None:
    narrow, wide = wilson(60, 100, confidence=0.8), wilson(60, 100, confidence=0.99)
    assert wide.low < narrow.low < narrow.high < wide.high
    with pytest.raises(ValueError, match="between 0 and 1"):
        wilson(1, 2, confidence=95)


# --- bounded scores -------------------------------------------------------------------------------


def test_equal_scores_of_a_few_questions_leave_room_on_both_sides() -> None:
    interval = mean_interval([0.2] * 6)
    assert interval == bounded([0.2] * 6)
    assert interval.value == pytest.approx(0.2)
    assert (interval.low, interval.high) == pytest.approx((0.0459, 0.5652), abs=1e-4)
    more = mean_interval([0.2] * 600)
    assert 0.19 < more.low < 0.2 < more.high < 0.21


def test_the_limits_of_a_bounded_mean_solve_its_equation() -> None:
    values = [0.0, 0.5, 1.0, 0.25, 0.75, 1.0]
    interval = bounded(values)
    mean, z2 = fmean(values), 1.959964**2
    spread = sum((value - mean) ** 2 for value in values)
    for limit in (interval.low, interval.high):
        left = 6 * (6 + 12 - z2) * (mean - limit) ** 2
        assert left == pytest.approx(z2 * (spread + 12 * limit * (1 - limit)), rel=1e-5)


def test_no_scores_have_no_mean_and_scores_beyond_the_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        bounded([])
    with pytest.raises(ValueError, match="exceed 0"):
        bounded([0.5, 1.5])


def test_rewards_beyond_0_and_1_widen_the_bounds() -> None:
    interval = mean_interval([-1.0, 2.0, 0.5])
    assert -1.0 <= interval.low < interval.value == 0.5 < interval.high <= 2.0
    assert mean_interval([3.0, 3.0]).low < 3.0


SHARES = {
    "seldom all found": ([0.2, 1.0], [9, 1]),
    "sometimes all found": ([0.2, 1.0], [7, 3]),
    "spread": ([0.0, 0.25, 0.5, 1.0], [2, 1, 3, 4]),
    "nearly all": ([0.9, 1.0], [3, 7]),
    "middle": ([0.4, 0.6], [1, 1]),
    "seldom nothing": ([0.0, 0.8, 1.0], [1, 3, 6]),
    "mostly nothing": ([0.0, 0.1, 0.2, 1.0], [12, 4, 3, 1]),
}


@pytest.mark.parametrize("num", [4, 6, 12, 60])
@pytest.mark.parametrize("name", SHARES)
def test_the_interval_of_bounded_scores_covers(name: str, num: int) -> None:
    rng = random.Random(num)
    values, weights = SHARES[name]
    truth = math.fsum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
    intervals = [mean_interval(rng.choices(values, weights, k=num)) for _ in range(600)]
    assert all(interval.low < interval.high for interval in intervals)
    assert share_covered(intervals, truth) >= 0.93


def test_scores_of_right_and_wrong_take_wilson_and_shares_the_bounded_interval() -> None:
    assert mean_interval([1.0] * 20) == wilson(20, 20)
    assert mean_interval([1, 0, 1, 1]) == wilson(3, 4)
    shares = [0.5, 1.0, 0.0, 0.5]
    assert mean_interval(shares) == bounded(shares)


# --- comparison -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("better", "worse", "p"),
    [
        (0, 0, 1.0),
        (5, 5, 1.0),
        (5, 0, 2 / 32),
        (1, 9, 22 / 1024),
        (10, 2, 2 * (1 + 12 + 66) / 4096),
    ],
)
def test_the_sign_test_is_exact(better: int, worse: int, p: float) -> None:
    assert sign_test(better, worse) == pytest.approx(p, rel=1e-12)
    assert sign_test(worse, better) == sign_test(better, worse)


def test_the_sign_test_does_not_overflow_with_many_questions() -> None:
    assert sign_test(2500, 2500) == 1.0
    normal = math.erfc((99 / math.sqrt(5000)) / math.sqrt(2))  # continuity: 100 - 1
    assert sign_test(2550, 2450) == pytest.approx(normal, rel=2e-2)
    assert 0.0 <= sign_test(5000, 0) < 1e-300


def test_a_comparison_counts_and_subtracts_question_by_question() -> None:
    result = compare([1, 1, 1, 0, 0.5], [0, 1, 1, 1, 0])
    assert (result.num_better, result.num_worse, result.num_equal) == (2, 1, 2)
    assert result.difference.value == pytest.approx(0.1)
    assert result.p_value == 1.0
    with pytest.raises(ValueError, match="3 and 2 scores"):
        compare([1, 1, 1], [1, 1])


def test_the_interval_of_a_paired_difference_is_as_worked_by_hand() -> None:
    interval = paired_mean([1.0] * 12 + [-1.0] * 4 + [0.0] * 44)
    assert interval.value == pytest.approx(8 / 60)
    center, margin = 8 / 62, 1.959964 * math.sqrt(17 - 64 / 62) / 62
    assert interval.low == pytest.approx(center - margin, abs=1e-6)
    assert interval.high == pytest.approx(center + margin, abs=1e-6)


def test_a_paired_difference_keeps_a_width_where_no_question_differs() -> None:
    for scores in ([1.0, 0.0] * 10, [0.5, 0.25] * 10):
        difference = compare(scores, scores).difference
        assert difference.value == 0.0
        assert difference.high == -difference.low == pytest.approx(1.959964 / 22, abs=1e-6)


@pytest.mark.parametrize(("better", "worse"), [(0.02, 0.0), (0.2, 0.1), (0.5, 0.45)])
def test_the_interval_of_a_paired_difference_covers(better: float, worse: float) -> None:
    rng = random.Random(4)
    intervals = []
    for _ in range(1000):
        draws = [rng.random() for _ in range(50)]
        intervals.append(paired_mean([float((d < better) - (d > 1 - worse)) for d in draws]))
    assert share_covered(intervals, better - worse) >= 0.93


def test_pairing_finds_a_difference_that_separate_intervals_hide() -> None:
    rng = random.Random(1)
    first = [float(rng.random() < 0.6) for _ in range(200)]
    second = [0.0 if number < 30 and score else score for number, score in enumerate(first)]
    result = compare(first, second)
    assert mean_interval(first).low < mean_interval(second).high
    assert result.difference.low > 0
    assert result.p_value < 1e-4


def test_equal_methods_differ_significantly_at_most_one_time_in_twenty() -> None:
    rng = random.Random(6)
    num_significant, intervals = 0, []
    for _ in range(300):
        first = [float(rng.random() < 0.7) for _ in range(80)]
        second = [float(rng.random() < 0.7) for _ in range(80)]
        result = compare(first, second)
        num_significant += result.p_value < 0.05
        intervals.append(result.difference)
    assert num_significant <= 24  # 15 at most expected; the exact test is conservative
    assert 0.91 <= share_covered(intervals, 0.0) <= 0.985


# --- depth ----------------------------------------------------------------------------------------


def test_scores_are_grouped_by_the_depth_of_the_evidence() -> None:
    depths = [(0.0,), (0.1,), (0.5,), (0.95,), (1.0,)]
    buckets = by_depth(depths, [1, 0, 0.5, 1, 1], num_buckets=4)
    assert [(bucket.start, bucket.end) for bucket in buckets] == [
        *((0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0))
    ]
    assert [bucket.score and bucket.score.value for bucket in buckets] == [0.5, None, 0.5, 1.0]
    assert buckets[3].score == wilson(2, 2)
    with pytest.raises(ValueError, match="zip"):
        by_depth(depths, [1.0], num_buckets=4)


def test_a_question_counts_in_every_bucket_that_holds_some_of_its_evidence() -> None:
    """Not in the middle, where the mean of both ends is, and where it has none."""
    buckets = by_depth([(0.02, 0.98), (0.01, 0.05)], [1.0, 0.0], num_buckets=3)
    assert [bucket.score and bucket.score.num for bucket in buckets] == [2, None, 1]
    assert buckets[2].score == wilson(1, 1)

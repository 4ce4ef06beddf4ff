"""Statistics of scores: intervals, comparisons on the same questions, accuracy by depth.

    wilson(103, 128)                       # 0.805 [0.728, 0.864]
    mean_interval(scores)                  # Wilson for right or wrong, `bounded` for shares
    compare(scores_of_one, scores_of_other)   # same questions, same order
    by_depth([(0.1, 0.8), (0.5,)], scores, num_buckets=5)   # does the position of evidence matter?

No interval has a width of zero: equal scores of a few questions do not mean that every score is equal.
Average several samples of a question first, since they are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean

from memagent.data.tasks.lengths import bucket_of

CONFIDENCE = 0.95
UNSEEN = 12
"""Scores as far apart as bounds allow that `bounded` adds to the variance: values a small sample missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate and its confidence interval.

    Example: Interval(value=0.8, low=0.73, high=0.86, num=128)
    """

    value: float
    low: float
    high: float
    num: int
    """Number of scores."""

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two methods on the same questions."""

    difference: Interval
    """Mean of first minus second, by `paired_mean`."""
    num_better: int
    """Questions on which the first scored higher."""
    num_worse: int
    num_equal: int
    p_value: float
    """Exact two-sided sign test on the questions that differ; McNemar's test where scores are 0 or 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthBucket:
    """Scores of the questions that have evidence between two depths."""

    start: float
    """Depth from 0, the start of the text, to 1, its end."""
    end: float
    score: Interval | None
    """None for an empty bucket."""


# --- intervals ------------------------------------------------------------------------------------


def wilson(num_right: int, num: int, *, confidence: float = CONFIDENCE) -> Interval:
    """The Wilson interval of a proportion. It keeps a width where all or none are right."""
    if not 0 <= num_right <= num or num == 0:
        raise ValueError(f"{num_right} of {num} is not a proportion")
    z = _z(confidence)
    share = num_right / num
    scale = 1 + z * z / num
    center = (share + z * z / (2 * num)) / scale
    margin = z / scale * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    low = 0.0 if num_right == 0 else max(0.0, center - margin)
    high = 1.0 if num_right == num else min(1.0, center + margin)
    return Interval(value=share, low=low, high=high, num=num)


def bounded(
    values: Sequence[float], *, low: float = 0.0, high: float = 1.0, confidence: float = CONFIDENCE
) -> Interval:
    """The interval of a mean of scores between two bounds.

    It holds every mean that a score test does not reject. The variance is that of the scores, with
    `UNSEEN` scores added that vary as much as the bounds allow at that mean, so it is never zero.
    """
    num = len(values)
    if num == 0:
        raise ValueError("there are no values to take a mean of")
    if not low <= min(values) <= max(values) <= high or low == high:
        raise ValueError(f"scores from {min(values)} to {max(values)} exceed {low} to {high}")
    shares = [(value - low) / (high - low) for value in values]
    mean = min(1.0, fmean(shares))
    spread = math.fsum((share - mean) ** 2 for share in shares)
    z2 = _z(confidence) ** 2
    # n (n + c - z2) (mean - x)^2 = z2 (spread + c x (1 - x)), solved for x
    weight = num * max(num + UNSEEN - z2, num)
    square, linear = weight + z2 * UNSEEN, 2 * weight * mean + z2 * UNSEEN
    constant = weight * mean * mean - z2 * spread
    root = math.sqrt(max(0.0, linear * linear - 4 * square * constant))
    lower = max(0.0, (linear - root) / (2 * square))
    upper = min(1.0, (linear + root) / (2 * square))
    scale = high - low
    return Interval(value=fmean(values), low=low + scale * lower, high=low + scale * upper, num=num)


def mean_interval(values: Sequence[float], *, confidence: float = CONFIDENCE) -> Interval:
    """The interval of a mean score: Wilson's where every score is 0 or 1, else by `bounded`.

    Rewards below 0 or above 1 widen the bounds to the lowest and highest of them.
    """
    if all(value in (0.0, 1.0) for value in values):
        return wilson(sum(value == 1.0 for value in values), len(values), confidence=confidence)
    low, high = min(0.0, *values), max(1.0, *values)
    return bounded(values, low=low, high=high, confidence=confidence)


# --- comparison -----------------------------------------------------------------------------------


def compare(
    first: Sequence[float], second: Sequence[float], *, confidence: float = CONFIDENCE
) -> Comparison:
    """Two methods by their scores on the same questions, in the same order."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} scores are not of the same questions")
    differences = [one - other for one, other in zip(first, second, strict=True)]
    num_better = sum(difference > 0 for difference in differences)
    num_worse = sum(difference < 0 for difference in differences)
    return Comparison(
        difference=paired_mean(differences, confidence=confidence),
        num_better=num_better,
        num_worse=num_worse,
        num_equal=len(differences) - num_better - num_worse,
        p_value=sign_test(num_better, num_worse),
    )


def paired_mean(differences: Sequence[float], *, confidence: float = CONFIDENCE) -> Interval:
    """The interval of a mean difference of scores on the same questions.

    Half a question is added to each of the four outcomes of right and wrong (Agresti and Min), so it
    keeps a width where all questions differ by the same, or by nothing.
    """
    num = len(differences)
    if num == 0:
        raise ValueError("there are no differences to take a mean of")
    most = max(1.0, *(abs(difference) for difference in differences))
    total, sum_ = num + 2, math.fsum(differences)
    squares = math.fsum(difference**2 for difference in differences) + most**2
    center = sum_ / total
    margin = _z(confidence) * math.sqrt(squares - sum_**2 / total) / total
    value = sum_ / num
    return Interval(
        value=value,
        low=max(-most, min(value, center - margin)),
        high=min(most, max(value, center + margin)),
        num=num,
    )


def sign_test(num_better: int, num_worse: int) -> float:
    """Exact two-sided p-value of the sign test: better and worse equally likely."""
    num = num_better + num_worse
    ways = total = 1
    for count in range(min(num_better, num_worse)):
        ways = ways * (num - count) // (count + 1)
        total += ways
    return min(1.0, 2 * total / (1 << num))  # integers until here: no overflow


def by_depth(
    depths: Sequence[Sequence[float]],
    scores: Sequence[float],
    *,
    num_buckets: int,
    confidence: float = CONFIDENCE,
) -> list[DepthBucket]:
    """Mean score in each of equally wide buckets of depth.

    `depths` are those of each piece of evidence of a question; the question counts once in each bucket
    that holds any of them.
    """
    buckets: list[list[float]] = [[] for _ in range(num_buckets)]
    for places, score in zip(depths, scores, strict=True):
        for number in sorted({bucket_of(depth, num_buckets=num_buckets) for depth in places}):
            buckets[number].append(score)
    return [
        DepthBucket(
            start=number / num_buckets,
            end=(number + 1) / num_buckets,
            score=mean_interval(bucket, confidence=confidence) if bucket else None,
        )
        for number, bucket in enumerate(buckets)
    ]


# --- underneath -----------------------------------------------------------------------------------


@cache
def _z(confidence: float) -> float:
    """The two-sided quantile of the normal distribution."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, not at {confidence}")
    return NormalDist().inv_cdf((1 + confidence) / 2)

"""Statistics of scores: intervals, comparisons on the same questions, accuracy by depth.

    wilson(103, 128)                       # 0.805 [0.728, 0.864]
    mean_interval(scores)                  # Wilson for right or wrong, bootstrap for shares
    compare(scores_of_one, scores_of_other)   # same questions, same order
    by_depth(depths, scores, num_buckets=5)   # does the position of the evidence matter?

Intervals are reproducible: the same seed gives the same resamples. Average several samples of a question
first, since they are not independent.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean

from memagent.data.tasks.depth import bucket_of

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95


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
    """Mean of first minus second: `paired` where all scores are 0 or 1, else from resampling."""
    num_better: int
    """Questions on which the first scored higher."""
    num_worse: int
    num_equal: int
    p_value: float
    """Exact two-sided sign test on the questions that differ; McNemar's test where scores are 0 or 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthBucket:
    """Scores of the questions whose evidence lies between two depths."""

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


def bootstrap(
    values: Sequence[float],
    *,
    confidence: float = CONFIDENCE,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """The bootstrap interval of a mean, widened for few values as Student's t is.

    Equal values give an interval of width zero; use `wilson` for scores of 0 and 1.
    """
    num = len(values)
    if num == 0:
        raise ValueError("there are no values to resample")
    value = fmean(values)
    if min(values) == max(values):
        return Interval(value=value, low=value, high=value, num=num)
    means = _resampled_means(values, num_resamples, seed)
    # the variance of resampled means is too small by (n - 1) / n, and few values have heavier tails
    z = _z(confidence)
    alpha = NormalDist().cdf(-z * _widening(num, z))
    low, high = _quantile(means, alpha), _quantile(means, 1 - alpha)
    return Interval(value=value, low=low, high=high, num=num)


def mean_interval(
    values: Sequence[float], *, confidence: float = CONFIDENCE, seed: int = 0
) -> Interval:
    """The interval of a mean score: Wilson's where every score is 0 or 1, else from resampling."""
    if all(value in (0.0, 1.0) for value in values):
        return wilson(sum(value == 1.0 for value in values), len(values), confidence=confidence)
    return bootstrap(values, confidence=confidence, seed=seed)


# --- comparison -----------------------------------------------------------------------------------


def compare(
    first: Sequence[float],
    second: Sequence[float],
    *,
    confidence: float = CONFIDENCE,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """Two methods by their scores on the same questions, in the same order."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} scores are not of the same questions")
    differences = [one - other for one, other in zip(first, second, strict=True)]
    num_better = sum(difference > 0 for difference in differences)
    num_worse = sum(difference < 0 for difference in differences)
    if all(score in (0.0, 1.0) for score in (*first, *second)):
        difference = paired(num_better, num_worse, len(differences), confidence=confidence)
    else:
        difference = bootstrap(
            differences, confidence=confidence, num_resamples=num_resamples, seed=seed
        )
        if not num_better and not num_worse:  # resampling zeros gives an interval of width zero
            difference = paired(0, 0, len(differences), confidence=confidence)
    return Comparison(
        difference=difference,
        num_better=num_better,
        num_worse=num_worse,
        num_equal=len(differences) - num_better - num_worse,
        p_value=sign_test(num_better, num_worse),
    )


def paired(
    num_better: int, num_worse: int, num: int, *, confidence: float = CONFIDENCE
) -> Interval:
    """The interval of a difference of two proportions on the same questions.

    Half a question is added to each of the four outcomes (Agresti and Min), so it keeps a width where
    no question differs.
    """
    if num_better < 0 or num_worse < 0 or num_better + num_worse > num or num == 0:
        raise ValueError(f"{num_better} better and {num_worse} worse of {num} is impossible")
    total, apart = num + 2, num_better + num_worse + 1
    center = (num_better - num_worse) / total
    margin = _z(confidence) * math.sqrt(apart - (num_better - num_worse) ** 2 / total) / total
    return Interval(
        value=(num_better - num_worse) / num,
        low=max(-1.0, center - margin),
        high=min(1.0, center + margin),
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
    depths: Sequence[float],
    scores: Sequence[float],
    *,
    num_buckets: int,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> list[DepthBucket]:
    """Mean score in each of equally wide buckets of depth."""
    buckets: list[list[float]] = [[] for _ in range(num_buckets)]
    for depth, score in zip(depths, scores, strict=True):
        buckets[bucket_of(depth, num_buckets=num_buckets)].append(score)
    return [
        DepthBucket(
            start=number / num_buckets,
            end=(number + 1) / num_buckets,
            score=mean_interval(bucket, confidence=confidence, seed=seed) if bucket else None,
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


def _widening(num: int, z: float) -> float:
    """Factor on z: the bias of the variance, and Student's t instead of the normal distribution.

    t is z(1 + (z^2 + 1) / 4(n - 1) + ...), the Cornish-Fisher expansion.
    """
    degrees = max(num - 1, 1)
    return math.sqrt(num / degrees) * (1 + (z * z + 1) / (4 * degrees))


def _resampled_means(values: Sequence[float], num_resamples: int, seed: int) -> list[float]:
    """Means of resamples with replacement, sorted."""
    rng = random.Random(seed)
    num = len(values)
    return sorted(math.fsum(rng.choices(values, k=num)) / num for _ in range(num_resamples))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """A quantile of sorted values, interpolated."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)

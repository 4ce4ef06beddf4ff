"""Depths of evidence in a text, and a test of how evenly they are spread.

    depth    0.0 ............ 0.5 ............ 1.0
    bucket   |  0  |  1  |  2  |  3  |  4  |  5  |     bucket_of(0.5, num_buckets=6) == 3

A model trained on evidence at the same places learns where to look. `uniformity_p` is the probability of
counts at least this uneven when every bucket is equally likely:

    >>> round(uniformity_p([24, 31, 28, 17]), 2)  # nothing unusual
    0.22
    >>> uniformity_p([90, 0, 5, 5]) < 1e-40  # not by chance
    True
"""

from __future__ import annotations

import math
from collections.abc import Sequence

NUM_TENTHS = 10


def bucket_of(depth: float, *, num_buckets: int) -> int:
    """The bucket that a depth from 0 to 1 falls into; 1 itself belongs to the last."""
    if not 0.0 <= depth <= 1.0:
        raise ValueError(f"a depth lies between 0 and 1, not at {depth}")
    return min(int(depth * num_buckets), num_buckets - 1)


def bucket_counts(depths: Sequence[float], *, num_buckets: int) -> list[int]:
    """How many depths fall into each bucket."""
    counts = [0] * num_buckets
    for depth in depths:
        counts[bucket_of(depth, num_buckets=num_buckets)] += 1
    return counts


def uniformity_p(counts: Sequence[int]) -> float:
    """Chance of counts at least this uneven if every bucket is equally likely (chi-square test).

    Sound from about five expected counts per bucket. 1.0 where there is nothing to compare.
    """
    if any(count < 0 for count in counts):
        raise ValueError("a count cannot be negative")
    total = sum(counts)
    if len(counts) < 2 or total == 0:
        return 1.0
    expected = total / len(counts)
    statistic = sum((count - expected) ** 2 for count in counts) / expected
    return chi_square_p(statistic, degrees=len(counts) - 1)


def chi_square_p(statistic: float, *, degrees: int) -> float:
    """Chance that a chi-square value of so many degrees of freedom is at least `statistic`."""
    half = statistic / 2
    if half == 0:
        return 1.0
    # two degrees more add one term; the sums begin with one degree and with two
    p = math.erfc(math.sqrt(half)) if degrees % 2 else math.exp(-half)
    for term in range(2 - degrees % 2, degrees, 2):
        p += math.exp(term / 2 * math.log(half) - half - math.lgamma(term / 2 + 1))
    return p

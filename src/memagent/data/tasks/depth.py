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

MAX_TERMS = 100_000
PRECISION = 1e-15


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
    return upper_gamma(degrees / 2, statistic / 2)


def upper_gamma(a: float, x: float) -> float:
    """The regularised upper incomplete gamma function, Q(a, x), for a > 0 and x >= 0."""
    if x <= 0.0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1.0:
        return max(0.0, 1.0 - scale * _lower_series(a, x))
    return scale * _upper_fraction(a, x)


def _lower_series(a: float, x: float) -> float:
    """1/a + x/(a(a+1)) + x^2/(a(a+1)(a+2)) + ...; quick for x below a + 1."""
    term = total = 1.0 / a
    for n in range(1, MAX_TERMS):
        term *= x / (a + n)
        total += term
        if term < total * PRECISION:
            break
    return total


def _upper_fraction(a: float, x: float) -> float:
    """1/(x+1-a - 1(1-a)/(x+3-a - 2(2-a)/(x+5-a - ...))), forwards; quick for x above a + 1."""
    tiny = 1e-300
    b = x + 1.0 - a
    c = 1.0 / tiny
    d = 1.0 / b
    value = d
    for n in range(1, MAX_TERMS):
        numerator = -n * (n - a)
        b += 2.0
        d = 1.0 / _away_from_zero(numerator * d + b, tiny)
        c = _away_from_zero(b + numerator / c, tiny)
        value *= c * d
        if abs(c * d - 1.0) < PRECISION:
            break
    return value


def _away_from_zero(value: float, tiny: float) -> float:
    return tiny if abs(value) < tiny else value

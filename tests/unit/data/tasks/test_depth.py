"""Depths, buckets and the test for an even spread."""

import math
import random

import pytest

from memagent.data.tasks.lengths import bucket_counts, bucket_of, chi_square_p, uniformity_p


def test_the_last_bucket_holds_the_very_end() -> None:
    places = (0.0, 0.25, 0.49, 0.75, 1.0)
    assert [bucket_of(depth, num_buckets=4) for depth in places] == [0, 1, 1, 3, 3]
    assert bucket_counts([0.0, 0.1, 0.6, 1.0], num_buckets=3) == [2, 1, 1]


@pytest.mark.parametrize("depth", [-0.01, 1.01, math.nan])
def test_a_depth_outside_the_text_is_refused(depth: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        bucket_of(depth, num_buckets=4)


@pytest.mark.parametrize(
    ("statistic", "degrees", "p"),
    [
        (3.841458820694124, 1, 0.05),
        (6.634896601021213, 1, 0.01),
        (18.307038053275146, 10, 0.05),
        (124.34211340400407, 100, 0.05),
        (2.0, 2, math.exp(-1)),
        (0.0, 5, 1.0),
    ],
)
def test_chi_square_agrees_with_published_tables(statistic: float, degrees: int, p: float) -> None:
    assert chi_square_p(statistic, degrees=degrees) == pytest.approx(p, rel=1e-9)


def test_nothing_to_compare_is_not_suspicious() -> None:
    assert uniformity_p([]) == uniformity_p([7]) == uniformity_p([0, 0, 0]) == 1.0
    assert uniformity_p([5, 5, 5, 5]) == 1.0


def test_even_depths_are_rejected_about_one_time_in_twenty() -> None:
    rng = random.Random(3)
    rejected = 0
    for _ in range(600):
        depths = [rng.random() for _ in range(200)]
        rejected += uniformity_p(bucket_counts(depths, num_buckets=10)) < 0.05
    assert 15 <= rejected <= 47  # 30 expected; three standard errors on either side

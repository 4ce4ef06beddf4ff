"""The simulated schedule: hand-computed cases, and laws that hold for any load."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memagent.rl.planning.simulation import (
    ReplyLengths,
    Schedule,
    SimulatedCall,
    clipped_mean,
    log_median,
    simulate,
)

CALL = SimulatedCall(shared_seconds=2.0, own_seconds=0.5, reply_tokens=100, max_reply=100)
EVEN = Schedule(
    calls=(CALL,),
    prompts=1,
    group_size=4,
    num_replicas=1,
    max_rows=8,
    step_seconds=0.1,
    row_seconds=0.0,
    train_seconds=7.0,
    publish_seconds=0.0,
    host_seconds=0.0,
    sigma=0.0,
)
"""Four rollouts whose reply has 99 tokens."""


def test_a_synchronous_step_is_prompts_then_replies_then_the_update() -> None:
    done = simulate(EVEN)
    assert done.rollout_seconds == pytest.approx(2.0 + 4 * 0.5 + 99 * 0.1)
    assert done.step_seconds == pytest.approx(done.rollout_seconds + 7.0)
    assert done.mean_rows == pytest.approx(4 * 9.9 / 13.9)


def test_more_rows_make_a_decoding_step_longer() -> None:
    done = simulate(replace(EVEN, row_seconds=0.05))
    assert done.rollout_seconds == pytest.approx(4.0 + 99 * (0.1 + 4 * 0.05))


def test_rollouts_beyond_the_cache_wait() -> None:
    done = simulate(replace(EVEN, max_rows=2))
    assert done.rollout_seconds == pytest.approx(2.0 + 4 * 0.5 + 2 * 99 * 0.1)


def test_calls_of_a_rollout_follow_each_other() -> None:
    done = simulate(replace(EVEN, calls=(CALL, CALL)))
    assert done.rollout_seconds == pytest.approx(2 * 13.9)


def test_a_driver_that_takes_too_long_for_a_call_decides_the_speed() -> None:
    done = simulate(replace(EVEN, host_seconds=10.0))
    assert done.driver_busy > 0.6
    assert done.rollout_seconds > 4 * 10.0


def test_an_asynchronous_step_takes_as_long_as_the_slower_side() -> None:
    slow_trainer = replace(EVEN, train_seconds=50.0, max_staleness=1)
    done = simulate(slow_trainer, num_steps=8)
    assert done.step_seconds == pytest.approx(50.0, rel=0.02)
    assert done.trainer_busy > 0.9
    slow_engines = replace(EVEN, train_seconds=1.0, max_staleness=4, max_rows=4)
    done = simulate(slow_engines, num_steps=12)
    assert done.engines_busy > 0.95
    assert done.step_seconds == pytest.approx(13.9, rel=0.05)


def test_staleness_pays_with_skewed_replies() -> None:
    calls = (SimulatedCall(shared_seconds=0, own_seconds=0, reply_tokens=100, max_reply=2000),) * 4
    skewed = replace(
        EVEN,
        calls=calls,
        prompts=16,
        group_size=8,
        num_replicas=8,
        max_rows=64,
        row_seconds=0.002,
        train_seconds=60.0,
        sigma=1.3,
    )
    waiting = simulate(skewed, num_steps=6).step_seconds
    flowing = simulate(replace(skewed, max_staleness=2), num_steps=12).step_seconds
    assert waiting / flowing > 1.8


def test_the_same_seed_gives_the_same_schedule_and_another_one_another() -> None:
    skewed = replace(EVEN, calls=(replace(CALL, max_reply=400),), sigma=1.0, prompts=4)
    assert simulate(skewed) == simulate(skewed)
    assert simulate(skewed) != simulate(replace(skewed, seed=1))


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.integers(1, 5),
    group_size=st.integers(2, 5),
    num_replicas=st.integers(1, 12),
    max_staleness=st.integers(0, 3),
    train_seconds=st.floats(0.1, 60),
    sigma=st.floats(0, 1.5),
    seed=st.integers(0, 99),
)
def test_no_rollout_is_older_than_the_bound_and_nothing_is_busier_than_always(
    prompts: int,
    group_size: int,
    num_replicas: int,
    max_staleness: int,
    train_seconds: float,
    sigma: float,
    seed: int,
) -> None:
    schedule = replace(
        EVEN,
        prompts=prompts,
        group_size=group_size,
        num_replicas=num_replicas,
        max_staleness=max_staleness,
        train_seconds=train_seconds,
        sigma=sigma,
        seed=seed,
    )
    done = simulate(schedule, num_steps=5)
    assert done.max_age <= max_staleness
    assert done.step_seconds >= train_seconds * (1 - 1e-9)
    for share in (done.trainer_busy, done.engines_busy, done.driver_busy):
        assert 0 <= share <= 1 + 1e-9


def test_lengths_have_the_mean_that_is_asked_for_after_the_cut() -> None:
    call = replace(CALL, reply_tokens=130, max_reply=512)
    lengths = ReplyLengths((call,), sigma=1.15, correlation=0.3)
    rng = random.Random(1)
    drawn = [lengths.draw(rng)[0] for _ in range(4000)]
    assert fmean(drawn) == pytest.approx(130, rel=0.05)
    # reader_1.5b_keep, step 27: 0.29 cut replies in a rollout of 5.3 sections
    assert fmean(length == 512 for length in drawn) == pytest.approx(0.054, abs=0.02)


@given(st.floats(1, 400), st.floats(0.1, 2.0))
def test_the_median_is_found_for_any_mean_below_the_limit(mean: float, sigma: float) -> None:
    assert clipped_mean(log_median(mean, sigma, 512), sigma, 512) == pytest.approx(mean, rel=1e-3)


def test_without_skew_every_reply_has_the_mean() -> None:
    assert clipped_mean(math.log(40), 0.0, 512) == pytest.approx(40)
    assert clipped_mean(math.log(800), 0.0, 512) == 512

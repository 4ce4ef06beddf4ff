"""Which groups start and which are taken: no group is older than allowed, none waits forever."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from memagent.rl.rollouts.admission import Admission


def filled(admission: Admission, first: int = 0) -> int:
    """Start groups while they may; the next position."""
    while admission.may_start:
        admission.start(first)
        first += 1
    return first


def test_groups_of_several_steps_start_ahead() -> None:
    admission = Admission(prompts=4, max_staleness=2, max_unwanted=0)
    assert filled(admission) == 12
    assert admission.take() is None
    for position in (9, 3, 5, 11):
        admission.finish(position)
    assert admission.take() == [3, 5, 9, 11]
    assert filled(admission, 12) == 12, "of the same weights, for two more steps"
    admission.begin_step(1)
    assert filled(admission, 12) == 16


def test_without_staleness_a_step_takes_what_was_started_for_it() -> None:
    admission = Admission(prompts=3, max_staleness=0, max_unwanted=9)
    assert filled(admission) == 3
    admission.finish(2)
    admission.discard(0)
    assert filled(admission, 3) == 4, "another one instead of the one that is not wanted"
    admission.finish(1)
    assert admission.take() is None
    admission.finish(3)
    assert admission.take() == [1, 2, 3]
    assert admission.outstanding == []


def test_a_step_waits_for_a_group_that_would_get_too_old() -> None:
    admission = Admission(prompts=2, max_staleness=1, max_unwanted=0)
    filled(admission)
    admission.finish(2)
    admission.finish(3)
    assert admission.take() == [2, 3]
    admission.begin_step(1)
    filled(admission, 4)
    admission.finish(4)
    admission.finish(5)
    assert admission.take() is None, "0 and 1 are two steps old after this step"
    admission.finish(0)
    admission.finish(1)
    assert admission.take() == [0, 1]
    admission.begin_step(2)
    assert admission.take() == [4, 5]


def test_too_many_unwanted_groups_make_a_step_smaller() -> None:
    admission = Admission(prompts=2, max_staleness=0, max_unwanted=1)
    filled(admission)
    admission.discard(0)
    admission.discard(1)
    assert filled(admission, 2) == 3, "one is replaced, the other is not"
    assert admission.take() is None
    admission.finish(2)
    assert admission.take() == [2]


def test_a_group_of_an_engine_that_was_behind_is_dropped() -> None:
    admission = Admission(prompts=1, max_staleness=1, max_unwanted=0)
    admission.begin_step(5)
    filled(admission)
    admission.finish(0, oldest=3)
    assert admission.drop_stale() == [0]
    admission.finish(1, oldest=4)
    assert (admission.drop_stale(), admission.take()) == ([], [1])


def test_no_group_is_started_that_no_step_will_take() -> None:
    admission = Admission(prompts=2, max_staleness=4, max_unwanted=0, num_steps=10)
    admission.begin_step(8)
    assert filled(admission) == 4


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    prompts=st.integers(1, 5),
    max_staleness=st.integers(0, 4),
    unwanted=st.sampled_from([0.0, 0.3]),
    behind=st.sampled_from([0.0, 0.2]),
    slow=st.sampled_from([0.0, 0.1]),
)
def test_no_sample_exceeds_the_bound_and_no_step_waits_forever(
    seed: int, prompts: int, max_staleness: int, unwanted: float, behind: float, slow: float
) -> None:
    """Groups finish in any order, some much later, some sampled by an engine with older weights."""
    rng = random.Random(seed)
    admission = Admission(prompts=prompts, max_staleness=max_staleness, max_unwanted=2 * prompts)
    position, versions, taken_once = 0, dict[int, int](), set[int]()
    due: dict[int, float] = {}
    clock = 0.0
    for version in range(12):
        admission.begin_step(version)
        while True:
            while admission.may_start:
                admission.start(position)
                versions[position] = max(0, version - (2 if rng.random() < behind else 0))
                late = 1000.0 if rng.random() < slow else 1.0
                due[position] = clock + rng.expovariate(1) * late
                position += 1
            dropped = admission.drop_stale()
            assert all(version - versions[one] > max_staleness for one in dropped)
            if dropped:
                continue  # others start instead
            if (taken := admission.take()) is not None:
                break
            assert due, "a step that waits has something to wait for"
            first = min(due, key=lambda one: due[one])
            clock = due.pop(first)
            if rng.random() < unwanted:
                admission.discard(first)
            else:
                admission.finish(first, oldest=versions[first])
        assert len(taken) <= prompts
        assert unwanted or len(taken) == prompts
        for one in taken:
            assert 0 <= version - versions[one] <= max_staleness
            assert one not in taken_once
        taken_once.update(taken)
        while admission.may_start:  # while the trainer updates, with the weights before it
            admission.start(position)
            versions[position], due[position] = version, clock + rng.expovariate(1)
            position += 1
        assert len(admission.outstanding) <= (max_staleness + 1) * prompts

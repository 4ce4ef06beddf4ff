"""Kept readings of each mode by a model whose every reply is different: the same steps come out again."""

from __future__ import annotations

import pytest

from tests.support.noisy_readings import (
    MODES,
    QUESTIONS,
    comparable,
    document,
    kept_traces,
    noisy_reader,
)


@pytest.mark.parametrize("mode", MODES)
def test_a_reading_makes_the_steps_that_were_kept(mode: str) -> None:
    different = QUESTIONS[:2]
    traces = noisy_reader(mode).ask_many(different, document())
    assert list(map(comparable, traces)) == list(map(comparable, kept_traces(mode)[:2]))


def test_kept_readings_come_to_what_each_mode_can_do() -> None:
    steps = {mode: [step for trace in kept_traces(mode) for step in trace.steps] for mode in MODES}
    flags = {mode: {flag for step in steps[mode] for flag in step.flags} for mode in MODES}
    assert "memory_kept" in flags["in_order"] & flags["keep"]
    assert "stopped_early" in flags["stop_early"] & flags["relevance"]
    assert "nothing" in flags["parallel"]
    assert max(step.round or 0 for step in steps["parallel"]) > 1
    assert any(step.kind == "merge" for step in steps["parallel_memories"])
    for mode in ("evidence", "copied", "items", "parallel_evidence"):
        assert any(quote.is_found for step in steps[mode] for quote in step.quotes)
    assert any(step.cited for step in steps["evidence"])
    starts = [step.start or 0 for step in kept_traces("relevance")[0].steps if step.section]
    assert starts != sorted(starts)

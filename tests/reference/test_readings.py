"""Kept readings of each mode by a model whose every reply is different: the same steps come out again."""

import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from memagent.agent.model_call import Limits
from memagent.agent.trace import Trace
from memagent.errors import LimitReached
from memagent.replies import REPLIES
from memagent.run_files import read_lines
from tests.support.noisy_readings import (
    FOLDER,
    MODES,
    QUESTIONS,
    NoisyModel,
    comparable,
    document,
    kept_traces,
    noisy_reader,
)

GROWN = document().text + "On day 14 the miller paid 99 crowns. Rain fell.\n" * 12


def no_reply(*call: object) -> str:
    raise AssertionError("a call was made")


def num_replies(run: Path) -> int:
    return sum(1 for _ in read_lines(run / REPLIES))


@pytest.mark.parametrize("mode", MODES)
def test_a_reading_makes_the_steps_that_were_kept(mode: str) -> None:
    different = QUESTIONS[:2]
    traces = noisy_reader(mode).ask_many(different, document())
    assert list(map(comparable, traces)) == list(map(comparable, kept_traces(mode)[:2]))


@pytest.mark.parametrize("mode", MODES)
def test_a_kept_run_is_read_again_without_a_call(mode: str, tmp_path: Path) -> None:
    """If this fails, prompts have changed: whoever resumes a run would pay for all of it again."""
    run = shutil.copytree(FOLDER / mode, tmp_path / "run")
    kept = (run / REPLIES).read_bytes()
    traces = noisy_reader(mode, no_reply).ask_many(QUESTIONS, document(), run_dir=run)
    assert list(map(comparable, traces)) == list(map(comparable, kept_traces(mode)))
    assert list(map(comparable, Trace.load(run))) == list(map(comparable, traces))
    assert (run / REPLIES).read_bytes() == kept


@pytest.mark.parametrize("mode", MODES)
def test_a_reading_that_is_stopped_after_each_fourth_call_repeats_none(
    mode: str, tmp_path: Path
) -> None:
    """Also where two questions are the same, so that their prompts are."""
    run, model, num_stops = tmp_path / "run", NoisyModel(), 0
    traces: list[Trace] = []
    while not traces:
        reader = noisy_reader(mode, model)
        num_before = num_replies(run) if num_stops else 0
        reader.limits = Limits(max_calls=num_before + 4)
        with suppress(LimitReached):
            traces = reader.ask_many(QUESTIONS, document(), run_dir=run)
        assert num_replies(run) <= num_before + 4
        num_stops += 1
    assert num_stops > 3
    assert num_replies(run) == sum(trace.usage.calls for trace in traces)
    replies = [step.reply for trace in traces for step in trace.steps]
    used = [reply for reply in replies if reply.startswith(("Day ", "Merged ", "Answer "))]
    assert len(set(used)) == len(used) > 10


@pytest.mark.parametrize("mode", MODES)
def test_a_text_that_has_grown_asks_for_what_is_new(mode: str, tmp_path: Path) -> None:
    grown, question = type(document()).from_text(GROWN, source="pears.txt"), QUESTIONS[:1]
    noisy_reader(mode).ask_many(question, document(), run_dir=tmp_path / "first")
    [trace] = noisy_reader(mode).ask_many(question, grown, continues=tmp_path / "first")
    num_carried = sum("carried" in step.flags for step in trace.steps)
    assert num_carried > 0 or mode == "relevance", "another text has another order"
    assert trace.usage.calls == sum(
        step.usage.calls for step in trace.steps if "carried" not in step.flags
    )


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

"""Texts that grow: what was read is not read again, and the answer is that of a whole reading."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memagent.agent.reader import Reader
from memagent.agent.trace import Trace
from memagent.engines.scripted import ScriptedEngine
from memagent.errors import ConfigError, EngineError, RunError
from memagent.types import Message, Sampling

SMALL = {"window": 4000, "chunk_tokens": 60, "memory_tokens": 80, "answer_tokens": 60}
QUESTION = "What failed?"


def digest(messages: Sequence[Message], sampling: Sampling) -> str:
    """A reply that depends on every character of the prompt."""
    return hashlib.sha256(json.dumps(list(messages)).encode()).hexdigest()


def lines(first: int, last: int) -> str:
    return "".join(f"{number:04} the pump ran as ever.\n" for number in range(first, last))


def reader(**given: object) -> Reader:
    return Reader(ScriptedEngine(digest), tokenizer="bytes", **{**SMALL, **given})  # type: ignore[arg-type]


def calls(one: Reader) -> int:
    assert isinstance(one.engine, ScriptedEngine)
    return len(one.engine.prompts)


def result(trace: Trace) -> list[object]:
    return [(step.kind, step.index, step.reply, step.memory, step.section) for step in trace.steps]


def test_after_one_percent_was_appended_one_percent_of_the_calls_are_made(tmp_path: Path) -> None:
    first = reader()
    first.ask(QUESTION, lines(0, 2000), run_dir=tmp_path / "a")
    second, whole = reader(), reader()
    trace = second.ask(QUESTION, lines(0, 2020), run_dir=tmp_path / "b", continues=tmp_path / "a")
    expected = whole.ask(QUESTION, lines(0, 2020))
    assert result(trace) == result(expected)
    assert calls(second) <= 0.01 * calls(whole) + 2
    assert trace.usage.calls == calls(second)
    num_carried = sum("carried" in step.flags for step in trace.steps)
    assert num_carried == len(trace.steps) - calls(second)


def test_a_change_in_the_middle_is_read_again_from_its_section_on(tmp_path: Path) -> None:
    reader().ask(QUESTION, lines(0, 100), run_dir=tmp_path / "a")
    changed = lines(0, 60) + "0060 the pump FAILED today\n" + lines(61, 100)
    second, whole = reader(), reader()
    trace = second.ask(QUESTION, changed, continues=tmp_path / "a")
    assert result(trace) == result(whole.ask(QUESTION, changed))
    carried = [step for step in trace.steps if "carried" in step.flags]
    assert carried
    assert all(step.section and step.section.end <= changed.index("0060") for step in carried)


def test_an_unchanged_text_costs_nothing(tmp_path: Path) -> None:
    trace = reader().ask(QUESTION, lines(0, 30), run_dir=tmp_path / "a")
    again = reader()
    same = again.ask(QUESTION, lines(0, 30), run_dir=tmp_path / "b", continues=tmp_path / "a")
    assert calls(again) == 0
    assert same.answer == trace.answer
    [stored] = Trace.load(tmp_path / "b")
    assert stored == same


def test_a_run_can_be_continued_again_and_again_and_after_an_interruption(tmp_path: Path) -> None:
    replies = [f"memory {number}" for number in range(9)]
    broken = Reader(ScriptedEngine(replies), tokenizer="bytes", **SMALL)  # type: ignore[arg-type]
    with pytest.raises(EngineError):
        broken.ask(QUESTION, lines(0, 60), run_dir=tmp_path / "a")
    following = Reader(
        ScriptedEngine([f"later {number}" for number in range(90)]),
        tokenizer="bytes",
        **SMALL,  # type: ignore[arg-type]
    )
    trace = following.ask(QUESTION, lines(0, 60), run_dir=tmp_path / "b", continues=tmp_path / "a")
    assert [step.reply for step in trace.steps[:10]] == [*replies, "later 0"]
    grown = following.ask(QUESTION, lines(0, 90), run_dir=tmp_path / "c", continues=tmp_path / "b")
    assert grown.steps[9].reply == "later 0"
    assert "carried" in grown.steps[9].flags


def test_other_questions_and_settings_are_refused(tmp_path: Path) -> None:
    reader().ask(QUESTION, lines(0, 20), run_dir=tmp_path / "a")
    with pytest.raises(RunError, match=r"cannot continue .*questions was 'What failed"):
        reader().ask("What else?", lines(0, 20), continues=tmp_path / "a")
    with pytest.raises(RunError, match="memory_tokens was 80, now 70"):
        reader(memory_tokens=70).ask(QUESTION, lines(0, 20), continues=tmp_path / "a")
    with pytest.raises(ConfigError, match="only readings in order can be continued"):
        reader(mode="parallel").ask(QUESTION, lines(0, 20), continues=tmp_path / "a")


def test_a_run_of_an_earlier_version_is_continued_where_its_text_is_the_beginning(
    tmp_path: Path,
) -> None:
    reader().ask(QUESTION, lines(0, 100), run_dir=tmp_path / "a")
    journal = tmp_path / "a" / "steps.jsonl"
    old = [json.loads(line) for line in journal.read_text().splitlines()]
    kept = [{"question": line["question"], "step": line["step"]} for line in old]
    journal.write_text("".join(json.dumps(line) + "\n" for line in kept))
    grown = reader()
    grown.ask(QUESTION, lines(0, 105), continues=tmp_path / "a")
    assert calls(grown) <= 5
    changed = reader()
    changed.ask(QUESTION, "x" + lines(0, 105), continues=tmp_path / "a")
    assert calls(changed) > 40


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    text=st.text("ab. \n", min_size=1, max_size=600),
    cut=st.floats(0, 1),
    changed=st.text("xy. \n", max_size=300),
    order=st.sampled_from(["text", "relevance"]),
    stop=st.booleans(),
)
def test_continuing_is_a_whole_reading_whatever_changed(
    text: str,
    cut: float,
    changed: str,
    order: str,
    stop: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    modes = {"order": order, "stop_early": stop, "chunk_tokens": 32}
    reader(**modes).ask(QUESTION, text, run_dir=folder / "a")
    new = text[: int(cut * len(text))] + changed or "x"
    trace = reader(**modes).ask(QUESTION, new, run_dir=folder / "b", continues=folder / "a")
    assert result(trace) == result(reader(**modes).ask(QUESTION, new))

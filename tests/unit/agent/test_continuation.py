"""Texts that grow: what was read is not read again, and the answer is that of a whole reading."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from memagent.agent.reader import Reader
from memagent.agent.trace import Trace
from memagent.agent.work import done_before, plan_reading
from memagent.engines.scripted import ScriptedEngine
from memagent.errors import EngineError, RunError
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
    with pytest.raises(RunError, match="mode was in_order, now parallel"):
        reader(mode="parallel").ask(QUESTION, lines(0, 20), continues=tmp_path / "a")


# --- sections that are read apart from each other -----------------------------------------------------


def notes(messages: Sequence[Message], sampling: Sampling) -> str:
    """A note on every hundredth section, which a merge keeps; a memory of a few letters elsewhere."""
    prompt = messages[-1]["content"]
    found = sorted({word for word in prompt.split() if word.isdigit() and word.endswith("00")})
    if "<note sections=" in prompt:
        return " ".join(found) + "\nMissing: nothing"
    return " ".join(found) or "Nothing."


def unordered(trace: Trace) -> list[tuple[object, ...]]:
    """What was done; the order of calls that are in flight at once is left to chance."""
    done = [
        (step.kind, step.round or 0, step.section.start if step.section else -1, step.memory)
        for step in trace.steps
    ]
    return sorted(done)


def test_apart_too_one_percent_more_text_costs_one_percent_of_the_calls(tmp_path: Path) -> None:
    first, second, whole = (
        Reader(ScriptedEngine(notes), tokenizer="bytes", **SMALL, mode="parallel")  # type: ignore[arg-type]
        for _ in range(3)
    )
    first.ask(QUESTION, lines(0, 1000), run_dir=tmp_path / "a")
    trace = second.ask(QUESTION, lines(0, 1010), continues=tmp_path / "a")
    expected = whole.ask(QUESTION, lines(0, 1010))
    assert unordered(trace) == unordered(expected)
    assert trace.answer == expected.answer
    assert calls(whole) > 460
    assert calls(second) <= 0.01 * calls(whole) + 4  # the last section, merges, the answer
    assert trace.usage.calls == calls(second)


def test_a_section_is_not_read_again_where_it_has_moved(tmp_path: Path) -> None:
    text = "".join(f"Paragraph {number:02}: the pump ran as it did.\n\n" for number in range(40))
    settings: dict[str, object] = {"mode": "parallel", "evidence": True, "chunk_tokens": 50}

    def quote(messages: Sequence[Message], sampling: Sampling) -> str:
        prompt = messages[-1]["content"]
        if not prompt.startswith("<section>"):
            return "Pumps.\nSources: 1, 30"
        return f"<quote>{prompt.split()[1]} {prompt.split()[2]}</quote>"

    one, other, whole = (
        Reader(ScriptedEngine(quote), tokenizer="bytes", **{**SMALL, **settings})  # type: ignore[arg-type]
        for _ in range(3)
    )
    one.ask(QUESTION, text, run_dir=tmp_path / "a")
    changed = text.replace(
        "Paragraph 20: the pump ran as it did", "Paragraph 20: the pump ran as it does"
    )
    trace = other.ask(QUESTION, changed, continues=tmp_path / "a")
    again = [step.section for step in trace.steps if step.section and "carried" not in step.flags]
    assert 1 <= len(again) <= 2
    assert any(one.start <= changed.index("does") < one.end for one in again)
    assert trace.ledger == whole.ask(QUESTION, changed).ledger
    assert len(trace.ledger) > 20
    assert all(changed[slice(*quote.span)] == quote.text for quote in trace.ledger)


def test_a_damaged_file_of_replies_is_named(tmp_path: Path) -> None:
    mode: dict[str, object] = {"mode": "parallel"}
    reader(**mode).ask(QUESTION, lines(0, 30), run_dir=tmp_path / "a")
    reader(**mode).ask(QUESTION, lines(0, 33), run_dir=tmp_path / "b", continues=tmp_path / "a")
    (tmp_path / "b" / "replies.jsonl").write_text('{"scope": "x"}\n{}\n')
    with pytest.raises(RunError, match=r"replies.jsonl, line 1, is damaged"):
        reader(**mode).ask(QUESTION, lines(0, 33), run_dir=tmp_path / "b")


@pytest.mark.parametrize("mode", [{}, {"mode": "parallel", "rounds": 1}])
async def test_a_plan_leaves_out_what_an_earlier_run_read(
    mode: dict[str, object], tmp_path: Path
) -> None:
    text, more = lines(0, 200), lines(0, 220)
    one = Reader(ScriptedEngine(digest), tokenizer="bytes", **{**SMALL, **mode})  # type: ignore[arg-type]
    await one.aask("what?", text, run_dir=tmp_path / "run")
    same, longer = one.chunks(text), one.chunks(more)

    done = await done_before(one, ["what?"], same, resumes=tmp_path / "run")
    assert plan_reading(one, ["what?"], same, done=done).num_calls == 0
    done = await done_before(one, ["what?"], longer, continues=tmp_path / "run")
    plan = plan_reading(one, ["what?"], longer, done=done)
    whole = plan_reading(one, ["what?"], longer)
    trace = await one.aask("what?", more, continues=tmp_path / "run")
    new = [step for step in trace.steps if "carried" not in step.flags and step.kind != "merge"]
    assert plan.num_calls == len(new) < whole.num_calls
    assert plan.prompt_tokens < whole.prompt_tokens

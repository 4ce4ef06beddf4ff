"""Steps as the page shows them, from readings, items of evaluations and rollouts.

line ─▶ Step ─▶ step_head: what the timeline shows of it
            └─▶ step_detail: memory, its difference to the one before, quotes, usage
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from memagent.agent.evidence.answers import with_ledger
from memagent.agent.evidence.ledger import ledger_of, without_sources
from memagent.agent.evidence.replies import shielded
from memagent.agent.journal import read_reading
from memagent.agent.parallel import place_of, with_missing
from memagent.agent.prompts import BOX, PROMPT_SETS, PromptSet, parse_prompts
from memagent.agent.trace import Step, Trace, is_sound, journal_entry
from memagent.documents.document import Document
from memagent.errors import ConfigError, RunError
from memagent.rewards.text import unboxed
from memagent.runs import JOURNAL
from memagent.types import Message
from memagent.viewer.line_index import LineIndex

Json = dict[str, Any]
MAX_SHOWN = 2000
"""Characters of a question or an answer in a list."""


# --- the timeline -----------------------------------------------------------------------------------


class HeadMaker:
    """Makes heads of the steps of one trace, in their order."""

    def __init__(self) -> None:
        self._memory = Counter[str]()

    def head(self, step: Step) -> Json:
        """What the timeline shows of a step."""
        after = words(step.memory)
        is_first = is_alone(step) or step.index == 0
        before = Counter[str]() if is_first else self._memory
        added, removed = (0, 0) if step.kind == "answer" else num_changed(before, after)
        self._memory = after
        return step_head(step, added, removed)


def is_alone(step: Step) -> bool:
    """Whether a step continues no memory: a section of a parallel reading, or a merge."""
    return bool(step.inputs) or step.round is not None


def answer_of(step: Step) -> str | None:
    """The answer, without the line that names its sources; None for other steps."""
    if step.kind != "answer":
        return None
    return step.reply if step.cited is None else without_sources(step.reply)


def step_head(step: Step, added: int, removed: int) -> Json:
    """What the timeline shows of a step. Fields that hold nothing are left out."""
    section = step.section
    head: Json = {
        "index": step.index,
        "kind": step.kind,
        "where": ", ".join(map(str, section.places)) if section else "",
        "start": section.start if section else None,
        "end": section.end if section else None,
        "tokens": section.num_tokens if section else 0,
        "memory_chars": len(step.memory),
        "added": added,
        "removed": removed,
        "flags": step.flags,
        "prompt_tokens": step.usage.prompt_tokens,
        "completion_tokens": step.usage.completion_tokens,
        "cached_tokens": step.usage.cached_tokens,
        "seconds": step.seconds,
        "started": step.started,
    }
    more = {
        "round": step.round,
        "inputs": list(step.inputs) or None,
        "num_quotes": len(step.quotes) or None,
    }
    return head | {name: value for name, value in more.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTrace:
    """A trace of any run: what is shown above the timeline, the timeline, and its steps on demand."""

    question: str
    heads: Sequence[Json]
    step_at: Callable[[int], Step]
    """The whole step at a position of `heads`."""
    model: str = ""
    source: str = ""
    document_sha256: str = ""
    prompts: PromptSet | None = None
    """The wording of the calls, where it is known."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of reading."""
    title: Json = field(default_factory=dict)
    """What kind of run it is of: scores, rewards."""

    def overview(self) -> Json:
        """The trace without the texts of its steps."""
        last = self.step_at(len(self.heads) - 1) if self.heads else None
        answer = answer_of(last) if last is not None else None
        return {
            "question": self.question,
            "answer": None if answer is None else shown_answer(answer, self.prompts),
            "citations": citations(self, last.cited) if last is not None and last.cited else [],
            "memory": last.memory if last is not None and answer is None else None,
            "model": self.model,
            "source": self.source,
            "steps": list(self.heads),
            "totals": totals(self.heads),
            **self.title,
        }


def shown_answer(answer: str, prompts: PromptSet | None) -> str:
    """An answer as people read it; as it came where the wording of its prompt is not known."""
    return answer if prompts is None else unboxed(answer, is_asked=BOX in prompts.answer)


def totals(heads: Sequence[Json]) -> Json:
    """Tokens and time of all steps."""
    names = ("prompt_tokens", "completion_tokens", "cached_tokens", "seconds")
    sums: Json = {name: sum(head[name] for head in heads) for name in names}
    first = (head for head in heads if head["kind"] == "read" and head.get("round") in (None, 1))
    return {**sums, "sections": sum(1 for _ in first)}


def citations(trace: StoredTrace, cited: Sequence[int]) -> list[Json]:
    """The quotes that an answer rests on, each with the step that found it."""
    quoted = [
        (number, quote)
        for number, head in enumerate(trace.heads)
        if head.get("num_quotes")
        for quote in trace.step_at(number).quotes
    ]
    ledger = ledger_of(quote for _, quote in quoted)
    step_of_span = {quote.span: number for number, quote in reversed(quoted) if quote.is_found}
    return [
        {
            "number": number,
            "text": ledger[number - 1].text,
            "where": ", ".join(map(str, ledger[number - 1].places)),
            "start": ledger[number - 1].start,
            "step": step_of_span[ledger[number - 1].span],
        }
        for number in cited
        if 0 < number <= len(ledger)
    ]


def step_detail(trace: StoredTrace, number: int, document: Document | None) -> Json:
    """The texts of one step: its memory and what changed in it, the reply, quotes."""
    step = step_of(trace, number)
    before = memory_before(trace, number)
    return {
        **trace.heads[number],
        "number": number,
        "memory": step.memory,
        "diff": None if before is None else word_diff(before, step.memory),
        "reply": step.reply if step.kind == "answer" or step.reply != step.memory else None,
        "reasoning": step.reasoning,
        "missing": step.missing,
        "num_attempts": step.num_attempts,
        "is_estimated": step.usage.is_estimated,
        "quotes": [
            {
                "text": quote.text,
                "start": quote.start,
                "end": quote.end,
                "where": ", ".join(map(str, quote.places)),
                "item": quote.item,
                "value": quote.value,
            }
            for quote in step.quotes
        ],
        "cited": None if step.cited is None else list(step.cited),
        "unread": [list(span) for span in step.unread],
        "has_text": document is not None and step.section is not None,
    }


def step_section(trace: StoredTrace, number: int, document: Document | None) -> Json:
    """The text of the section that a step read, and where its quotes are in it."""
    step = step_of(trace, number)
    if document is None or step.section is None:
        raise RunError("the text of this section is not known here")
    start, end = step.section.start, min(step.section.end, len(document.text))
    marks = sorted(
        [quote.start - start, quote.end - start]
        for quote in step.quotes
        if quote.start is not None and quote.end is not None
        if start <= quote.start < quote.end <= end
    )
    return {"start": start, "end": end, "text": document.text[start:end], "marks": marks}


def step_of(trace: StoredTrace, number: int) -> Step:
    """A step of a trace. Raises RunError where there is none."""
    if not 0 <= number < len(trace.heads):
        raise RunError(f"there is no step {number}")
    return trace.step_at(number)


def memory_before(trace: StoredTrace, number: int) -> str | None:
    """The memory that a step was shown; None where it continues none."""
    step = step_of(trace, number)
    if step.kind == "answer":
        return step.memory
    if is_alone(step):
        return None
    return trace.step_at(number - 1).memory if number else ""


# --- traces inside lines of other files -------------------------------------------------------------


def embedded_trace(
    values: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
    title: Json,
    *,
    question: str = "",
) -> StoredTrace:
    """The trace inside a line of another file. Raises RunError where it is damaged."""
    if not values:
        values = dict.fromkeys(("model", "prompts", "source", "document_sha256"), "")
        values |= {"question": question, "steps": ()}
    try:
        trace = Trace.from_dict(values)
    except (AttributeError, ValueError):
        raise RunError("the trace is damaged") from None
    if not all(map(is_sound, trace.steps)):
        raise RunError("the trace is damaged")
    maker = HeadMaker()
    return StoredTrace(
        question=trace.question or question,
        heads=[maker.head(step) for step in trace.steps],
        step_at=trace.steps.__getitem__,
        model=trace.model,
        source=trace.source,
        document_sha256=trace.document_sha256,
        prompts=PROMPT_SETS.get(trace.prompts),
        settings=settings,
        title=title,
    )


def stored_prompts(values: Mapping[str, Any]) -> PromptSet | None:
    """The wording that a manifest stores; None where it is not whole."""
    known = {
        name: values[name]
        for name in PromptSet.__dataclass_fields__
        if isinstance(values.get(name), str)
    }
    try:
        return parse_prompts(known, source="run.json")
    except ConfigError:
        return None


# --- what changes in a memory ---------------------------------------------------------------------

# The parts that are not `gone` join to the text after, those that are not `new` to the text before.


PartKind = Literal["same", "gone", "new"]
DiffPart = tuple[PartKind, str]
MAX_WORDS = 4000
"""Longer middles are shown as replaced: finding what they share takes time by the square of their length."""

_word = re.compile(r"\s+|\w+|[^\w\s]")


def word_diff(before: str, after: str) -> list[DiffPart]:
    """The parts that two texts share, and those that only one of them has, in order."""
    old, new = _word.findall(before), _word.findall(after)
    head = _num_equal(old, new)
    tail = _num_equal(old[head:][::-1], new[head:][::-1])
    old_middle, new_middle = old[head : len(old) - tail], new[head : len(new) - tail]
    parts: list[DiffPart] = [
        ("same", "".join(new[:head])),
        *_middle(old_middle, new_middle),
        ("same", "".join(new[len(new) - tail :])),
    ]
    filled = [part for part in parts if part[1]]
    return [
        (kind, "".join(text for _, text in group))
        for kind, group in groupby(filled, key=lambda part: part[0])
    ]


def num_changed(before: Counter[str], after: Counter[str]) -> tuple[int, int]:
    """Words that are new in a text, and words that are gone from it, wherever they stand."""
    return (after - before).total(), (before - after).total()


def words(text: str) -> Counter[str]:
    """How often each word is in a text."""
    return Counter(re.findall(r"\w+", text))


def _middle(old: list[str], new: list[str]) -> list[DiffPart]:
    if max(len(old), len(new)) > MAX_WORDS:
        return [("gone", "".join(old)), ("new", "".join(new))]
    parts: list[DiffPart] = []
    for kind, low, high, start, end in SequenceMatcher(None, old, new, False).get_opcodes():
        if kind == "equal":
            parts.append(("same", "".join(new[start:end])))
        else:
            parts += [("gone", "".join(old[low:high])), ("new", "".join(new[start:end]))]
    return parts


def _num_equal(first: list[str], second: list[str]) -> int:
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


# --- readings: the questions of a run, and the trace of each from the lines of one file -------------


class _StepHead(NamedTuple):
    question: int
    head: Json


class AskRun:
    """A run of `memagent ask`, finished or not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._manifest = read_reading(path)
        self._prompts = stored_prompts(self._manifest["prompts"])
        self._questions: list[str] = self._manifest["questions"]
        self._makers: dict[int, HeadMaker] = {}
        self._index = LineIndex(path, JOURNAL, self._head_of)

    def overview(self) -> Json:
        """The questions with their answers, and what was read."""
        self._index.refresh()
        document = self._manifest["document"]
        return {
            "document": {name: document[name] for name in ("source", "num_chars", "sha256")},
            "model": self._manifest["model"],
            "prompts": self._manifest["prompts"]["name"],
            "settings": self._manifest["agent"],
            "questions": [self._question(number) for number in range(len(self._questions))],
        }

    def trace(self, number: int) -> StoredTrace:
        """The trace of a question."""
        if not 0 <= number < len(self._questions):
            raise RunError(f"there is no question {number}")
        self._index.refresh()
        lines = self._lines(number)
        return StoredTrace(
            question=self._questions[number],
            heads=[head for _, head in lines],
            step_at=lambda position: self._step(lines[position][0]),
            model=self._manifest["model"],
            source=self._manifest["document"]["source"],
            document_sha256=self._manifest["document"]["sha256"],
            prompts=self._prompts,
            settings=self._manifest["agent"],
        )

    def _question(self, number: int) -> Json:
        lines = self._lines(number)
        heads = [head for _, head in lines]
        is_answered = bool(heads) and heads[-1]["kind"] == "answer"
        answer = answer_of(self._step(lines[-1][0])) if is_answered else None
        if answer is not None:
            answer = shown_answer(answer, self._prompts)
        return {"question": self._questions[number], "answer": answer, "totals": totals(heads)}

    def _lines(self, question: int) -> list[tuple[int, Json]]:
        """Line numbers and heads of the steps of a question."""
        return [
            (number, found.head)
            for number, found in enumerate(self._index.heads)
            if found is not None and found.question == question
        ]

    def _step(self, line: int) -> Step:
        return journal_entry(self._index.record(line))[1]

    def _head_of(self, line: bytes) -> _StepHead:
        question, step = journal_entry(json.loads(line))
        maker = self._makers.setdefault(question, HeadMaker())
        return _StepHead(question, maker.head(step))


# --- the messages of a step, worded again from what the run stores ----------------------------------

# a section read in order        with the memory of the step before it in its thread
# a section of a later round     with the memory of the round before, and what that said is missing
# a merge                        with the notes or memories that it combines, and the sections they are on
# the answer                     with the last memory, and the quotes that were shown after it


NO_SECTION = "[the text of this section is not stored with the run]"
NO_TEXT = "the text of the section is not stored with the run"
MAX_DEPTH = 60
"""Merges of merges, at most; each level has at most half as many as the one before."""


def step_prompt(trace: StoredTrace, number: int, document: Document | None) -> Json:
    """The messages of a step. Raises RunError where they cannot be known."""
    step = step_of(trace, number)
    if trace.prompts is None or step.kind not in ("read", "merge", "answer"):
        raise RunError("the wording of this call is not stored with the run")
    if step.kind == "answer":
        messages = trace.prompts.answer_messages(
            question=trace.question,
            memory=with_ledger(step.memory, step.shown),
            num_sections=len(_section_starts(trace)),
            answer_tokens=_setting(trace, "answer_tokens"),
        )
        return _shown(messages, None)
    if step.kind == "merge":
        return _merge_prompt(trace, number, trace.prompts)
    return _section_prompt(trace, number, trace.prompts, document)


def _section_prompt(
    trace: StoredTrace, number: int, prompts: PromptSet, document: Document | None
) -> Json:
    step = trace.step_at(number)
    if step.section is None:
        raise RunError("the run does not store which section this step read")
    section = _section_text(trace, step, document)
    starts = _section_starts(trace)
    messages = prompts.section_messages(
        is_parallel=is_alone(step) and _asks_notes(trace),
        question=trace.question,
        section=NO_SECTION if section is None else section,
        memory=_known_before(trace, step) if is_alone(step) else memory_before(trace, number) or "",
        section_number=_index_at(starts, step.section.start) + 1,
        memory_tokens=_setting(trace, "memory_tokens"),
    )
    return _shown(messages, NO_TEXT if section is None else None)


def _merge_prompt(trace: StoredTrace, number: int, prompts: PromptSet) -> Json:
    step = trace.step_at(number)
    if not _asks_notes(trace):
        raise RunError("lines of memories were put together without a call")
    heads = [_PlacedHead(head["start"], tuple(head.get("inputs", ()))) for head in trace.heads]
    merged = _reads_under(number, heads)
    number_at = partial(_index_at, _section_starts(trace))
    notes = [
        (place_of(heads, place, number_at), trace.step_at(place).memory) for place in step.inputs
    ]
    is_last = merged == {
        place
        for place, head in enumerate(trace.heads)
        if head["kind"] == "read" and head.get("round") == step.round and head["memory_chars"]
    }
    earlier = _last_merge(trace, (step.round or 1) - 1) if is_last else None
    messages = prompts.merge_messages(
        question=trace.question,
        notes=notes,
        memory=earlier.memory if earlier else "",
        memory_tokens=_setting(trace, "memory_tokens"),
    )
    return _shown(messages, None)


# --- rounds and merges ------------------------------------------------------------------------------


class _PlacedHead(NamedTuple):
    """What is needed of a step to tell which sections it is on."""

    start: int | None
    inputs: tuple[int, ...]


def _reads_under(number: int, heads: Sequence[_PlacedHead]) -> set[int]:
    """The steps that read what a merge is on. Raises RunError where its inputs are no tree of earlier steps."""
    level, seen, reads = [number], {number}, set[int]()
    for _ in range(MAX_DEPTH):
        pairs = [(place, each) for place in level for each in heads[place].inputs]
        reads |= {place for place in level if heads[place].start is not None}
        below = [each for _, each in pairs]
        is_tree = len({*below}) == len(below) and seen.isdisjoint(below)
        is_tree &= all(heads[place].inputs or heads[place].start is not None for place in level)
        if not is_tree or not all(0 <= each < place for place, each in pairs):
            break
        if not below and reads:
            return reads
        level, seen = below, {*seen, *below}
    raise RunError("the run does not store what this step merged")


def _last_merge(trace: StoredTrace, round_number: int) -> Step | None:
    """The merge that ended a round."""
    for place in range(len(trace.heads) - 1, -1, -1):
        head = trace.heads[place]
        if head["kind"] == "merge" and head.get("round") == round_number:
            return trace.step_at(place)
    return None


def _known_before(trace: StoredTrace, step: Step) -> str:
    """What sections of a round are read with."""
    last = _last_merge(trace, (step.round or 1) - 1)
    return with_missing(last.memory, last.missing) if last else ""


# --- sections and settings --------------------------------------------------------------------------


def _section_text(trace: StoredTrace, step: Step, document: Document | None) -> str | None:
    """The section as the model saw it."""
    if document is None or step.section is None:
        return None
    text = document.text[step.section.start : step.section.end]
    has_marks = any(trace.settings.get(name) for name in ("evidence", "items", "stop_early"))
    return shielded(text) if has_marks else text


def _section_starts(trace: StoredTrace) -> list[int]:
    """Where the sections that were read begin."""
    return sorted({head["start"] for head in trace.heads if head["start"] is not None})


def _index_at(starts: Sequence[int], start: int) -> int:
    """The index of the section that begins at a character, as far as the sections are known."""
    return bisect_right(starts, start) - 1


def _asks_notes(trace: StoredTrace) -> bool:
    """Whether prompts of their own ask for notes and merge them."""
    return bool(trace.settings.get("notes", "asked") == "asked")


def _setting(trace: StoredTrace, name: str) -> int:
    value = trace.settings.get(name)
    return value if isinstance(value, int) else 1024


def _shown(messages: Sequence[Message], note: str | None) -> Json:
    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    return {"messages": plain, "note": note}

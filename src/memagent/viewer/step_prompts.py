"""The messages of a step, worded again from what the run stores.

a section read in order        with the memory of the step before it in its thread
a section of a later round     with the memory of the round before, and what that said is missing
a merge                        with the notes or memories that it combines, and the sections they are on
the answer                     with the last memory, and the quotes that were shown after it
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from memagent.agent.evidence.answers import with_ledger
from memagent.agent.evidence.replies import shielded
from memagent.agent.parallel import place_of, with_missing
from memagent.agent.prompts import PromptSet
from memagent.agent.trace import Step
from memagent.documents.document import Document
from memagent.errors import RunError
from memagent.types import Message
from memagent.viewer.traces import Json, StoredTrace, is_alone, memory_before, step_of

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

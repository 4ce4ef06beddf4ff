"""Reading on after a text has grown or changed: steps of an earlier run that need not be repeated.

    old run   [ s1 ][ s2 ][ s3 ][ end]        answer
    new text  [ s1 ][ s2 ][ s3 ][ end and more ][ s5 ]
                └── carried ──┘ └── read again ┘ └ read ┘ answer

A step is carried over while the sections of the new text are those that the old run read, in the order in which it
read them, with the same text: the memory after them is then what a whole reading would have, and so is the answer
of a model that gives the same reply to the same prompt. From the first section that differs everything is read
again. A carried step costs nothing in the new run, and is flagged. The answer is carried over if nothing is new and
its settings are the same.

Where sections are read apart from each other, replies are carried over instead, each for the prompt that it was a
reply to (`carried`): a section that did not change is not read again wherever it stands now, and a merge of the same
notes is not repeated.

    carried = await carry_over(reader, Path("runs/log"), ["What failed?"], reader.chunks(document))
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memagent.agent.evidence.ledger import ledger_of
from memagent.agent.journal import (
    LATER_SETTINGS,
    check_same,
    read_reading,
    reads_in_order,
    section_digest,
)
from memagent.agent.modes.carried import (
    Carried,
    CarriedReply,
    answer_key,
    merge_key,
    read_key,
    read_replies,
)
from memagent.agent.modes.extents import Extents
from memagent.agent.modes.parallel_prompts import with_missing
from memagent.agent.modes.section_order import SectionOrder, order_sections
from memagent.agent.trace import Section, Step, section_digests, steps_by_question
from memagent.documents.chunking import Chunks
from memagent.documents.document import Chunk
from memagent.runs import read_records
from memagent.types import Usage

if TYPE_CHECKING:
    from memagent.agent.reader import Reader


async def carry_over(
    reader: Reader, path: Path, questions: Sequence[str], chunks: Chunks
) -> Carried:
    """What holds for these chunks of the run at `path`.

    Raises RunError where the run asks something else, or with another model or other settings.
    """
    manifest = await asyncio.to_thread(read_reading, path)
    identity = reader.identity(questions, chunks.document)
    check_same(manifest, {**identity, "document": manifest["document"]}, path, what="continue")
    steps, digests = await asyncio.to_thread(_stored_steps, path, manifest)
    if reader.config.merges:
        has_numbers = reader.prompts.numbers_sections(reader.config.asks_notes)
        stored = await asyncio.to_thread(read_replies, path)
        for number in range(len(questions)):
            earlier = EarlierReading(steps.get(number, []), digests.get(number, []))
            known = earlier.replies(has_numbers=has_numbers, **_answer_limits(manifest))
            stored.setdefault(number, {}).update(known)
        return Carried(replies=stored)
    is_same_answer = {**LATER_SETTINGS, **manifest["agent"]} == identity["agent"]
    return Carried(
        steps={
            number: await _carried(
                steps.get(number, []),
                digests.get(number, []),
                await order_sections(chunks, question, reader.config.order),
                _unchanged_chars(manifest, chunks),
                with_answer=is_same_answer,
            )
            for number, question in enumerate(identity["questions"])
        }
    )


def _stored_steps(
    path: Path, manifest: Mapping[str, Any]
) -> tuple[dict[int, list[Step]], dict[int, list[str | None]]]:
    """The steps of a run and the fingerprints of what they read, by question number."""
    records = read_records(path)
    steps = steps_by_question(records, path, in_order=reads_in_order(manifest))
    return steps, section_digests(records)


async def _carried(
    steps: Sequence[Step],
    digests: Sequence[str | None],
    sections: SectionOrder,
    unchanged: int,
    *,
    with_answer: bool,
) -> list[Step]:
    """The first steps, as long as they read what the new text has there; the answer if nothing is new."""
    found: list[Step] = []
    for position, (step, digest) in enumerate(zip(steps, digests, strict=True)):
        await asyncio.sleep(0)  # others may have work between two sections
        chunk = await sections.get(position)
        if step.section is None or chunk is None:
            if step.kind == "answer" and chunk is None and with_answer:  # nothing is new
                found.append(_free(step))
            break
        is_same = (chunk.start, chunk.end) == (step.section.start, step.section.end)
        is_known = digest == section_digest(chunk.text) or (
            digest is None and chunk.end <= unchanged
        )
        if not is_same or not is_known:
            break
        found.append(_free(_moved(step, chunk, sections.chunks)))
    return found


def _moved(step: Step, chunk: Chunk, chunks: Chunks) -> Step:
    """A step with the places that its section and quotes have now: sources may have other names."""
    quotes = (
        replace(quote, places=chunks.document.places(*quote.span)) if quote.is_found else quote
        for quote in step.quotes
    )
    return replace(step, section=Section.of(chunk), quotes=tuple(quotes))


def _free(step: Step) -> Step:
    """A step as the new run has it: it cost nothing there."""
    flags = step.flags if "carried" in step.flags else (*step.flags, "carried")
    return replace(step, usage=Usage(), seconds=0.0, num_attempts=1, flags=flags)


def _unchanged_chars(manifest: Mapping[str, Any], chunks: Chunks) -> int:
    """The length of the old text if the new one begins with it, else 0; for runs without digests."""
    stored = manifest["document"]
    beginning = chunks.document.text[: stored["num_chars"]]
    return len(beginning) if section_digest(beginning) == stored["sha256"] else 0


def _answer_limits(manifest: Mapping[str, Any]) -> dict[str, int]:
    agent = {**LATER_SETTINGS, **manifest["agent"]}
    return {name: agent[name] for name in ("answer_tokens", "ledger_tokens")}


class EarlierReading:
    """A reading in rounds, and what each of its replies was a reply to."""

    def __init__(self, steps: Sequence[Step], digests: Sequence[str | None]) -> None:
        self._steps = steps
        self._digests = digests
        self._numbers = _section_numbers(steps)
        self._extents = Extents(steps)
        self._last_merges = {
            step.round: step
            for step, following in pairwise(steps)
            if step.kind == "merge"
            and (following.kind == "answer" or following.round != step.round)
        }
        """The merges that ended a round, by its number."""

    def replies(self, *, has_numbers: bool, **answer_limits: int) -> dict[str, CarriedReply]:
        """Replies by key; `has_numbers`: prompts tell the number of a section."""
        keys = {
            **self._read_keys(has_numbers),
            **self._merge_keys(),
            **self._answer_keys(**answer_limits),
        }
        return {key: CarriedReply.of(self._steps[index]) for index, key in keys.items()}

    def _read_keys(self, has_numbers: bool) -> dict[int, str]:
        """Keys of the sections, by the index of the step; none for a section whose text or number is not known."""
        found: dict[int, str] = {}
        for step, digest in zip(self._steps, self._digests, strict=True):
            if step.section is None:
                continue
            memory = self._shown(step)
            number = self._numbers.get(step.section.start)
            if digest is not None and not (has_numbers and number is None):
                found[step.index] = read_key(digest, memory, number if has_numbers else None)
        return found

    def _shown(self, step: Step) -> str:
        """The memory that a section of a round was read with."""
        merge = self._merge_before(step)
        return with_missing(merge.memory, merge.missing) if merge else ""

    def _merge_before(self, step: Step) -> Step | None:
        return self._last_merges.get((step.round or 1) - 1)

    def _merge_keys(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for step in self._steps:
            before = self._merge_before(step)
            is_last = self._last_merges.get(step.round) is step
            if step.kind != "merge" or (before and not is_last and step is self._steps[-1]):
                continue  # whether the last one of all had the memory is not known
            inputs = [self._steps[index] for index in step.inputs]
            notes = [
                (self._extents.place(one.index, self._number_at), one.memory) for one in inputs
            ]
            found[step.index] = merge_key(notes, before.memory if before and is_last else "")
        return found

    def _number_at(self, start: int) -> int:
        return self._numbers.get(start, 0) - 1  # no section has the index -1: nothing is taken over

    def _answer_keys(self, *, answer_tokens: int, ledger_tokens: int) -> dict[int, str]:
        if not self._steps or self._steps[-1].kind != "answer":
            return {}
        answer = self._steps[-1]
        key = answer_key(
            answer.memory,
            ledger_of(quote for step in self._steps for quote in step.quotes),
            num_sections=len(self._numbers),
            answer_tokens=answer_tokens,
            ledger_tokens=ledger_tokens,
        )
        return {answer.index: key}


def _section_numbers(steps: Sequence[Step]) -> dict[int, int]:
    """Numbers of sections, from 1, by where they begin; only of those that join from the beginning of the text."""
    ends = {step.section.start: step.section.end for step in steps if step.section is not None}
    numbers: dict[int, int] = {}
    start = 0
    while start in ends and start not in numbers:
        numbers[start] = len(numbers) + 1
        start = ends[start]
    return numbers

"""Reading on after a text has grown or changed: steps of an earlier run that need not be repeated.

    old run   [ s1 ][ s2 ][ s3 ][ end]        answer
    new text  [ s1 ][ s2 ][ s3 ][ end and more ][ s5 ]
                └── carried ──┘ └── read again ┘ └ read ┘ answer

A step is carried over while the sections of the new text are those that the old run read, in the order in which it
read them, with the same text: the memory after them is then what a whole reading would have, and so is the answer
of a model that gives the same reply to the same prompt. From the first section that differs everything is read
again. A carried step costs nothing in the new run, and is flagged. The answer is carried over if nothing is new and
its settings are the same.

    steps = await carry_over(reader, Path("runs/log"), ["What failed?"], reader.chunks(document))
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memagent.agent.journal import (
    LATER_SETTINGS,
    check_same,
    read_reading,
    reads_in_order,
    section_digest,
)
from memagent.agent.modes.section_order import SectionOrder, order_sections
from memagent.agent.trace import Section, Step, section_digests, steps_by_question
from memagent.documents.chunking import Chunks
from memagent.documents.document import Chunk
from memagent.errors import ConfigError
from memagent.runs import read_records
from memagent.types import Usage

if TYPE_CHECKING:
    from memagent.agent.reader import Reader


async def carry_over(
    reader: Reader, path: Path, questions: Sequence[str], chunks: Chunks
) -> dict[int, list[Step]]:
    """The steps of the run at `path` that hold for these chunks, by question number.

    Raises RunError where the run asks something else, or with another model or other settings.
    """
    if reader.config.merges:
        raise ConfigError(
            "only readings in order can be continued; leave out `mode` and `segments`, or start a new run"
        )
    manifest = await asyncio.to_thread(read_reading, path)
    identity = reader.identity(questions, chunks.document)
    check_same(manifest, {**identity, "document": manifest["document"]}, path, what="continue")
    steps, digests = await asyncio.to_thread(_stored_steps, path, manifest)
    is_same_answer = {**LATER_SETTINGS, **manifest["agent"]} == identity["agent"]
    return {
        number: await _carried(
            steps.get(number, []),
            digests.get(number, []),
            await order_sections(chunks, question, reader.config.order),
            _unchanged_chars(manifest, chunks),
            with_answer=is_same_answer,
        )
        for number, question in enumerate(identity["questions"])
    }


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

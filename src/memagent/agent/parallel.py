"""Sections read apart from each other, and what was noted merged, in up to `rounds` rounds.

    section 1 ─▶ note ─┐
    section 2 ─▶ note ─┼─▶ merge ─▶ memory
    section n ─▶ note ─┘    │
         ▲                  ▼
         └── next round ◀── is anything missing?

A reply to a section is a note, or says that it holds nothing; only notes are merged. Notes that do not fit
one prompt are merged in groups first, and the results again, as a tree. With `notes=memories` sections are read with
the prompts of the plain loop, what they write is put together line by line, and rounds follow while lines are added.
Each step is yielded as soon as its
call is done, so steps come in the order in which calls end; `Step.round` and `Step.inputs`
say what belongs together.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import NamedTuple, Protocol

from memagent.agent.budget import MISSING_TOKENS
from memagent.agent.evidence.replies import ParsedReply
from memagent.agent.memory import fit_lines, shortened
from memagent.agent.prompts import bare, note_block
from memagent.agent.reading import Reading, cut_chunk
from memagent.agent.trace import Step
from memagent.documents.document import Chunk

CALLS_AT_ONCE = 64
"""Calls in flight at once, where the engine does not say how many it works on."""
LONGEST_PLACE = "1000000-1000000"
"""Stands for the sections of a note when it is measured."""
MISSING = "Missing:"
"""What the last line of a merge begins with."""

_missing = re.compile(r"[\W_]*missing[\W_]*?:(.*)", re.IGNORECASE | re.DOTALL)
_NO_WORDS = {"", "nothing", "none", "no", "n/a"}

Job = Coroutine[None, None, Step]
"""A call. The index of its step is set when it is done."""


def read_at_once(reading: Reading) -> AsyncGenerator[Step, None]:
    """All sections at once, as often as something is missing, then the answer."""
    return _Rounds(reading).steps()


class _Rounds:
    """A reading in rounds: the steps so far, and the memory that they led to."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._config = reading.config
        self._done: list[Step] = []
        self._memory = ""
        self._missing: str | None = None

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Notes on all sections and their merges, round by round, then the answer."""
        reading = self._reading
        for number in range(1, self._config.rounds + 1):
            before = self._memory, self._missing
            async with aclosing(self._at_once(self._notes_wanted(number))) as steps:
                async for step in steps:
                    yield step
            notes = [step for step in self._reads(number) if step.memory]
            if not notes:
                break
            if self._config.joins_memories:
                yield self._put_together(notes, number)
                if self._memory == before[0]:
                    break
                continue
            while len(groups := self._groups(notes)) > 1:
                jobs = (self._merged(group, number) for group in groups if len(group) > 1)
                async with aclosing(self._at_once(_each(jobs))) as steps:
                    async for step in steps:
                        yield step
                merged = {step.inputs: step for step in self._done if step.kind == "merge"}
                notes = [
                    group[0] if len(group) == 1 else merged[tuple(step.index for step in group)]
                    for group in groups
                ]
            last = self._add(await self._merged(notes, number, self._memory))
            yield last
            self._memory, self._missing = last.memory, last.missing
            if self._missing is None or before == (self._memory, self._missing):
                break
        num_tokens = reading.tokenizer.count(self._memory)
        yield await reading.answer(self._done, self._memory, num_tokens)

    async def _at_once(self, jobs: AsyncGenerator[Job, None]) -> AsyncGenerator[Step, None]:
        """The steps of calls as they are done. After a failure no call is sent; those in flight still count."""
        running: set[asyncio.Task[Step]] = set()
        failure: BaseException | None = None
        has_more = True
        try:
            while True:
                if has_more and failure is None and len(running) < self._reading.slots.num:
                    job = await anext(jobs, None)
                    has_more = job is not None
                    if job is not None:
                        running.add(asyncio.ensure_future(job))
                    await asyncio.sleep(0)  # the request is sent before the next section is cut
                elif running:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                else:
                    break
                for task in [task for task in running if task.done()]:
                    running.remove(task)
                    if error := task.exception():
                        failure = failure or error
                    else:
                        yield self._add(task.result())
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await jobs.aclose()
        if failure is not None:
            raise failure

    def _add(self, step: Step) -> Step:
        step = replace(step, index=len(self._done))
        self._done.append(step)
        return step

    def _fitted(self, text: str) -> str:
        """A note or memory, cut where it is longer than a memory may be."""
        limit = self._config.memory_tokens
        return shortened(text, self._reading.tokenizer, max_tokens=limit)

    # --- notes ------------------------------------------------------------------------------------

    async def _notes_wanted(self, number: int) -> AsyncGenerator[Job, None]:
        """A call for each section."""
        memory = with_missing(self._memory, self._missing)
        index = 0
        while (chunk := await cut_chunk(self._reading.chunks, index)) is not None:
            yield self._note(chunk, number, memory)
            index += 1

    async def _note(self, chunk: Chunk, number: int, memory: str) -> Step:
        """Read a section on its own."""
        reading = self._reading
        async with reading.slots.slot((1, chunk.index, number)):
            step, parsed = await reading.read(chunk, memory, reading.tokenizer.count(memory))
        said = self._said(parsed, memory)
        note = self._fitted(said)
        return replace(step, memory=note, round=number).flagged(
            memory_cut=note != said, nothing=not said, malformed=parsed.is_malformed
        )

    def _said(self, parsed: ParsedReply, memory: str) -> str:
        """What a reply notes of a section; empty where it holds nothing, or nothing that the memory has not."""
        if not self._config.joins_memories:
            quoted = "\n".join(quote.text for quote in parsed.quotes)
            is_nothing = self._reading.prompts.says_nothing(parsed.memory)
            return quoted if is_nothing else parsed.memory
        known = set(memory.splitlines())
        lines = self._reading.change_of(parsed).text.splitlines()
        return "\n".join(line for line in lines if line.strip() and line not in known)

    def _reads(self, number: int | None = None) -> list[Step]:
        """The sections that were read in a round, or in all, in the order of rounds and of the text."""
        reads = [step for step in self._done if step.kind == "read"]
        wanted = [step for step in reads if number in (None, step.round)]
        return sorted(wanted, key=lambda step: (step.round or 0, step.start or 0))

    # --- merges -----------------------------------------------------------------------------------

    def _put_together(self, notes: Sequence[Step], number: int) -> Step:
        """Add the lines of memories to the memory, without a call."""
        certainty: dict[str, float] = {}  # of a line that several sections noted, that of the first
        for step in self._reads():
            lines = step.memory.splitlines()
            for line in lines:
                certainty.setdefault(line, (step.logprob or 0.0) / len(lines))
        parts = [self._memory, *(step.memory for step in notes)]
        found = dict.fromkeys(line for part in parts for line in part.splitlines() if line.strip())
        limit = self._config.memory_tokens
        new = fit_lines(list(found), certainty, self._reading.tokenizer, memory_tokens=limit)
        self._memory = new.text
        merge = Step(
            kind="merge",
            index=0,
            reply="",
            memory=new.text,
            round=number,
            inputs=tuple(step.index for step in notes),
        )
        return self._add(merge.flagged(memory_cut=new.was_cut, joined=True))

    def _groups(self, inputs: Sequence[Step]) -> list[list[Step]]:
        """Inputs in groups that fit one merge each, in the order of the text."""
        groups: list[list[Step]] = [[]]
        used = 0
        room = self._reading.budget.merge_room
        for step in inputs:
            size = self._reading.tokenizer.count(note_block(LONGEST_PLACE, step.memory))
            if len(groups[-1]) >= 2 and used + size > room:  # two always fit
                groups.append([])
                used = 0
            groups[-1].append(step)
            used += size
        return groups

    async def _merged(self, inputs: Sequence[Step], number: int, memory: str = "") -> Step:
        """A call that merges notes; only the last one of a round has the memory."""
        reading = self._reading
        number_at = reading.chunks.number_at
        notes = [(place_of(self._done, step.index, number_at), step.memory) for step in inputs]
        messages = reading.prompts.merge_messages(
            question=reading.question,
            notes=notes,
            memory=memory,
            memory_tokens=self._config.memory_tokens,
        )
        async with reading.slots.slot((0,)):  # others may wait for it
            call = await reading.call(
                messages,
                self._config.sampling(reading.budget.merge_reply),
                prompt_tokens=reading.tokenizer.count_messages(messages),
            )
        step = call.step("merge", round=number, inputs=tuple(one.index for one in inputs))
        said = split_missing(step.reply)
        whole = said.memory or "\n".join(text for text in (memory, *(n for _, n in notes)) if text)
        new = self._fitted(whole)
        missing = said.missing and shortened(
            said.missing, reading.tokenizer, max_tokens=MISSING_TOKENS // 2
        )
        return replace(step, memory=new, missing=missing).flagged(
            memory_cut=new != whole, joined=not said.memory
        )


async def _each(jobs: Iterable[Job]) -> AsyncGenerator[Job, None]:
    for job in jobs:
        yield job


# --- replies to merges ----------------------------------------------------------------------------


class MergeReply(NamedTuple):
    """The reply to a merge, taken apart."""

    memory: str
    missing: str | None
    """What has to be looked for in another round; None where nothing is missing or the reply does not say."""


def split_missing(reply: str) -> MergeReply:
    """Separate the memory of a merge from its last line.

    >>> split_missing("Mary was born in Leeds.\\nMissing: where Leeds lies")
    MergeReply(memory='Mary was born in Leeds.', missing='where Leeds lies')
    """
    body, _, last = reply.rstrip().rpartition("\n")
    found = _missing.fullmatch(last)
    if not found:
        return MergeReply(reply.strip(), None)
    missing = " ".join(found.group(1).split()).strip("*_`\"' ")
    return MergeReply(body.strip(), None if bare(missing) in _NO_WORDS else missing)


def with_missing(memory: str, missing: str | None) -> str:
    """A memory as sections of the next round are read with it."""
    return memory if missing is None else f"{memory}\n{MISSING} {missing}".strip()


class PlacedStep(Protocol):
    """What is needed of a step."""

    @property
    def start(self) -> int | None:
        """Where its section begins; None for merges."""
        ...

    @property
    def inputs(self) -> Sequence[int]: ...


def place_of(steps: Sequence[PlacedStep], index: int, number_at: Callable[[int], int]) -> str:
    """The sections that a step is on, such as 3 or 3-17; `number_at` gives a section's index by its start.

    step 0  section 1 ─┐
    step 1  section 2 ─┼─▶ step 3, a merge: place_of(steps, 3, number_at) is "1-3"
    step 2  section 3 ─┘
    """
    level, starts = [steps[index]], set[int]()
    while level:  # merges of merges
        starts |= {step.start for step in level if step.start is not None}
        level = [steps[each] for step in level for each in step.inputs]
    ends = (min(starts, default=0), max(starts, default=0))
    return "-".join(str(number) for number in dict.fromkeys(number_at(start) + 1 for start in ends))

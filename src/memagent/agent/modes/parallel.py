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
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from memagent.agent.budget import MISSING_TOKENS, Budget
from memagent.agent.evidence.replies import ParsedReply, parse_reply
from memagent.agent.memory import ReadingState, fit_lines, shortened, split_reasoning
from memagent.agent.modes.extents import Extents
from memagent.agent.modes.parallel_prompts import (
    LONGEST_PLACE,
    note_block,
    split_missing,
    with_missing,
)
from memagent.agent.modes.section_order import SectionOrder, cut_chunk
from memagent.agent.trace import Section, Step
from memagent.documents.chunking import Chunks
from memagent.documents.document import Chunk
from memagent.replies import Scope

if TYPE_CHECKING:
    from memagent.agent.reader import Reader

CALLS_AT_ONCE = 64
"""Calls in flight at once, where the engine does not say how many it works on."""

Job = Callable[[], Awaitable[Step]]
"""A call to be made. The index of its step is set when it is done."""
Then = Callable[[Step], Awaitable[Job | None]]
"""What follows a step that is done."""


class CallSlots:
    """Places for calls; the lowest key gets the next one.

    Calls of several questions on one section are sent together, so that its prefill is shared.
    """

    def __init__(self, num: int) -> None:
        self.num = num
        self._num_free = num
        self._waiting: list[tuple[tuple[int, ...], int, asyncio.Future[None]]] = []
        self._order = count()

    @asynccontextmanager
    async def slot(self, key: tuple[int, ...]) -> AsyncIterator[None]:
        """A place, in the order of keys."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        heappush(self._waiting, (key, next(self._order), turn))
        loop.call_soon(self._grant)  # others that come at the same time may have lower keys
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back()
            raise
        try:
            yield
        finally:
            self._give_back()

    def _grant(self) -> None:
        while self._num_free and self._waiting:
            turn = heappop(self._waiting)[-1]
            if not turn.done():
                self._num_free -= 1
                turn.set_result(None)

    def _give_back(self) -> None:
        self._num_free += 1
        self._grant()


async def reading_apart(
    reader: Reader,
    question: str,
    chunks: Chunks,
    budget: Budget,
    slots: CallSlots | None,
    known: Scope | None,
) -> AsyncGenerator[Step, None]:
    """The steps of a reading in rounds."""
    reading = _Rounds(reader, question, chunks, budget, slots or reader.call_slots(), known)
    async with aclosing(reading.steps()) as steps:
        async for step in steps:
            yield step
    sections = SectionOrder(chunks=chunks)
    memory = reading.memory
    state = ReadingState(memory, reader.tokenizer.count(memory))
    yield await reader.write_answer(question, reading.done, state, budget, sections, known)


class _Apart(ABC):
    """What rounds and segments share: the steps so far, calls at once, merges."""

    def __init__(
        self,
        reader: Reader,
        question: str,
        chunks: Chunks,
        budget: Budget,
        slots: CallSlots,
        known: Scope | None,
    ) -> None:
        self.memory = ""
        self.missing: str | None = None
        self._reader = reader
        self._question = question
        self._chunks = chunks
        self._budget = budget
        self._slots = slots
        self._known = known
        self._steps: list[Step] = []
        self._extents = Extents()

    @property
    def done(self) -> Sequence[Step]:
        """Steps so far."""
        return self._steps

    @abstractmethod
    def steps(self) -> AsyncGenerator[Step, None]:
        """All steps but the answer."""

    async def _at_once(
        self, jobs: AsyncGenerator[Job, None], then: Then | None = None
    ) -> AsyncGenerator[Step, None]:
        """The steps of calls as they are done. After a failure no call is sent; those in flight still count."""
        running: set[asyncio.Task[Step]] = set()
        failure: BaseException | None = None
        has_more = True
        try:
            while True:
                can_send = has_more and failure is None and len(running) < self._slots.num
                if can_send:
                    job = await anext(jobs, None)
                    has_more = job is not None
                    if job is not None:
                        running.add(asyncio.ensure_future(job()))
                    await asyncio.sleep(0)  # the request is sent before the next section is cut
                elif running:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                else:
                    break
                for task in [task for task in running if task.done()]:
                    running.remove(task)
                    if error := task.exception():
                        failure = failure or error
                        continue
                    step = self._add(task.result())
                    yield step
                    if then and failure is None and (job := await then(step)):
                        running.add(asyncio.ensure_future(job()))
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await jobs.aclose()
        if failure is not None:
            raise failure

    def _add(self, step: Step) -> Step:
        step = replace(step, index=len(self._steps))
        self._steps.append(step)
        self._extents.add(step)
        return step

    # --- merges --------------------------------------------------------------------------------

    async def _merge(self, inputs: list[Step], number: int | None) -> AsyncGenerator[Step, None]:
        """Merge notes or memories into the memory, in groups first where they do not fit one prompt."""
        if self._reader.config.joins_memories:
            async with aclosing(self._put_together(inputs, number)) as steps:
                async for step in steps:
                    yield step
            return
        while len(groups := self._groups(inputs)) > 1:
            merged: dict[tuple[int, ...], Step] = {}
            jobs = _each(
                self._merge_job(group, number, is_last=False) for group in groups if len(group) > 1
            )
            async with aclosing(self._at_once(jobs)) as steps:
                async for step in steps:
                    merged[step.inputs] = step
                    yield step
            inputs = [
                group[0] if len(group) == 1 else merged[tuple(step.index for step in group)]
                for group in groups
            ]
        last = self._add(await self._merge_job(inputs, number, is_last=True)())
        yield last
        self.memory, self.missing = last.memory, last.missing

    async def _put_together(
        self, inputs: list[Step], number: int | None
    ) -> AsyncGenerator[Step, None]:
        """Add the lines of notes or memories to the memory, without a call."""
        parts = [self.memory, *(step.memory for step in inputs)]
        lines = dict.fromkeys(line for part in parts for line in part.splitlines() if line.strip())
        new = fit_lines(
            list(lines),
            self._certainty(),
            self._reader.tokenizer,
            memory_tokens=self._reader.config.memory_tokens,
        )
        merge = self._add(
            Step(
                kind="merge",
                index=0,
                reply="",
                memory=new.text,
                round=number,
                inputs=tuple(step.index for step in inputs),
                flags=("memory_cut", "joined") if new.was_cut else ("joined",),
            )
        )
        yield merge
        self.memory = merge.memory

    @abstractmethod
    def _certainty(self) -> Mapping[str, float]:
        """How certain the model was of the lines that were noted so far."""

    def _groups(self, inputs: Sequence[Step]) -> list[list[Step]]:
        """Inputs in groups that fit one merge each, in the order of the text."""
        groups: list[list[Step]] = [[]]
        used = 0
        for step in inputs:
            size = self._reader.tokenizer.count(note_block(LONGEST_PLACE, step.memory))
            if len(groups[-1]) >= 2 and used + size > self._budget.merge_room:  # two always fit
                groups.append([])
                used = 0
            groups[-1].append(step)
            used += size
        return groups

    def _merge_job(self, inputs: Sequence[Step], number: int | None, *, is_last: bool) -> Job:
        """A call that merges; only the last one has the memory and says what is missing."""

        async def job() -> Step:
            async with self._slots.slot((0,)):  # others may wait for it
                return await self._merged(inputs, number, self.memory if is_last else "")

        return job

    async def _merged(self, inputs: Sequence[Step], number: int | None, memory: str) -> Step:
        reader = self._reader
        number_at = self._chunks.number_at
        notes = [(self._extents.place(step.index, number_at), step.memory) for step in inputs]
        messages = reader.prompts.merge_messages(
            question=self._question,
            notes=notes,
            memory=memory,
            memory_tokens=reader.config.memory_tokens,
        )
        prompt_tokens = reader.tokenizer.count_messages(messages)
        call = await reader.call(
            messages, prompt_tokens, max_tokens=self._budget.merge_reply, known=self._known
        )
        reply, reasoning = split_reasoning(call.completion.text)
        said = split_missing(reply)
        joined = "\n".join(text for text in (memory, *(text for _, text in notes)) if text)
        new = self._fitted(said.memory or joined)
        flags = call.flags
        flags += ["memory_cut"] if new.was_cut else []
        flags += [] if said.memory else ["joined"]
        return Step(
            kind="merge",
            index=0,
            reply=reply,
            memory=new.text,
            round=number,
            inputs=tuple(step.index for step in inputs),
            missing=said.missing
            and shortened(said.missing, reader.tokenizer, max_tokens=MISSING_TOKENS // 2),
            reasoning=call.completion.reasoning or reasoning,
            flags=tuple(flags),
            **call.measures(),
        )

    def _fitted(self, text: str) -> _Fitted:
        """A note or memory, cut where it is longer than a memory may be."""
        limit = self._reader.config.memory_tokens
        fitted = shortened(text, self._reader.tokenizer, max_tokens=limit)
        return _Fitted(fitted, was_cut=fitted != text)


class _Rounds(_Apart):
    """All sections at once, as often as something is missing."""

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Notes on all sections and their merges, round by round."""
        for number in range(1, self._reader.config.rounds + 1):
            known = (self.memory, self.missing)
            async with aclosing(self._at_once(self._notes_wanted(number))) as steps:
                async for step in steps:
                    yield step
            notes = self._notes(number)
            if not notes:
                return
            async with aclosing(self._merge(notes, number)) as steps:
                async for step in steps:
                    yield step
            if not self._goes_on(*known):
                return

    def _goes_on(self, memory: str, missing: str | None) -> bool:
        """Whether another round is due, after one with this memory: something is missing, or was added."""
        if self._reader.config.joins_memories:
            return self.memory != memory
        return self.missing is not None and (self.memory, self.missing) != (memory, missing)

    def _certainty(self) -> Mapping[str, float]:
        """Of a line that several sections noted, that of the first: not of the call that ended first."""
        found: dict[str, float] = {}
        reads = (step for step in self._steps if step.kind == "read")
        for step in sorted(reads, key=lambda step: (step.round or 0, _start(step))):
            lines = step.memory.splitlines()
            for line in lines:
                found.setdefault(line, (step.logprob or 0.0) / len(lines))
        return found

    async def _notes_wanted(self, number: int) -> AsyncGenerator[Job, None]:
        """A call for each section."""
        memory = with_missing(self.memory, self.missing)
        index = 0
        while (chunk := await cut_chunk(self._chunks, index)) is not None:
            yield self._note_job(chunk, number, memory)
            index += 1

    def _note_job(self, chunk: Chunk, number: int, memory: str) -> Job:
        async def job() -> Step:
            async with self._slots.slot((1, chunk.index, number)):
                return await self._note(chunk, number, memory)

        return job

    async def _note(self, chunk: Chunk, number: int, memory: str) -> Step:
        """Read a section on its own."""
        reader, budget = self._reader, self._budget
        section, document = reader.section_text(chunk), self._chunks.document
        state = ReadingState(memory, reader.tokenizer.count(memory))
        call = await reader.call_on_section(self._question, chunk, state, budget, self._known)
        reply, reasoning = split_reasoning(call.completion.text)
        parsed = parse_reply(reply, reader.reply_format)
        said = self._said(parsed, memory)
        is_nothing = not said
        note = self._fitted(said)
        flags = call.flags
        flags += ["memory_cut"] if note.was_cut else []
        flags += ["nothing"] if is_nothing else []
        flags += ["malformed"] if parsed.is_malformed else []
        return Step(
            kind="read",
            index=0,
            reply=reply,
            memory=note.text,
            section=Section.of(chunk),
            round=number,
            reasoning=call.completion.reasoning or reasoning,
            flags=tuple(flags),
            quotes=reader.placed_quotes(parsed, chunk, section, document),
            **call.measures(),
        )

    def _said(self, parsed: ParsedReply, memory: str) -> str:
        """What a reply notes of a section; empty where it holds nothing, or nothing that the memory has not."""
        reader = self._reader
        if not reader.config.joins_memories:
            quoted = "\n".join(quote.text for quote in parsed.quotes)
            return quoted if reader.prompts.says_nothing(parsed.memory) else parsed.memory
        known = set(memory.splitlines())
        lines = reader.change_of(parsed).text.splitlines()
        return "\n".join(line for line in lines if line.strip() and line not in known)

    def _notes(self, number: int) -> list[Step]:
        """The notes of a round, in the order of the text."""
        notes = [step for step in self._reads(number) if step.memory]
        return sorted(notes, key=_start)

    def _reads(self, number: int) -> list[Step]:
        return [step for step in self._steps if step.kind == "read" and step.round == number]


class _Fitted(NamedTuple):
    """A text within the limit of a memory."""

    text: str
    was_cut: bool


def _start(step: Step) -> int:
    assert step.section is not None
    return step.section.start


async def _each(jobs: Iterable[Job]) -> AsyncGenerator[Job, None]:
    for job in jobs:
        yield job

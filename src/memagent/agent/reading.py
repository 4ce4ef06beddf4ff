"""One question over one text: its prompts, its one call, and the loop that reads section after section.

    reading = Reading(question=..., chunks=..., call=partial(call_model, engine, tokenizer, limits), ...)
    async for step in read_in_order(reading):      # or `parallel.read_at_once`
        ...

Neither loop knows which engine replies, whether a reply was known before, and of what is on disk.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from memagent.agent.budget import Budget
from memagent.agent.evidence.answers import cite, show_ledger, with_ledger
from memagent.agent.evidence.ledger import ledger_of
from memagent.agent.evidence.quotes import place_copies, place_quotes
from memagent.agent.evidence.replies import ParsedReply, ReplyFormat, parse_reply, shielded
from memagent.agent.memory import ReadingState, rewrite
from memagent.agent.model_call import ModelCall
from memagent.agent.prompts import MemoryChange, PromptSet
from memagent.agent.trace import Section, Step
from memagent.config import AgentConfig
from memagent.documents.chunking import Chunks
from memagent.documents.document import Chunk
from memagent.documents.ranking import rank_by_words
from memagent.engines.limit import Slots
from memagent.errors import EmptyAnswer
from memagent.tokens.tokenizers import Tokenizer
from memagent.types import Message, Sampling


class AskModel(Protocol):
    """One reply to a conversation, within limits; a reply that is known is not asked for."""

    def __call__(
        self, messages: Sequence[Message], sampling: Sampling, *, prompt_tokens: int
    ) -> Awaitable[ModelCall]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What all calls for one question have in common."""

    question: str
    chunks: Chunks
    config: AgentConfig
    prompts: PromptSet
    format: ReplyFormat
    budget: Budget
    tokenizer: Tokenizer
    slots: Slots
    """Places for calls on sections that are read apart from each other."""
    call: AskModel

    def section_messages(self, chunk: Chunk, memory: str) -> list[Message]:
        """The prompt of a section."""
        return self.prompts.section_messages(
            is_parallel=self.config.asks_notes,
            question=self.question,
            section=self._shown(chunk),
            memory=memory,
            section_number=chunk.index + 1,
            memory_tokens=self.config.memory_tokens,
        )

    def _shown(self, chunk: Chunk) -> str:
        """A section as the model sees it; where replies have marks, those that the text holds are none."""
        return shielded(chunk.text) if self.format.has_marks else chunk.text

    async def read(self, chunk: Chunk, memory: str, num_tokens: int) -> tuple[Step, ParsedReply]:
        """Read a section with a memory of so many tokens: a step without its new memory, and the reply taken apart."""
        budget, document = self.budget, self.chunks.document
        prompt_tokens = budget.read_template + budget.question + chunk.num_tokens + num_tokens
        call = await self.call(
            self.section_messages(chunk, memory),
            self.config.sampling(budget.read_reply),
            prompt_tokens=prompt_tokens,
        )
        step = call.step("read", section=Section.of(chunk))
        parsed = parse_reply(step.reply, self.format)
        section = self._shown(chunk)
        if self.config.finds_copies and not parsed.quotes:
            quotes = place_copies(parsed.memory, document, start=chunk.start, section=section)
        else:
            quotes = place_quotes(parsed.quotes, document, start=chunk.start, section=section)
        return replace(step, quotes=quotes), parsed

    def change_of(self, parsed: ParsedReply, memory: str = "") -> MemoryChange:
        """What a reply does to a memory; one with nothing but marks keeps it."""
        if not parsed.memory and (parsed.quotes or parsed.says_enough):
            return MemoryChange("keep", "")
        return self.prompts.change_of(parsed.memory, memory)

    async def answer(self, done: Sequence[Step], memory: str, num_tokens: int) -> Step:
        """Answer from the memory and the quotes, as the step after those that are done."""
        config, budget = self.config, self.budget
        ledger = ledger_of(quote for step in done for quote in step.quotes)
        spans = {
            (step.section.start, step.section.end) for step in done if step.section is not None
        }
        shown = show_ledger(
            ledger,
            self.question,
            self.tokenizer,
            max_tokens=budget.ledger,
            with_counts=config.items,
        )
        messages = self.prompts.answer_messages(
            question=self.question,
            memory=with_ledger(memory, shown.text),
            num_sections=len({start for start, _ in spans}),
            answer_tokens=config.answer_tokens,
        )
        prompt_tokens = budget.answer_template + budget.question + num_tokens
        prompt_tokens += self.tokenizer.count(shown.text)
        call = await self.call(
            messages, config.sampling(budget.answer_reply), prompt_tokens=prompt_tokens
        )
        step = call.step("answer", index=len(done), memory=memory)
        unread = gaps(spans, len(self.chunks.document.text))
        step = replace(step, shown=shown.text, unread=unread).flagged(stopped_early=bool(unread))
        if config.keeps_quotes:
            copied = memory if config.quotes == "copied" else ""
            cited = cite(step.reply, ledger, shown, memory=copied)
            step = replace(step, cited=cited.numbers).flagged(citations_inferred=cited.is_inferred)
        if not step.reply:
            await call.forget()
            raise EmptyAnswer(no_answer(step), step)
        return step


async def read_in_order(reading: Reading) -> AsyncGenerator[Step, None]:
    """One section after the other, with one memory, then the answer."""
    config, chunks = reading.config, reading.chunks
    numbers: Iterator[int] = itertools.count()
    if config.order == "relevance":
        numbers = await asyncio.to_thread(_by_relevance, chunks, reading.question)
    state = ReadingState()
    done: list[Step] = []
    chunk = await cut_chunk(chunks, next(numbers, None))
    while chunk is not None:
        asked = asyncio.ensure_future(reading.read(chunk, state.memory, state.num_tokens))
        try:
            await asyncio.sleep(0)  # the request is sent; the next section is cut meanwhile
            upcoming = await cut_chunk(chunks, next(numbers, None))
            step, parsed = await asked
        finally:
            asked.cancel()
        new = rewrite(
            state.memory,
            state.num_tokens,
            reading.change_of(parsed, state.memory),
            reading.tokenizer,
            memory_tokens=config.memory_tokens,
            empty_replies=config.empty_replies,
            certainty=state.certainty,
            logprob=step.logprob,
        )
        step = replace(step, index=len(done), memory=new.text).flagged(
            memory_cut=new.was_cut,
            memory_kept=new.was_kept,
            malformed=parsed.is_malformed,
            enough=parsed.says_enough,
        )
        state = state.after_read(step, new.num_tokens)
        done.append(step)
        yield step
        chunk = None if config.stop_early and state.is_enough else upcoming
    yield await reading.answer(done, state.memory, state.num_tokens)


# --- sections -------------------------------------------------------------------------------------


def _by_relevance(chunks: Chunks, question: str) -> Iterator[int]:
    """Numbers of sections, those first that share most words with the question. The whole text is cut first."""
    texts = [chunk.text for chunk in chunks]
    return iter([each.number for each in rank_by_words(texts, question, what="`order=relevance`")])


async def cut_chunk(chunks: Chunks, index: int | None) -> Chunk | None:
    """The chunk at an index; in a thread if it has to be located, which would hold others up."""
    if index is None:
        return None
    if chunks.is_known(index):
        return chunks.get(index)
    return await asyncio.to_thread(chunks.get, index)


def gaps(spans: Iterable[tuple[int, int]], length: int) -> tuple[tuple[int, int], ...]:
    """What spans leave out of a text of this length.

    >>> gaps([(10, 20), (0, 5)], 30)
    ((5, 10), (20, 30))
    """
    found: list[tuple[int, int]] = []
    position = 0
    for start, end in sorted(spans):
        if start > position:
            found.append((position, start))
        position = max(position, end)
    return (*found, (position, length)) if position < length else tuple(found)


def no_answer(step: Step) -> str:
    """Why the step of an answer has none."""
    if step.refusal:
        return f"the model refused to answer: {' '.join(step.refusal.split())[:300]}"
    if "withheld" in step.flags:
        return "the server's content filter withheld the answer"
    if "reply_cut" in step.flags:
        return "the model spent its whole answer on reasoning; raise `answer_tokens` and resume"
    return "the model gave an empty answer"

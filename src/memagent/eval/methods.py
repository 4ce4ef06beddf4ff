"""Methods: ways to answer a question about a text, all `async (Example, Context) -> Trace`.

    reader        section by section with an overwritten memory (the package's own)
    direct        the whole text in one prompt, its middle cut out where the window is too small
    yarn          as direct, with the window extended by YaRN
    bm25          the passages that share most words with the question, then the answer
    dense         the passages whose embeddings are nearest to the question's, then the answer
    refine        an answer that is rewritten section by section
    map_reduce    notes on every section in parallel, then the answer from the notes
    closed_book   the bare question, to find out what a model knows without the text

A method of your own is a function in a file, named as `my.py:ask_twice`:

    async def ask_twice(example, context):
        await context.call([{"role": "user", "content": example.question}], kind="read")
        await context.call([{"role": "user", "content": "Are you sure?"}])
        return context.trace()

Every call goes through the context, which records it as a step, enforces the limits and gives each item
its own sampling seed. A method that leaves out a part of the text reports it with `context.cut`.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

from pydantic import Field

from memagent.agent.budget import JOINT_TOKENS
from memagent.agent.memory import rewrite, shortened
from memagent.agent.model_call import Limits, all_or_none, call_model
from memagent.agent.prompts import PROMPT_SETS, MemoryChange
from memagent.agent.reader import Reader
from memagent.agent.reading import cut_chunk, no_answer
from memagent.agent.trace import Section, Step, StepKind, Trace
from memagent.config import AgentConfig, EngineConfig
from memagent.data.example import Example
from memagent.documents.chunking import Chunks
from memagent.documents.document import Chunk, Document
from memagent.documents.ranking import check_bm25, rank_by_words
from memagent.engines.addresses import key_of_named
from memagent.engines.base import as_endpoint, facts_of
from memagent.engines.local.embedding import DEFAULT_EMBEDDER, Embedder, open_embedder
from memagent.errors import BudgetError, ConfigError, EmptyAnswer, EngineError
from memagent.eval import prompts
from memagent.eval.suites import CLOSED_BOOK
from memagent.names import hint
from memagent.plugins import is_file_spec, load_function
from memagent.tokens.tokenizers import Tokenizer
from memagent.types import Engine, Message

LEFT_OUT = "\n\n[...]\n\n"
"""Stands where the middle of a text was cut out."""
USUAL_CHARS_PER_TOKEN = 12
"""More than tokens of prose have: so much of a long text is counted first."""
PASSAGE_TOKENS = 256
"""Tokens of each passage that bm25 and dense rank."""
PASSAGE_BREAK_TOKENS = 2
"""The blank line between two passages."""
LEAST_TEXT_TOKENS = 32


class MethodSettings(AgentConfig):
    """How a method reads: the reader's settings, and those that other methods add."""

    prompts: str = "boxed"
    """Prompt set of the reader: default, boxed, paper, keep, add, shared, small, compact, compact_add, or the path of a TOML file."""
    embedder: str | None = None
    """Embedding model of dense: all-minilm-l6-v2 (the default), a folder of sentence-transformers, a hub id that was pulled, or openai:MODEL for an endpoint."""
    embedder_url: str | None = None
    """Address of the endpoint of `embedder`; by default that of the engine."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of your own methods."""


@dataclass(kw_only=True)
class Context:
    """What a method works with, for one item."""

    engine: Engine
    tokenizer: Tokenizer
    settings: MethodSettings
    """Sampling seed included."""
    limits: Limits
    method: str
    document: Document
    """The example's text."""
    question: str
    steps: list[Step] = field(default_factory=list)
    """Finished calls; also recorded when the method fails."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Stored in the record's metadata, under `method`."""
    is_cut: bool = False
    embedder: Embedder | None = None
    """The embedding model of the method dense."""
    keeps_memory: bool = False
    """Whether the memories of the steps are one that is carried along; its evidence is then looked for."""
    score: float | None = None
    """Score of a method that grades itself; None leaves it to the grader."""

    async def call(
        self,
        messages: Sequence[Message],
        *,
        kind: StepKind = "answer",
        max_tokens: int | None = None,
        chunk: Chunk | None = None,
        memory: str = "",
        index: int | None = None,
    ) -> Step:
        """One reply, as a step of the trace. `memory` is carried over if the reply is empty."""
        settings = self.settings
        limit = max_tokens or settings.answer_tokens
        sampling = settings.sampling(limit + settings.reasoning_tokens)
        call = await call_model(self.engine, self.tokenizer, self.limits, messages, sampling)
        step = call.step(
            kind,
            index=len(self.steps) if index is None else index,
            section=None if chunk is None else Section.of(chunk),
        )
        step = replace(step, memory=step.reply or memory)
        self.steps.append(step)
        if kind == "answer" and not step.reply:
            raise EngineError(no_answer(step))
        return step

    def cut(self, **details: Any) -> None:
        """Report that a part of the text is not read, and how much."""
        self.is_cut = True
        self.notes.update(details)

    def room(self, template: Sequence[Message], *, reply_tokens: int) -> int:
        """Tokens of text that fit the window beside a prompt and its reply."""
        reply = reply_tokens + self.settings.reasoning_tokens
        used = self.tokenizer.count_messages(template) + reply + JOINT_TOKENS
        room = self.settings.window - used
        if room < LEAST_TEXT_TOKENS:
            raise BudgetError(
                f"question, prompt and reply take {used} tokens of a window of "
                f"{self.settings.window}; raise `window` or lower `answer_tokens`"
            )
        return room

    def trace(self) -> Trace:
        """The steps so far as a Trace."""
        is_reader = self.method.partition(":")[0] == "reader"
        return Trace(
            question=self.question,
            steps=tuple(sorted(self.steps, key=lambda step: step.index)),
            model=self.engine.model,
            prompts=self.settings.prompts if is_reader else self.method,
            source=self.document.source,
            document_sha256=self.document.sha256,
        )


Method = Callable[[Example, Context], Awaitable[Trace]]


# --- the methods ----------------------------------------------------------------------------------


async def reader(example: Example, context: Context) -> Trace:
    """The memagent reader: one section after the other, with an overwritten memory."""
    reader = Reader(
        context.engine, tokenizer=context.tokenizer, config=context.settings, limits=context.limits
    )
    context.keeps_memory = True
    async with aclosing(reader.steps(example.question, context.document)) as steps:
        try:
            async for step in steps:
                context.steps.append(step)
        except EmptyAnswer as error:
            context.steps.append(error.step)  # what it used counts
            raise
    trace = context.trace()
    if trace.unread:
        context.cut(unread_chars=sum(end - start for start, end in trace.unread))
    return trace


async def direct(example: Example, context: Context) -> Trace:
    """The whole text in one prompt; its middle is cut out where it does not fit."""
    await _ask_once(prompts.DIRECT, example, context)
    return context.trace()


async def bm25(example: Example, context: Context) -> Trace:
    """The passages that BM25 ranks highest, in the order of the text, then the answer."""
    passages = await _passages(context)
    ranked = await asyncio.to_thread(by_words, passages, example.question)
    return await _ask_retrieved(passages, ranked, example, context)


async def dense(example: Example, context: Context) -> Trace:
    """The passages whose embeddings are nearest to the question's, in the order of the text, then the answer."""
    if context.embedder is None:
        raise ConfigError("the method dense has no `embedder`; open it by its name")
    passages = await _passages(context)
    ranked = await by_meaning(passages, example.question, context.embedder)
    return await _ask_retrieved(passages, ranked, example, context)


async def refine(example: Example, context: Context) -> Trace:
    """An answer that is rewritten with each section; the last one counts."""
    settings = context.settings
    words = str(settings.memory_tokens * 3 // 4)
    values = {"question": example.question, "number": "1000000", "words": words}
    empty = prompts.messages(prompts.REFINE, text="", draft="", **values)
    _check_sections(context, empty, reply_tokens=2 * settings.memory_tokens)
    chunks = _sections(context)
    context.keeps_memory = True
    draft, chunk = "", await cut_chunk(chunks, 0)
    while chunk is not None:
        upcoming = await cut_chunk(chunks, chunk.index + 1)
        values |= {"number": str(chunk.index + 1)}
        step = await context.call(
            prompts.messages(
                prompts.REFINE, text=chunk.text, draft=draft or prompts.NO_DRAFT, **values
            ),
            kind="read" if upcoming else "answer",
            max_tokens=settings.memory_tokens,
            chunk=chunk,
            memory=draft,
        )
        change = MemoryChange("replace", step.reply)
        draft = rewrite(
            draft, 0, change, context.tokenizer, memory_tokens=settings.memory_tokens
        ).text
        chunk = upcoming
    return context.trace()


async def map_reduce(example: Example, context: Context) -> Trace:
    """Notes on every section, in parallel; notes that do not fit one prompt are merged first."""
    settings = context.settings
    words = str(settings.memory_tokens * 3 // 4)
    question = example.question
    empty = prompts.messages(prompts.MAP, text="", question=question, number="1000000", words=words)
    _check_sections(context, empty, reply_tokens=settings.memory_tokens)
    chunks = await asyncio.to_thread(list, _sections(context))

    async def take_notes(chunk: Chunk) -> str:
        number = str(chunk.index + 1)
        asked = prompts.messages(
            prompts.MAP, text=chunk.text, question=question, number=number, words=words
        )
        step = await context.call(
            asked, kind="read", max_tokens=settings.memory_tokens, chunk=chunk, index=chunk.index
        )
        return step.reply

    notes = _worth_keeping(await all_or_none([take_notes(chunk) for chunk in chunks]))
    notes = await _merged(notes, example, context, next_index=len(chunks))
    text = "\n\n".join(notes) or prompts.NO_DRAFT
    await context.call(prompts.messages(prompts.REDUCE, text=text, question=question))
    return context.trace()


async def closed_book(example: Example, context: Context) -> Trace:
    """The bare question, without the text."""
    await context.call(prompts.messages(prompts.CLOSED_BOOK, question=example.question))
    return context.trace()


METHODS: dict[str, Method] = {
    "reader": reader,
    "direct": direct,
    "yarn": direct,
    "bm25": bm25,
    "dense": dense,
    "refine": refine,
    "map_reduce": map_reduce,
    CLOSED_BOOK: closed_book,
}
"""Name to method."""

WHOLE_WINDOW = frozenset({"direct", "yarn", CLOSED_BOOK})
"""Methods whose default `window` is the whole window that the engine serves."""


# --- finding a method -----------------------------------------------------------------------------


def open_method(name: str) -> Method:
    """A method by name: `reader:PROMPTS` reads with a prompt set, `FILE.py:FUNCTION` is your own."""
    if is_file_spec(name):
        return _from_file(name)
    kind, _, prompt_set = name.partition(":")
    if kind == "bm25":
        check_bm25("the method bm25")
    if kind not in METHODS:
        raise ConfigError(
            f"there is no method {name!r} (your own is FILE.py:FUNCTION); {hint(kind, METHODS)}"
        )
    if prompt_set and kind != "reader":
        raise ConfigError(f"{name!r}: only the reader takes a prompt set after a colon")
    if prompt_set and prompt_set not in PROMPT_SETS and not Path(prompt_set).expanduser().is_file():
        raise ConfigError(f"method {name}: there is no prompt set or file {prompt_set!r}")
    return METHODS[kind]


def settings_for(
    name: str, engine: Engine, shared: dict[str, Any], own: dict[str, Any]
) -> MethodSettings:
    """The settings of a method: the model's reading defaults, then `shared`, then its `own`."""
    base = dict(facts_of(engine).reading_defaults)
    kind, _, prompt_set = name.partition(":")
    served = facts_of(engine).served_window
    if kind in WHOLE_WINDOW and served is not None:
        base["window"] = served
    if kind == "reader" and prompt_set:
        own = {"prompts": prompt_set, **own}
    values = {**base, **shared, **own}
    try:
        settings = MethodSettings.parse(values)
    except ConfigError as error:
        raise ConfigError(f"method {name}: {error}") from None
    if served is not None and served < settings.window:
        raise ConfigError(
            f"method {name}: {engine.model} has a window of {served} tokens, less than "
            f"`window={settings.window}`; lower `window` and, if needed, `chunk_tokens`"
        )
    return settings


def embedder_for(name: str, settings: MethodSettings, engine: Engine) -> Embedder | None:
    """The embedding model of a method, opened; None where it needs none."""
    if name != "dense":
        return None
    endpoint = as_endpoint(engine)
    config = endpoint.config if endpoint else None
    if (url := settings.embedder_url) is not None:
        named = {"base_url": url}
        config = EngineConfig.parse(named | key_of_named(named, dict(config) if config else {}))
    return open_embedder(settings.embedder or DEFAULT_EMBEDDER, base_url=url, settings=config)


def method_sha256(name: str) -> str:
    """Fingerprint of a method's prompts, or of the file of your own method; empty for the reader."""
    if is_file_spec(name):
        return hashlib.sha256(Path(name.partition(":")[0]).expanduser().read_bytes()).hexdigest()
    return prompts.fingerprint() if name.partition(":")[0] != "reader" else ""


def _from_file(spec: str) -> Method:
    method: Method = load_function(spec, what="method", parameters=("example", "context"))
    if not inspect.iscoroutinefunction(method):
        name = spec.partition(":")[2]
        raise ConfigError(f"{spec} is not async; write it as async def {name}(example, context)")
    return method


# --- what they share ------------------------------------------------------------------------------


async def _passages(context: Context) -> list[Chunk]:
    chunks = Chunks(context.document, context.tokenizer, PASSAGE_TOKENS)
    return await asyncio.to_thread(list, chunks)


def by_words(passages: Sequence[Chunk], question: str) -> list[int]:
    """Numbers of the passages, best BM25 score first; those that share no word with the question are left out.

    Where none shares one, the first passage is all there is.
    """
    ranked = rank_by_words([one.text for one in passages], question, what="the method bm25")
    return [each.number for place, each in enumerate(ranked) if place == 0 or each.score > 0]


async def by_meaning(passages: Sequence[Chunk], question: str, embedder: Embedder) -> list[int]:
    """Numbers of the passages, most similar to the question first."""
    [asked] = await embedder.embed([question], is_query=True)
    vectors = await embedder.embed([passage.text for passage in passages])
    scores = [sum(a * b for a, b in zip(asked, vector, strict=True)) for vector in vectors]
    return sorted(range(len(passages)), key=lambda number: -scores[number])


async def _ask_retrieved(
    passages: Sequence[Chunk], ranked: Sequence[int], example: Example, context: Context
) -> Trace:
    """Ask with the passages that are ranked highest, as many as fit, in the order of the text."""
    empty = prompts.messages(prompts.RETRIEVED, text="", question=example.question)
    room = context.room(empty, reply_tokens=context.settings.answer_tokens)
    sizes = accumulate(passages[number].num_tokens + PASSAGE_BREAK_TOKENS for number in ranked)
    num_fitting = sum(1 for _ in takewhile(lambda size: size <= room, sizes))
    found = [passages[number] for number in sorted(ranked[:num_fitting])]
    context.notes["num_passages"] = len(found)
    if len(found) < len(passages):
        context.cut(num_passages_in_text=len(passages))
    asked = prompts.messages(
        prompts.RETRIEVED, text=joined_passages(found), question=example.question
    )
    await context.call(asked)
    return context.trace()


def joined_passages(passages: Sequence[Chunk]) -> str:
    """One text: neighbours as they stand in the document, a blank line between others."""
    text, end = "", 0
    for passage in passages:
        is_next = passage.start == end
        text = text + passage.text if is_next else f"{text.rstrip()}\n\n{passage.text.lstrip()}"
        end = passage.end
    return text.strip()


async def _ask_once(template: str, example: Example, context: Context) -> None:
    empty = prompts.messages(template, text="", question=example.question)
    room = context.room(empty, reply_tokens=context.settings.answer_tokens)
    text = context.document.text
    kept = await asyncio.to_thread(cut_middle, text, context.tokenizer, max_tokens=room)
    if kept is not None:
        context.cut(kept_chars=len(kept) - len(LEFT_OUT), num_chars=len(text))
    asked = prompts.messages(
        template, text=text if kept is None else kept, question=example.question
    )
    await context.call(asked)


def cut_middle(text: str, tokenizer: Tokenizer, *, max_tokens: int) -> str | None:
    """The start and the end of a text, together within the limit; None when the whole text fits.

    Of most texts that do not fit, only the two ends are counted.
    """
    num_chars, count = max_tokens * USUAL_CHARS_PER_TOKEN, tokenizer.count
    if count(text[:num_chars]) <= max_tokens and count(text) <= max_tokens:
        return None
    half = (max_tokens - count(LEFT_OUT)) // 2
    while num_chars < len(text) and min(count(text[:num_chars]), count(text[-num_chars:])) <= half:
        num_chars *= 2
    head = shortened(text[:num_chars], tokenizer, max_tokens=half)
    tail = ending(text[len(head) :][-num_chars:], tokenizer, max_tokens=half)
    return head + LEFT_OUT + tail


def ending(text: str, tokenizer: Tokenizer, *, max_tokens: int) -> str:
    """The longest end of a text, or nearly so, that has at most `max_tokens` on its own."""
    measured = tokenizer.measure(text)
    if measured.num_tokens <= max_tokens:
        return text
    start = measured.end_of(measured.num_tokens - max_tokens)
    while start < len(text) and tokenizer.count(text[start:]) > max_tokens:
        start += 1
    return text[start:]


def _sections(context: Context) -> Chunks:
    settings = context.settings
    return Chunks(
        context.document, context.tokenizer, settings.chunk_tokens, ends=settings.section_ends
    )


def _check_sections(context: Context, empty: Sequence[Message], *, reply_tokens: int) -> None:
    """Raise BudgetError when a section does not fit the window with prompt, question and reply."""
    room = context.room(empty, reply_tokens=reply_tokens)
    if room < context.settings.chunk_tokens:
        raise BudgetError(
            f"sections of {context.settings.chunk_tokens} tokens do not fit a window of "
            f"{context.settings.window} with question, prompt and memory; "
            f"lower to `chunk_tokens={room}`"
        )


async def _merged(
    notes: list[str], example: Example, context: Context, *, next_index: int
) -> list[str]:
    """Notes that fit one prompt: adjacent notes are merged until they do."""
    settings = context.settings
    words = str(settings.memory_tokens * 3 // 4)
    empty = prompts.messages(prompts.COLLAPSE, text="", question=example.question, words=words)
    reply_tokens = max(settings.memory_tokens, settings.answer_tokens)
    room = context.room(empty, reply_tokens=reply_tokens)
    limit = min(settings.memory_tokens, room // 2 - 2)  # two notes fit, so every round has fewer
    notes = [shortened(note, context.tokenizer, max_tokens=limit) for note in notes]
    while len(groups := _grouped(notes, context.tokenizer, room)) > 1:

        async def merge(group: list[str], index: int) -> str:
            text = "\n\n".join(group)
            asked = prompts.messages(
                prompts.COLLAPSE, text=text, question=example.question, words=words
            )
            step = await context.call(
                asked, kind="read", max_tokens=settings.memory_tokens, index=index
            )
            return shortened(step.reply, context.tokenizer, max_tokens=limit)

        merged = [merge(group, next_index + number) for number, group in enumerate(groups)]
        next_index += len(groups)
        notes = _worth_keeping(await all_or_none(merged))
    return notes


def _grouped(notes: Iterable[str], tokenizer: Tokenizer, room: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    used = 0
    for note in notes:
        size = tokenizer.count(note) + 2
        if groups[-1] and used + size > room:
            groups.append([])
            used = 0
        groups[-1].append(note)
        used += size
    return groups


def _worth_keeping(notes: Iterable[str]) -> list[str]:
    return [note for note in notes if note and note.strip(" .*").upper() != prompts.NOTHING]

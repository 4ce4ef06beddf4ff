"""The reader: sections in, memory over and over, an answer out.

    chunk 1        chunk 2              chunk n
       │              │                    │
       ▼              ▼                    ▼
    [ read ] ─────▶ [ read ] ── … ─────▶ [ read ] ─────▶ [ answer ]
              memory          memory               memory

`Reader.steps` is the one loop that the command line, evaluation and training drive. It yields each
step as soon as it is done, and the next call is sent only when the caller asks for the next step: a
caller that writes the step to disk first loses nothing when it is killed.

    reader = Reader("local:smollm2-135m")
    trace = reader.ask("Who inherits the house?", Document.load("novel.txt"))
    print(trace.answer)

Sections may also be read apart from each other, and what was noted merged: see `parallel`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Unpack

from memagent import blocking, trust
from memagent.agent.budget import Budget, check_budget
from memagent.agent.evidence.answers import cite, show_ledger, with_ledger
from memagent.agent.evidence.ledger import ledger_of
from memagent.agent.evidence.quotes import Quote, place_copies, place_quotes
from memagent.agent.evidence.replies import ParsedReply, ReplyFormat, parse_reply, shielded
from memagent.agent.journal import Journal, check_same, identity, read_reading
from memagent.agent.limits import Limits
from memagent.agent.memory import ReadingState, rewrite, spans_of, split_reasoning
from memagent.agent.model_call import ModelCall, call_model
from memagent.agent.modes.parallel import CALLS_AT_ONCE, CallSlots, reading_apart
from memagent.agent.modes.section_order import SectionOrder, order_sections
from memagent.agent.prompts import MemoryChange, PromptSet, prompts_for
from memagent.agent.trace import Section, Step, Trace
from memagent.config import AgentConfig, ReadingSettings
from memagent.documents.chunking import Chunks
from memagent.documents.document import Chunk, Document
from memagent.engines.base import SETTINGS, BaseEngine, open_engine
from memagent.errors import ConfigError, DocumentError, EmptyAnswer
from memagent.files import reason_of
from memagent.replies import Scope
from memagent.tokens.tokenizers import Tokenizer, open_tokenizer, tokenizer_for_model
from memagent.types import Engine, Message, Sampling


class Reader:
    """Answers questions about texts of any length through an engine with a fixed window."""

    def __init__(
        self,
        engine: Engine | str,
        *,
        tokenizer: Tokenizer | str | None = None,
        config: AgentConfig | None = None,
        limits: Limits | None = None,
        **settings: Unpack[ReadingSettings],
    ) -> None:
        """An engine by name is opened: `Reader("openai:my-model")`. Its own settings, such as
        `base_url`, are given to `open_engine`.

        Settings may be given one by one: `Reader(engine, window=32768, chunk_tokens=20000)`.
        What is not given is as the engine's model reads best, where the engine knows. Raises
        ConfigError when the engine serves a smaller window, when exact sections are set without the
        model's tokenizer, and for a setting that has no effect with the others.

        Without a tokenizer the model's own is opened; where it is not available, sizes are estimated
        with a margin and `reader.tokenizer_note` says why.
        """
        if config is not None and settings:
            raise ConfigError(
                f"give either config or single settings, not both: {sorted(settings)}"
            )
        _check_names(settings)
        engine = open_engine(engine) if isinstance(engine, str) else engine
        self.engine: Engine = engine
        own = engine.reading_defaults if isinstance(engine, BaseEngine) else {}
        self.config = config or AgentConfig.parse({**own, **settings})
        self.config.check_used(_changed(settings, own))
        _check_served_window(engine, self.config)
        self.prompts: PromptSet = prompts_for(self.config)
        self.reply_format = ReplyFormat.of(self.config)
        self.limits = limits or Limits()
        self.tokenizer, self.tokenizer_note = _resolve_tokenizer(tokenizer, engine.tokenizer)
        check_section_ends(self.config, self.tokenizer, engine.model)
        if self.config.joins_memories and not self.prompts.no_change:
            raise ConfigError(
                "`notes=memories` needs prompts in which a section may add nothing; give `no_change`"
            )

    def ask(
        self,
        question: str,
        document: Document | str,
        *,
        run_dir: str | Path | None = None,
        continues: str | Path | None = None,
    ) -> Trace:
        """Read the document and answer. Blocks until done; see `aask` for async code."""
        return blocking.run(self.aask(question, document, run_dir=run_dir, continues=continues))

    async def aask(
        self,
        question: str,
        document: Document | str,
        *,
        run_dir: str | Path | None = None,
        continues: str | Path | None = None,
    ) -> Trace:
        """Read the document and answer.

        With a run directory every reply is on disk before it is used; asking the same again with
        the same directory repeats no call. With `continues`, the directory of a run over an earlier
        version of the text, only what is new or changed is read.
        """
        [trace] = await self.aask_many([question], document, run_dir=run_dir, continues=continues)
        return trace

    def ask_many(
        self,
        questions: Sequence[str],
        document: Document | str,
        *,
        run_dir: str | Path | None = None,
        continues: str | Path | None = None,
    ) -> list[Trace]:
        """Answer several questions about one text, concurrently. Blocks until done."""
        return blocking.run(
            self.aask_many(questions, document, run_dir=run_dir, continues=continues)
        )

    async def aask_many(
        self,
        questions: Sequence[str],
        document: Document | str,
        *,
        run_dir: str | Path | None = None,
        continues: str | Path | None = None,
    ) -> list[Trace]:
        """Answer several questions about one text, concurrently; see `aask`."""
        if isinstance(questions, str):
            raise ConfigError("`questions` is a list; ask a single question with ask or aask")
        chunks = self.chunks(document)
        identity = self.identity(questions, chunks.document)
        also = self.continued(continues, questions, chunks.document)
        journal = (
            Journal(also=also)
            if run_dir is None
            else Journal.open(Path(run_dir), identity, also=also)
        )
        try:
            return await self.read(questions, chunks, journal)
        finally:
            journal.close()

    async def read(
        self,
        questions: Sequence[str],
        chunks: Chunks,
        journal: Journal,
        on_step: Callable[[int, Step], None] | None = None,
    ) -> list[Trace]:
        """Answer questions concurrently; replies that the journal has are used again.

        When one question fails the others are still read as far as they get, then the first error
        is raised. `on_step` gets the number of a question and its step. What the journal
        holds already counts towards the limits.
        """
        self.limits.count(journal.replies.usage)
        slots = self.call_slots()
        readings = [
            self._read_one(number, checked_question(question), chunks, journal, on_step, slots)
            for number, question in enumerate(questions)
        ]
        results = await asyncio.gather(*readings, return_exceptions=True)
        await asyncio.to_thread(journal.sync)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, Trace)]

    async def _read_one(
        self,
        number: int,
        question: str,
        chunks: Chunks,
        journal: Journal,
        on_step: Callable[[int, Step], None] | None,
        slots: CallSlots,
    ) -> Trace:
        done: list[Step] = []
        known = journal.replies.scope(str(number))
        async with aclosing(self.steps(question, chunks, slots=slots, known=known)) as steps:
            async for step in steps:
                journal.append(number, step)
                done.append(step)
                if on_step:
                    on_step(number, step)
        return self.trace(question, chunks.document, done)

    def identity(self, questions: Sequence[str], document: Document) -> dict[str, Any]:
        """What decides the trace of a reading; see `agent.journal`."""
        return identity(
            questions=[checked_question(question) for question in questions],
            document=document,
            model=self.engine.model,
            tokenizer=self.tokenizer.name,
            config=self.config,
            prompts=self.prompts,
        )

    def continued(
        self, path: str | Path | None, questions: Sequence[str], document: Document
    ) -> list[Path]:
        """The run whose replies are used again, if there is one; it is recorded as named on this machine.

        Raises RunError where it asks something else, or with another model or other settings.
        """
        if path is None:
            return []
        path = Path(path).absolute()
        stored = read_reading(path)
        wanted = {**self.identity(questions, document), "document": stored["document"]}
        check_same(stored, wanted, path, what="continue")
        trust.remember("file", str(path))
        return [path]

    def iter_steps(self, question: str, document: Document | str) -> Iterator[Step]:
        """The steps as they happen, for ordinary code."""
        return blocking.iterate(self.steps(question, document))

    async def steps(
        self,
        question: str,
        document: Document | Chunks | str,
        *,
        slots: CallSlots | None = None,
        known: Scope | None = None,
    ) -> AsyncGenerator[Step, None]:
        """The steps as they happen; replies that are `known` are not asked for again.

        Questions over one text whose sections are read apart from each other share `slots`.
        """
        question = checked_question(question)
        budget = self.check(question)
        chunks = self.chunks(document)
        if not chunks.document.text:
            raise DocumentError("the text is empty; there is nothing to read")
        reading = (
            reading_apart(self, question, chunks, budget, slots, known)
            if self.config.merges
            else self._in_order(question, chunks, budget, known)
        )
        async with aclosing(reading) as steps:
            async for step in steps:
                yield step

    async def _in_order(
        self, question: str, chunks: Chunks, budget: Budget, known: Scope | None
    ) -> AsyncGenerator[Step, None]:
        """One section after the other, with one memory."""
        sections = await order_sections(chunks, question, self.config.order)
        state = ReadingState()
        done: list[Step] = []
        chunk = await sections.get(0)
        while chunk is not None:
            reading = asyncio.ensure_future(
                self.read_section(question, len(done), chunk, state, budget, chunks.document, known)
            )
            try:
                await asyncio.sleep(0)  # the request is sent; the next section is cut meanwhile
                upcoming = await sections.get(len(done) + 1)
                step, state = await reading
            finally:
                reading.cancel()
            done.append(step)
            yield step
            chunk = None if self.config.stop_early and state.is_enough else upcoming
        yield await self.write_answer(question, done, state, budget, sections, known)

    def call_slots(self) -> CallSlots:
        """Places for calls, as many as the engine works on at once."""
        at_once = self.engine.calls_at_once if isinstance(self.engine, BaseEngine) else None
        return CallSlots(at_once or CALLS_AT_ONCE)

    def check(self, question: str) -> Budget:
        """The token budget for a question. Raises BudgetError when it cannot be met."""
        return check_budget(question, self.config, self.prompts, self.tokenizer)

    def chunks(self, document: Document | Chunks | str) -> Chunks:
        """The document's sections, cut on demand. Share them between questions over one text."""
        if isinstance(document, Chunks):
            return document
        if isinstance(document, str):
            _check_no_path(document)
            document = Document.from_text(document)
        if not isinstance(document, Document):
            raise DocumentError(
                f"a text is a Document or a string, not {type(document).__name__}; read files with "
                "Document.load(path)"
            )
        config = self.config
        return Chunks(document, self.tokenizer, config.chunk_tokens, ends=config.section_ends)

    def trace(self, question: str, document: Document, steps: Sequence[Step]) -> Trace:
        """Steps as a Trace."""
        return Trace(
            question=question,
            steps=tuple(steps),
            model=self.engine.model,
            prompts=self.prompts.name,
            source=document.source,
            document_sha256=document.sha256,
        )

    async def read_section(
        self,
        question: str,
        position: int,
        chunk: Chunk,
        state: ReadingState,
        budget: Budget,
        document: Document,
        known: Scope | None = None,
    ) -> tuple[Step, ReadingState]:
        """Read a section with the memory of those before; the step, and the state after it."""
        section = self.section_text(chunk)
        call = await self.call_on_section(question, chunk, state, budget, known)
        reply, reasoning = split_reasoning(call.completion.text)
        parsed = parse_reply(reply, self.reply_format)
        new = rewrite(
            state.memory,
            state.num_tokens,
            self.change_of(parsed, state.memory),
            self.tokenizer,
            memory_tokens=self.config.memory_tokens,
            empty_replies=self.config.empty_replies,
            certainty=state.certainty,
            logprob=call.logprob,
        )
        flags = call.flags
        flags += ["memory_cut"] if new.was_cut else []
        flags += ["memory_kept"] if new.was_kept else []
        flags += ["malformed"] if parsed.is_malformed else []
        flags += ["enough"] if parsed.says_enough else []
        step = Step(
            kind="read",
            index=position,
            reply=reply,
            memory=new.text,
            section=Section.of(chunk),
            reasoning=call.completion.reasoning or reasoning,
            flags=tuple(flags),
            quotes=self.placed_quotes(parsed, chunk, section, document),
            **call.measures(),
        )
        return step, state.after_read(step, new.num_tokens)

    async def call_on_section(
        self,
        question: str,
        chunk: Chunk,
        state: ReadingState,
        budget: Budget,
        known: Scope | None,
    ) -> ModelCall:
        """The reply to a section."""
        messages = self.section_messages(question, chunk, state.memory)
        prompt_tokens = budget.read_template + budget.question + chunk.num_tokens + state.num_tokens
        return await self.call(messages, prompt_tokens, max_tokens=budget.read_reply, known=known)

    def section_messages(self, question: str, chunk: Chunk, memory: str) -> list[Message]:
        """The prompt of a section."""
        return self.prompts.section_messages(
            is_parallel=self.config.asks_notes,
            question=question,
            section=self.section_text(chunk),
            memory=memory,
            section_number=chunk.index + 1,
            memory_tokens=self.config.memory_tokens,
        )

    def section_text(self, chunk: Chunk) -> str:
        """A section as the model sees it; where replies have marks, those that the text holds are none."""
        return shielded(chunk.text) if self.reply_format.has_marks else chunk.text

    def placed_quotes(
        self, parsed: ParsedReply, chunk: Chunk, section: str, document: Document
    ) -> tuple[Quote, ...]:
        """The quotes of a reply to a section, searched in it; without any, what its memory has of the section."""
        if self.config.finds_copies and not parsed.quotes:
            return place_copies(parsed.memory, document, start=chunk.start, section=section)
        return place_quotes(parsed.quotes, document, start=chunk.start, section=section)

    def change_of(self, parsed: ParsedReply, memory: str = "") -> MemoryChange:
        """What a reply does to a memory; one with nothing but marks keeps it."""
        if not parsed.memory and (parsed.quotes or parsed.says_enough):
            return MemoryChange("keep", "")
        return self.prompts.change_of(parsed.memory, memory)

    async def write_answer(
        self,
        question: str,
        done: Sequence[Step],
        state: ReadingState,
        budget: Budget,
        sections: SectionOrder,
        known: Scope | None = None,
    ) -> Step:
        """Answer from the memory and the quotes, as the step after those that are done."""
        ledger = ledger_of(quote for step in done for quote in step.quotes)
        spans = spans_of(done)
        shown = show_ledger(
            ledger,
            question,
            self.tokenizer,
            max_tokens=budget.ledger,
            with_counts=self.config.items,
        )
        messages = self.prompts.answer_messages(
            question=question,
            memory=with_ledger(state.memory, shown.text),
            num_sections=len({span.start for span in spans}),
            answer_tokens=self.config.answer_tokens,
        )
        prompt_tokens = budget.answer_template + budget.question + state.num_tokens
        prompt_tokens += self.tokenizer.count(shown.text)
        call = await self.call(messages, prompt_tokens, max_tokens=budget.answer_reply, known=known)
        reply, reasoning = split_reasoning(call.completion.text)
        unread = sections.unread(spans)
        copied = state.memory if self.config.quotes == "copied" else ""
        cited = cite(reply, ledger, shown, memory=copied) if self.config.keeps_quotes else None
        flags = call.flags
        flags += ["stopped_early"] if unread else []
        flags += ["citations_inferred"] if cited and cited.is_inferred else []
        step = Step(
            kind="answer",
            index=len(done),
            reply=reply,
            memory=state.memory,
            reasoning=call.completion.reasoning or reasoning,
            flags=tuple(flags),
            cited=None if cited is None else cited.numbers,
            shown=shown.text,
            unread=unread,
            **call.measures(),
        )
        if not reply:
            if known is not None:
                await known.forget(call.replies)
            raise EmptyAnswer(no_answer(step), step)
        return step

    async def call(
        self,
        messages: list[Message],
        prompt_tokens: int,
        *,
        max_tokens: int,
        known: Scope | None = None,
    ) -> ModelCall:
        """One reply, sampled as the settings say, within the limits."""
        return await call_model(
            self.engine,
            self.tokenizer,
            self.limits,
            messages,
            self.sampling(max_tokens),
            prompt_tokens=prompt_tokens,
            known=known,
        )

    def sampling(self, max_tokens: int) -> Sampling:
        """How replies of so many tokens are sampled."""
        config = self.config
        return Sampling(
            max_tokens=max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            seed=config.seed,
        )


def read_questions(path: str | Path) -> list[str]:
    """The questions of a JSON Lines file: on each line a string, or an object with `question`."""
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ConfigError(f"the questions in {path} cannot be read: {reason_of(error)}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the questions in {path} are not UTF-8 text") from None
    found = [
        _question_of(line, f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not found:
        raise ConfigError(f"{path} holds no question")
    return found


def _question_of(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    question = value.get("question") if isinstance(value, dict) else value
    if not isinstance(question, str) or not question.strip():
        raise ConfigError(
            f'{where}: write a question as a JSON string, or as an object such as {{"question": "Who?"}}'
        )
    return checked_question(question)


def checked_question(question: str) -> str:
    """The question without outer white space. Raises ConfigError when it is empty or not Unicode."""
    question = question.strip()
    if not question:
        raise ConfigError("the question is empty; say what you want to know of the text")
    try:
        question.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(
            "the question is not valid Unicode; check your terminal's encoding"
        ) from None
    return question


def check_section_ends(config: AgentConfig, tokenizer: Tokenizer, model: str) -> None:
    """Raise ConfigError where exact sections are set and tokens can only be estimated."""
    if config.section_ends == "exact" and not tokenizer.is_exact:
        raise ConfigError(
            f"`section_ends=exact` needs the tokenizer of {model}, which is not available; name one "
            "with `tokenizer`"
        )


def _check_names(settings: Mapping[str, object]) -> None:
    """Raise ConfigError for settings of engines, before an engine is opened."""
    of_engines = {
        name for groups in SETTINGS.values() for group in groups for name in group.model_fields
    }
    if name := next((each for each in settings if each in of_engines), None):
        raise ConfigError(
            f"`{name}` is a setting of the engine, not of the reader; give it to open_engine"
        )


def _changed(settings: Mapping[str, object], own: Mapping[str, object]) -> list[str]:
    """Settings with a value that neither the model nor the package has by itself."""
    fields = AgentConfig.model_fields
    return [
        name
        for name, value in settings.items()
        if value not in (own.get(name), fields[name].default)
    ]


def _check_served_window(engine: Engine, config: AgentConfig) -> None:
    served = engine.served_window if isinstance(engine, BaseEngine) else None
    if served is not None and served < config.window:
        raise ConfigError(
            f"{engine.model} has a window of {served} tokens, less than `window={config.window}`; "
            f"give `window={served}` and, if needed, a lower `chunk_tokens`, or raise the window of the server "
            f"(OLLAMA_CONTEXT_LENGTH={config.window} for Ollama)"
        )


def _resolve_tokenizer(
    tokenizer: Tokenizer | str | None, default: str
) -> tuple[Tokenizer, str | None]:
    if tokenizer is None:
        return tokenizer_for_model(default)
    if isinstance(tokenizer, str):
        return open_tokenizer(tokenizer), None
    return tokenizer, None


def _check_no_path(text: str) -> None:
    """Raise DocumentError for the name of a file in place of its text."""
    if len(text) < 256 and len(text.split()) == 1 and Path(text).is_file():
        raise DocumentError(f"{text} is a file; read it with Document.load({text!r})")


def no_answer(step: Step) -> str:
    """Why the step of an answer has none."""
    if step.refusal:
        return f"the model refused to answer: {' '.join(step.refusal.split())[:300]}"
    if "withheld" in step.flags:
        return "the server's content filter withheld the answer"
    if "reply_cut" in step.flags:
        return "the model spent its whole answer on reasoning; raise `answer_tokens` and resume"
    return "the model gave an empty answer"

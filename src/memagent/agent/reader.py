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

Sections may also be read apart from each other, and what was noted merged: see `agent.parallel`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from memagent import blocking, trust
from memagent.agent.budget import Budget, check_budget
from memagent.agent.evidence.replies import ReplyFormat
from memagent.agent.journal import Journal, check_same, earlier_replies, identity, read_reading
from memagent.agent.model_call import Limits, call_model
from memagent.agent.parallel import CALLS_AT_ONCE, read_at_once
from memagent.agent.prompts import PromptSet, prompts_for
from memagent.agent.reading import Reading, read_in_order
from memagent.agent.trace import Step, Trace
from memagent.config import AgentConfig, ReadingSettings
from memagent.documents.chunking import Chunks
from memagent.documents.document import Document
from memagent.engines.base import SETTINGS, facts_of, open_engine
from memagent.engines.limit import Slots
from memagent.errors import ConfigError, DocumentError
from memagent.files import reason_of
from memagent.replies import Scope
from memagent.tokens.tokenizers import Tokenizer, open_tokenizer, tokenizer_for_model
from memagent.types import Engine


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
        Defaults come from the engine's model where it has reading defaults. Raises
        ConfigError when the engine serves a smaller window, when exact sections are set without the
        model's tokenizer, and for a setting that has no effect with the others.

        Without a tokenizer the model's own is opened; where it is not available, sizes are estimated
        with a margin and `reader.tokenizer_note` says why.
        """
        if config is not None and settings:
            raise ConfigError(
                f"give either config or single settings, not both: {sorted(settings)}"
            )
        of_engines = {
            name for each in SETTINGS.values() for one in each for name in one.model_fields
        }
        if name := next((each for each in settings if each in of_engines), None):
            raise ConfigError(
                f"`{name}` is a setting of the engine, not of the reader; give it to open_engine"
            )
        engine = open_engine(engine) if isinstance(engine, str) else engine
        self.engine: Engine = engine
        own = facts_of(engine).reading_defaults
        self.config = config or AgentConfig.parse({**own, **settings})
        fields = AgentConfig.model_fields
        self.config.check_used(
            name
            for name, value in settings.items()
            if value not in (own.get(name), fields[name].default)
        )
        served = facts_of(engine).served_window
        if served is not None and served < self.config.window:
            raise ConfigError(
                f"{engine.model} has a window of {served} tokens, less than `window={self.config.window}`; "
                f"give `window={served}` and, if needed, a lower `chunk_tokens`, or raise the window of the server "
                f"(OLLAMA_CONTEXT_LENGTH={self.config.window} for Ollama)"
            )
        self.prompts: PromptSet = prompts_for(self.config)
        self.limits = limits or Limits()
        self.tokenizer: Tokenizer
        self.tokenizer_note: str | None = None
        if tokenizer is None:
            self.tokenizer, self.tokenizer_note = tokenizer_for_model(engine.tokenizer)
        else:
            self.tokenizer = open_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
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
        [trace] = self.ask_many([question], document, run_dir=run_dir, continues=continues)
        return trace

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
        also = self.continued(continues, questions, chunks.document)
        if run_dir is None:
            return await self.read(questions, chunks, earlier=also)
        identity = self.identity(questions, chunks.document)
        journal = Journal.open(Path(run_dir), identity, also=also)
        try:
            return await self.read(questions, chunks, journal)
        finally:
            journal.close()

    async def read(
        self,
        questions: Sequence[str],
        chunks: Chunks,
        journal: Journal | None = None,
        on_step: Callable[[int, Step], None] | None = None,
        *,
        earlier: Sequence[Path] = (),
    ) -> list[Trace]:
        """Answer questions concurrently; replies that the journal or `earlier` runs have are used again.

        When one question fails the others are still read as far as they get, then the first error
        is raised. `on_step` gets the number of a question and its step. What the journal
        holds already counts towards the limits.
        """
        replies = journal.replies if journal else earlier_replies(earlier) if earlier else None
        if replies:
            self.limits.count(replies.usage)
        slots = Slots(self.calls_at_once)

        async def read_one(number: int, question: str) -> Trace:
            done: list[Step] = []
            known = replies.scope(str(number)) if replies else None
            async with aclosing(self.steps(question, chunks, slots=slots, known=known)) as steps:
                async for step in steps:
                    if journal:
                        journal.append(number, step)
                    done.append(step)
                    if on_step:
                        on_step(number, step)
            return self.trace(checked_question(question), chunks.document, done)

        readings = [read_one(number, question) for number, question in enumerate(questions)]
        results = await asyncio.gather(*readings, return_exceptions=True)
        if journal:
            await asyncio.to_thread(journal.sync)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, Trace)]

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

    def steps(
        self,
        question: str,
        document: Document | Chunks | str,
        *,
        slots: Slots | None = None,
        known: Scope | None = None,
    ) -> AsyncGenerator[Step, None]:
        """The steps as they happen; replies that are `known` are not asked for again.

        Questions over one text whose sections are read apart from each other share `slots`.
        """
        reading = self.reading(question, document, slots=slots, known=known)
        return read_at_once(reading) if self.config.merges else read_in_order(reading)

    def reading(
        self,
        question: str,
        document: Document | Chunks | str,
        *,
        slots: Slots | None = None,
        known: Scope | None = None,
    ) -> Reading:
        """What the calls for a question have in common. Raises BudgetError where they cannot fit the window."""
        question = checked_question(question)
        budget = check_budget(question, self.config, self.prompts, self.tokenizer)
        chunks = self.chunks(document)
        if not chunks.document.text:
            raise DocumentError("the text is empty; there is nothing to read")
        return Reading(
            question=question,
            chunks=chunks,
            config=self.config,
            prompts=self.prompts,
            format=ReplyFormat.of(self.config),
            budget=budget,
            tokenizer=self.tokenizer,
            slots=slots or Slots(self.calls_at_once),
            call=partial(call_model, self.engine, self.tokenizer, self.limits, known=known),
        )

    @property
    def calls_at_once(self) -> int:
        """Calls on sections that are read apart from each other, in flight together."""
        return facts_of(self.engine).calls_at_once or CALLS_AT_ONCE

    def check(self, question: str) -> Budget:
        """The token budget for a question. Raises BudgetError when it cannot be met."""
        return check_budget(question, self.config, self.prompts, self.tokenizer)

    def chunks(self, document: Document | Chunks | str) -> Chunks:
        """The document's sections, cut on demand. Share them between questions over one text."""
        if isinstance(document, Chunks):
            return document
        if isinstance(document, str):
            if len(document) < 256 and len(document.split()) == 1 and Path(document).is_file():
                raise DocumentError(
                    f"{document} is a file; read it with Document.load({document!r})"
                )
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

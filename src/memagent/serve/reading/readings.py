"""Readings of the gateway: one run directory each, continued where it stopped.

    question + text + settings + key ──▶ id ──▶ STATE/readings/ID ──▶ replies, each on disk before it is used

The same request again repeats no call. Two requests for one reading share it: the second waits, and finds what the
first has read. A text that has grown or changed since the same question was asked is read with the replies of the
earlier readings where their prompts are the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from memagent.agent.journal import FREE_SETTINGS, Journal
from memagent.agent.limits import Limits
from memagent.agent.reader import Reader
from memagent.agent.trace import Step
from memagent.config import AgentConfig
from memagent.documents.document import Document
from memagent.engines.base import BaseEngine
from memagent.engines.limit import Slots
from memagent.errors import RunError, RunNotWritable
from memagent.replies import REPLIES, Replies
from memagent.serve.errors import ApiError
from memagent.serve.keys import KeyHolder
from memagent.serve.reading.state import DAMAGED, GatewayState, in_thread
from memagent.tokens.tokenizers import Tokenizer
from memagent.types import Completion, Engine, Message, Prices, Sampling, Usage

MAX_EARLIER = 8
"""Earlier readings of a question that are compared with a new text, the newest ones."""
DROP_SECONDS = 3600.0
"""How often old readings are looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStep:
    """A step of a reading."""

    step: Step
    is_stored: bool
    """True for steps of an earlier request, which cost nothing now."""
    share: float
    """Share of the text that has been read, from 0 to 1."""


class Readings:
    """All readings of a gateway."""

    def __init__(
        self,
        engine: BaseEngine,
        tokenizer: Tokenizer,
        state: GatewayState,
        *,
        max_readings: int,
        reading_calls: int,
        keep_days: float,
    ) -> None:
        self.num_running = 0
        self.num_sections = 0
        """Sections read since the server started."""
        self.num_finished = 0
        self._engine = engine
        self._slots = Slots(reading_calls)
        self._tokenizer = tokenizer
        self._state = state
        self._max_readings = max_readings
        self._keep_days = keep_days
        self._dropped = 0.0
        self._turns: dict[str, asyncio.Lock] = {}
        """Readings under way, by id; requests for the same one take turns."""
        self._num_requests: Counter[str] = Counter()
        """Requests for each of them."""

    @property
    def num_waiting_calls(self) -> int:
        """Calls that wait for their turn."""
        return self._slots.num_waiting

    def reader(self, config: AgentConfig, account: Account) -> Reader:
        """The reader of a request of a holder. Raises ConfigError where the settings do not suit the engine."""
        engine = OwnersEngine(self._engine, self._tokenizer, account, self._slots)
        return Reader(engine, tokenizer=self._tokenizer, config=config, limits=account.limits)

    async def read(
        self,
        reader: Reader,
        account: Account,
        question: str,
        document: Document,
        *,
        file_ids: Collection[str] = (),
    ) -> AsyncGenerator[ReadStep, None]:
        """The steps of a reading: those on disk, then new ones.

        Closing the iterator stops the work; what was read is kept until one of the stored files in it is deleted.
        """
        try:
            identity = await asyncio.to_thread(reader.identity, [question], document)
            reading_id = _id_of(account.owner, identity)
            async with self._turn(reading_id):
                steps = self._steps(reader, account, reading_id, identity, document, file_ids)
                async with aclosing(steps):
                    async for step in steps:
                        yield step
        finally:
            if file_ids:
                await self.forget_deleted()

    async def forget_deleted(self, owner: str | None = None) -> None:
        """Drop what is kept of deleted files: readings, and cached prompts of their owners and of `owner`. What is being read is dropped at its end."""
        state = self._state
        texts = await in_thread(state.writing, state.texts_of_deleted)
        for whose in {whose for whose, _ in texts} | ({owner} if owner else set()):
            for salt in {whose, KeyHolder(id=whose).cache_salt}:
                await self._engine.drop_prompts(salt)
        if texts:
            await self._drop(await in_thread(state.writing, state.readings_of_deleted))
            await in_thread(state.writing, state.forget_texts_of_deleted)

    async def _drop(self, reading_ids: Sequence[str]) -> None:
        """Delete readings, but those that are under way."""
        for reading_id in reading_ids:
            if reading_id not in self._turns:
                async with self._turn(reading_id):  # a request for it waits
                    await in_thread(self._state.writing, self._state.drop_reading, reading_id)

    async def _steps(
        self,
        reader: Reader,
        account: Account,
        reading_id: str,
        identity: dict[str, Any],
        document: Document,
        file_ids: Collection[str],
    ) -> AsyncGenerator[ReadStep, None]:
        question = identity["questions"][0]
        num_chars = len(document.text)
        writing = self._state.writing
        owner = account.owner
        series = _series_of(owner, identity)
        begin = partial(self._state.begin_reading, text=document.sha256, file_ids=file_ids)
        path = await in_thread(
            writing, begin, owner, reading_id, document.source, num_chars, series
        )
        await self._drop_old()
        chunks = await asyncio.to_thread(reader.chunks, document)
        earlier = await in_thread(
            writing, self._state.earlier_readings, series, path.name, MAX_EARLIER
        )
        journal = await in_thread(writing, _open_journal, path, identity, earlier)
        spans: dict[int, int] = {}
        is_finished = False

        def measured(step: Step) -> ReadStep:
            nonlocal is_finished
            is_finished = step.kind == "answer"
            if step.section is not None:
                spans[step.section.start] = step.section.end
            num_read = sum(end - start for start, end in spans.items())
            return ReadStep(step=step, is_stored=step.is_known, share=num_read / max(1, num_chars))

        try:
            reading = reader.steps(question, chunks, known=journal.replies.scope("0"))
            async with aclosing(reading) as steps:
                async for step in steps:
                    journal.append(0, step)
                    await account.written()
                    if step.kind == "answer":
                        await in_thread(writing, journal.sync)
                    self.num_sections += step.kind == "read" and not step.is_known
                    self.num_finished += step.kind == "answer" and not step.is_known
                    yield measured(step)
        finally:
            journal.close()
            self._state.end_reading(reading_id, is_finished=is_finished)

    @contextmanager
    def room(self) -> Iterator[None]:
        """Room for a reading. Raises ApiError where there is none."""
        if self.num_running >= self._max_readings:
            raise ApiError(
                429,
                f"{self.num_running} texts are being read, the limit of this server; try again soon",
                code="too_many_readings",
            )
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1

    @asynccontextmanager
    async def _turn(self, reading_id: str) -> AsyncIterator[None]:
        self._num_requests[reading_id] += 1
        try:
            async with self._turns.setdefault(reading_id, asyncio.Lock()):
                yield
        finally:
            self._num_requests[reading_id] -= 1
            if not self._num_requests[reading_id]:
                del self._num_requests[reading_id], self._turns[reading_id]

    async def _drop_old(self) -> None:
        if time.monotonic() - self._dropped >= DROP_SECONDS or not self._dropped:
            self._dropped = time.monotonic()
            find = partial(self._state.old_readings, keep_days=self._keep_days)
            await self._drop(await in_thread(self._state.writing, find))


def _id_of(owner: str, identity: dict[str, Any]) -> str:
    """The same for the same reading of the same holder, whatever the text is called."""
    text = {name: value for name, value in identity["document"].items() if name != "source"}
    key = json.dumps([owner, {**identity, "document": text}], sort_keys=True)
    return f"reading-{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def _series_of(owner: str, identity: dict[str, Any]) -> str:
    """The same for readings of one question and holder whose memories can be exchanged, whatever the text."""
    agent = {name: value for name, value in identity["agent"].items() if name not in FREE_SETTINGS}
    wording = {name: value for name, value in identity["prompts"].items() if name != "name"}
    series = {**identity, "document": None, "agent": agent, "prompts": wording}
    return hashlib.sha256(json.dumps([owner, series], sort_keys=True).encode()).hexdigest()


def _open_journal(path: Path, identity: dict[str, Any], earlier: Sequence[Path]) -> Journal:
    """The journal of a reading; one that cannot be continued is set aside, and earlier ones that are damaged left out."""
    sound = []
    for each in earlier:
        with suppress(RunError):  # it was dropped meanwhile, or is damaged
            Replies(also=[each / REPLIES])
            sound.append(each)
    try:
        return Journal.open(path, identity, also=sound)
    except RunError as error:
        if isinstance(error, RunNotWritable) or not path.exists():
            raise
        aside = path.with_name(path.name + DAMAGED)
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        return Journal.open(path, identity, also=sound)


# --- what the calls of a holder use ---------------------------------------------------------------

# A call counts when it has left for the engine. One whose client goes away counts with its prompt, because the
# engine has it.


@dataclass(frozen=True, slots=True)
class Account:
    """Counts what the calls of a holder use."""

    state: GatewayState
    owner: str
    limits: Limits
    prices: Prices | None

    async def written(self) -> None:
        """Return when what was added before is on disk."""
        await in_thread(self.state.counting, int)  # it has one thread: this comes after them

    def add(self, usage: Usage) -> None:
        """Put it on disk; blocks for the time of a write."""
        cost = self.prices.cost_of(usage) if self.prices else 0.0
        self.state.add_used(self.owner, usage, cost)


class OwnersEngine(BaseEngine):
    """The engine of a server as the calls of one holder reach it."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, account: Account, slots: Slots | None = None
    ) -> None:
        """With `slots`, those of readings, calls wait for their turn, and what is computed is used for this holder alone."""
        self.stand_for(engine)
        self.calls_at_once = slots.num if slots else self.calls_at_once
        self._engine = engine
        self._tokenizer = tokenizer
        self._account = account
        self._slots = slots

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """One reply; a call that is cancelled after it has left counts with its prompt."""
        async with self._slots.slot() if self._slots else nullcontext():
            if self._slots:
                sampling = replace(sampling, cache_salt=self._account.owner)
            try:
                return await self._engine.complete(messages, sampling)
            except asyncio.CancelledError:
                limits = self._account.limits
                prompt_tokens = self._tokenizer.count_messages(messages)
                usage = Usage(calls=1, prompt_tokens=prompt_tokens, is_estimated=True)
                limits.count(usage)  # the caller releases what it reserved
                if limits.on_used:
                    limits.on_used(usage)
                raise

    async def aclose(self) -> None:
        """Nothing to free: the engine belongs to the server."""

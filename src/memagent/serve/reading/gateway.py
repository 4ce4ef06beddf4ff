"""From a request to its answer: short conversations go to the engine as they are, long ones are read.

    prepare(request)   fits the window ──▶ the engine, streamed where it can
                       does not        ──▶ a reading on disk: progress, then the answer

    question + text + settings + key ──▶ id ──▶ STATE/readings/ID ──▶ replies, each on disk before it is used

`prepare` raises what is wrong with a request before the first byte of a stream. The same request again repeats no
call. Two requests for one reading share it: the second waits, and finds what the first has read. A text that has
grown or changed since the same question was asked is read with the replies of the earlier readings where their
prompts are the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from memagent.agent.budget import measure_budget
from memagent.agent.journal import FREE_SETTINGS, Journal
from memagent.agent.model_call import Limits, call_model
from memagent.agent.prompts import prompts_for
from memagent.agent.reader import Reader, checked_question
from memagent.agent.trace import Step, Trace, total_usage
from memagent.config import AgentConfig, GatewayConfig
from memagent.engines.base import BaseEngine
from memagent.engines.limit import Slots
from memagent.errors import (
    ConfigError,
    EngineError,
    EngineRefused,
    PromptTooLong,
    RunError,
    RunNotWritable,
)
from memagent.replies import REPLIES, Replies
from memagent.serve.chat import (
    BEGUN,
    AnswerEvents,
    Delta,
    Done,
    Progress,
    SourceQuote,
    no_answer,
)
from memagent.serve.guard import Measure
from memagent.serve.keys import KeyHolder
from memagent.serve.reading.files import RequestFiles
from memagent.serve.reading.requests import (
    GatewayRequest,
    LongText,
    Utterance,
    as_messages,
    split_long,
)
from memagent.serve.reading.state import DAMAGED, GatewayState, in_thread
from memagent.serve.wire import ApiError
from memagent.tokens.tokenizers import Tokenizer
from memagent.types import Completion, Engine, Message, Prices, Sampling, Usage

CHARS_PER_TOKEN = 16
"""A conversation with more characters for each token of the window is long, without counting."""
QUESTION_SHARE = 0.25
"""Share of the window that a question may have, if there is room for it."""
MIN_QUESTION_TOKENS = 16
MAX_KEPT_LIMITS = 1000
ENDS = {"reply_cut": "length", "withheld": "content_filter"}
"""How OpenAI calls the end of an answer whose step has a flag."""
QUICK_CHARS = 20_000
"""Texts up to this size are counted at once; longer ones in a thread."""
MAX_EARLIER = 8
"""Earlier readings of a question that are compared with a new text, the newest ones."""
DROP_SECONDS = 3600.0
"""How often old readings are looked for."""
OnUsage = Callable[[Usage], None]
"""Gets what an answer took, once it is complete."""


@runtime_checkable
class StreamsTokens(Protocol):
    """An engine that gives the tokens of a reply as they are sampled, as the local one does."""

    def prompt_ids(self, messages: list[Message]) -> list[int]: ...

    def stream(self, prompt_ids: list[int], sampling: Sampling) -> AsyncGenerator[Any, None]: ...


class Gateway:
    """Answers requests with one engine."""

    def __init__(
        self, engine: BaseEngine, reader: Reader, state: GatewayState, config: GatewayConfig
    ) -> None:
        """`reader` has the server's own settings and the tokenizer. Raises ConfigError where it has no room
        for questions."""
        self.reading_config: AgentConfig = reader.config
        self.num_short = 0
        """Requests that went to the engine as they were."""
        self.num_running = 0
        """Texts that are being read."""
        self.num_sections = 0
        """Sections read since the server started."""
        self.num_finished = 0
        self._engine = engine
        self._tokenizer: Tokenizer = reader.tokenizer
        self._state = state
        self._config = config
        self._slots = Slots(config.reading_calls)
        limit = partial(question_limit, tokenizer=reader.tokenizer)
        self._question_limit = lru_cache(MAX_KEPT_LIMITS)(limit)
        self._question_limit(reader.config)
        self._accounts: dict[str, Account] = {}
        """What each holder has used and may use, by id."""
        self._opening_accounts = asyncio.Lock()
        self._dropped = 0.0
        self._turns: dict[str, asyncio.Lock] = {}
        """Readings under way, by id; requests for the same one take turns."""
        self._num_requests: Counter[str] = Counter()
        """Requests for each of them."""

    def gauges(self) -> list[Measure]:
        """How busy the gateway is."""
        waiting = self._slots.num_waiting
        return [
            ("readings_running", "Texts being read.", self.num_running),
            ("reading_calls_waiting", "Calls that wait for their turn.", waiting),
        ]

    def counters(self) -> list[Measure]:
        """What was answered."""
        return [
            ("short_answers", "Conversations passed to the engine as they are.", self.num_short),
            ("readings_finished", "Texts read to the answer.", self.num_finished),
            ("sections", "Sections read.", self.num_sections),
        ]

    # --- requests ------------------------------------------------------------------------------

    async def prepare(
        self, request: GatewayRequest, holder: KeyHolder, files: RequestFiles, on_usage: OnUsage
    ) -> AnswerEvents:
        """The answer to a request: BEGUN, or what leaves no room; progress and the answer, and last what it took.

        Raises what is wrong with the request.
        """
        account = await self._account_of(holder)
        config = request.reading_config(self.reading_config)
        if request.has_files:
            conversation = await in_thread(self._state.opening, request.conversation, files)
        else:
            conversation = request.conversation(files)
        window = self.reading_config.window
        num_chars = sum(one.num_chars for one in conversation)
        if num_chars <= CHARS_PER_TOKEN * window:
            messages = as_messages(conversation)
            count = self._tokenizer.count_messages
            if num_chars <= QUICK_CHARS:
                prompt_tokens = count(messages)
            else:
                prompt_tokens = await in_thread(self._state.preparing, count, messages)
            room = window - prompt_tokens
            if room >= (request.max_tokens or min(self.reading_config.answer_tokens, window // 4)):
                self.num_short += 1
                sampling = Sampling(
                    max_tokens=request.max_tokens or room,
                    temperature=request.temperature,
                    top_p=request.top_p,
                    seed=request.seed,
                    stop=request.stop,
                    cache_salt=holder.cache_salt,
                )
                return self._short(account, messages, sampling, prompt_tokens, on_usage)
        reader, text = await in_thread(
            self._state.preparing, self._split, request, conversation, config, account
        )
        return self._long(reader, account, text, request.stop, on_usage)

    def _split(
        self,
        request: GatewayRequest,
        conversation: list[Utterance],
        config: AgentConfig,
        account: Account,
    ) -> tuple[Reader, LongText]:
        """A long conversation as question and text, and the reader for it."""
        reader = self._reader(config, account)
        limit = self._question_limit(config)

        def is_below(text: str) -> bool:
            return len(text) <= CHARS_PER_TOKEN * limit and self._tokenizer.count(text) <= limit

        text = split_long(conversation, is_below)
        question = checked_question(text.question)
        if request.max_tokens is not None:
            asked = measure_budget(question, config, reader.prompts, reader.tokenizer)
            spare = config.window - asked.answer_total + config.answer_tokens
            answer_tokens = max(1, min(request.max_tokens, spare))
            reader = self._reader(
                config.model_copy(update={"answer_tokens": answer_tokens}), account
            )
        reader.check(question)
        return reader, text

    def _reader(self, config: AgentConfig, account: Account) -> Reader:
        """The reader of a holder's request. Raises ConfigError where the settings do not suit the engine."""
        engine = OwnersEngine(self._engine, self._tokenizer, account, self._slots)
        return Reader(engine, tokenizer=self._tokenizer, config=config, limits=account.limits)

    async def _account_of(self, holder: KeyHolder) -> Account:
        """The account of a holder, shared by all its requests."""
        max_cost = holder.limits.max_cost
        async with self._opening_accounts:
            found = self._accounts.get(holder.id)
            if found is None or found.limits.max_cost != max_cost:
                prices, counting = self._config.prices, self._state.counting
                limits = Limits(max_cost=max_cost, prices=prices)
                if prices is not None:
                    limits.cost = (await in_thread(counting, self._state.used, holder.id)).cost
                found = account = Account(self._state, holder.id, limits, prices)
                limits.on_used = lambda usage: counting.submit(account.add, usage)
                self._accounts[holder.id] = account
        return found

    # --- short conversations -------------------------------------------------------------------

    async def _short(
        self,
        account: Account,
        messages: list[Message],
        sampling: Sampling,
        prompt_tokens: int,
        on_usage: OnUsage,
    ) -> AnswerEvents:
        """The reply of the engine to a conversation that fits the window."""
        limits = account.limits
        most = sampling.max_tokens
        limits.release(limits.reserve(prompt_tokens=prompt_tokens, completion_tokens=most))
        yield BEGUN
        with _own_faults():
            if isinstance(self._engine, StreamsTokens):
                streamed = self._streamed(
                    self._engine, account, messages, sampling, prompt_tokens, on_usage
                )
                async with aclosing(streamed) as events:
                    async for event in events:
                        yield event
                return
            call = await call_model(
                OwnersEngine(self._engine, self._tokenizer, account),
                self._tokenizer,
                limits,
                messages,
                sampling,
                prompt_tokens=prompt_tokens,
            )
            await account.written()
            yield Delta(text=call.completion.text or call.completion.refusal or "")
            on_usage(call.usage)
            yield Done(finish_reason=call.completion.finish_reason or "stop", usage=call.usage)

    async def _streamed(
        self,
        engine: StreamsTokens,
        account: Account,
        messages: list[Message],
        sampling: Sampling,
        prompt_tokens: int,
        on_usage: OnUsage,
    ) -> AnswerEvents:
        reserved = account.limits.reserve(
            prompt_tokens=prompt_tokens, completion_tokens=sampling.max_tokens
        )
        usage = Usage()
        num_sampled, has_left = 0, False
        prompt_ids: list[int] = []
        try:
            prompt_ids = engine.prompt_ids(messages)
            room = prompt_tokens + sampling.max_tokens - len(prompt_ids)
            sampling = replace(sampling, max_tokens=max(1, min(sampling.max_tokens, room)))
            async with aclosing(engine.stream(prompt_ids, sampling)) as tokens:
                async for token in tokens:
                    if isinstance(token, Completion):
                        usage = token.usage or usage
                        on_usage(usage)
                        yield Done(finish_reason=token.finish_reason or "stop", usage=usage)
                        continue
                    num_sampled += 1
                    if token.text:
                        yield Delta(text=token.text)
        except (asyncio.CancelledError, GeneratorExit):
            has_left = True
            raise
        finally:
            if not usage.calls and (has_left or num_sampled):  # the client has what was sampled
                usage = Usage(calls=1, prompt_tokens=len(prompt_ids), completion_tokens=num_sampled)
            account.limits.settle(reserved, usage)
            await account.written()

    # --- long ones -----------------------------------------------------------------------------

    async def _long(
        self,
        reader: Reader,
        account: Account,
        text: LongText,
        stop: tuple[str, ...],
        on_usage: OnUsage,
    ) -> AnswerEvents:
        """Progress with each section of a conversation that is read, then the answer."""
        if self.num_running >= self._config.max_readings:
            raise ApiError(
                429,
                f"{self.num_running} texts are being read, the limit of this server; try again soon",
                code="too_many_readings",
            )
        self.num_running += 1
        try:
            yield BEGUN
            done: list[Step] = []
            spans: dict[int, int] = {}
            with _own_faults():
                async with aclosing(self._read(reader, account, text)) as steps:
                    async for step in steps:
                        done.append(step)
                        if step.section is not None:
                            spans[step.section.start] = step.section.end
                        if step.kind != "answer" and not step.is_known:
                            num_read = sum(end - start for start, end in spans.items())
                            share = num_read / max(1, len(text.document.text))
                            num = sum(each.kind == "read" for each in done)
                            yield Progress(text=_progress_line(step, num, share))
            trace = reader.trace(text.question, text.document, done)
            answer = trace.final_answer
            if answer is None:
                raise no_answer()
            ends = [answer.find(one) for one in stop if one in answer]
            yield Delta(text=answer[: min(ends)] if ends else answer)
            end = _end_of(trace, text)
            on_usage(end.usage)
            yield end
        finally:
            self.num_running -= 1

    async def _read(
        self, reader: Reader, account: Account, text: LongText
    ) -> AsyncGenerator[Step, None]:
        """The steps of a reading: those on disk, then new ones.

        Closing the iterator stops the work; what was read is kept until one of the stored files in it is deleted.
        """
        state, writing = self._state, self._state.writing
        try:
            identity = await asyncio.to_thread(reader.identity, [text.question], text.document)
            reading_id = _id_of(account.owner, identity)
            async with self._turn(reading_id):
                begin = partial(self._begin, account.owner, reading_id, identity, text)
                path, earlier = await in_thread(writing, begin)
                now = time.monotonic()
                if now - self._dropped >= DROP_SECONDS or not self._dropped:
                    self._dropped = now
                    find = partial(state.old_readings, keep_days=self._config.keep_days)
                    await self._drop(await in_thread(writing, find))
                chunks = await asyncio.to_thread(reader.chunks, text.document)
                journal = await in_thread(writing, _open_journal, path, identity, earlier)
                is_finished = False
                known = journal.replies.scope("0")
                try:
                    reading = reader.steps(text.question, chunks, known=known)
                    async with aclosing(reading) as steps:
                        async for step in steps:
                            journal.append(0, step)
                            await account.written()
                            is_finished = step.kind == "answer"
                            if is_finished:
                                await in_thread(writing, journal.sync)
                            self.num_sections += step.kind == "read" and not step.is_known
                            self.num_finished += is_finished and not step.is_known
                            yield step
                finally:
                    journal.close()
                    state.end_reading(reading_id, is_finished=is_finished)
        finally:
            if text.all_file_ids:
                await self.forget_deleted()

    def _begin(
        self, owner: str, reading_id: str, identity: dict[str, Any], text: LongText
    ) -> tuple[Path, list[Path]]:
        """Where a reading is kept, and where earlier ones of the same question and holder are."""
        agent = {name: v for name, v in identity["agent"].items() if name not in FREE_SETTINGS}
        wording = {name: value for name, value in identity["prompts"].items() if name != "name"}
        # the same where memories can be exchanged, whatever the text
        alike = {**identity, "document": None, "agent": agent, "prompts": wording}
        series = hashlib.sha256(json.dumps([owner, alike], sort_keys=True).encode()).hexdigest()
        document = text.document
        path = self._state.begin_reading(
            owner,
            reading_id,
            document.source,
            len(document.text),
            series,
            text=document.sha256,
            file_ids=text.all_file_ids,
        )
        return path, self._state.earlier_readings(series, reading_id, MAX_EARLIER)

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

    # --- what is dropped -----------------------------------------------------------------------

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


def question_limit(config: AgentConfig, tokenizer: Tokenizer) -> int:
    """Tokens that a question may have. Raises ConfigError where there is no room for one."""
    empty = measure_budget("", config, prompts_for(config), tokenizer)
    room = config.window - max(empty.read_total, empty.answer_total)
    if room < MIN_QUESTION_TOKENS:
        raise ConfigError(
            f"a window of {config.window} tokens leaves no room for a question; lower `chunk_tokens` to "
            f"{max(16, config.chunk_tokens + room - MIN_QUESTION_TOKENS)}"
        )
    return min(room, max(MIN_QUESTION_TOKENS, int(QUESTION_SHARE * config.window)))


def _end_of(trace: Trace, text: LongText) -> Done:
    """What a reading took in this request, and what its answer rests on."""
    new = [step for step in trace.steps if not step.is_known]
    memories = total_usage(step for step in new if step.kind != "answer")
    places = [(one, one.quote.places[0]) for one in trace.citations]
    return Done(
        finish_reason=next((ENDS[flag] for flag in trace.steps[-1].flags if flag in ENDS), "stop"),
        usage=total_usage(new),
        reasoning_tokens=memories.completion_tokens,
        num_sections=trace.num_chunks,
        num_stored=len(trace.steps) - len(new),
        citations=tuple(
            SourceQuote(
                number=one.number,
                quote=one.quote.text,
                where=one.where,
                source=place.source,
                start=place.start,
                end=place.end,
                file_id=text.file_ids.get(place.source),
            )
            for one, place in places
        ),
    )


@contextmanager
def _own_faults() -> Iterator[None]:
    """What an engine refuses is the fault of the server's settings, not of the request."""
    try:
        yield
    except PromptTooLong:
        raise
    except EngineRefused as error:
        raise EngineError(str(error)) from None


def _progress_line(step: Step, num_sections: int, share: float) -> str:
    if step.kind == "merge":
        return "Merged what was noted.\n"
    change = " Nothing new." if "memory_kept" in step.flags else ""
    return f"Read section {num_sections}, {share:.0%} of the text.{change}\n"


def _id_of(owner: str, identity: dict[str, Any]) -> str:
    """The same for the same reading of the same holder, whatever the text is called."""
    text = {name: value for name, value in identity["document"].items() if name != "source"}
    key = json.dumps([owner, {**identity, "document": text}], sort_keys=True)
    return f"reading-{hashlib.sha256(key.encode()).hexdigest()[:32]}"


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

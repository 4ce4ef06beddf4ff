"""From a request to its answer: short conversations go to the engine as they are, long ones are read.

    prepare(request)   fits the window ──▶ ShortAnswer ──▶ the engine, streamed where it can
                       does not        ──▶ LongAnswer  ──▶ Readings: progress, then the answer

`prepare` raises what is wrong with a request before the first byte of a stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from memagent.agent.budget import measure_budget
from memagent.agent.evidence.ledger import Citation
from memagent.agent.limits import Limits
from memagent.agent.model_call import call_model
from memagent.agent.reader import Reader, checked_question
from memagent.agent.trace import Trace, total_usage
from memagent.config import AgentConfig, GatewayConfig
from memagent.engines.base import BaseEngine
from memagent.errors import ConfigError, EngineError, EngineRefused, PromptTooLong
from memagent.serve.keys import KeyHolder
from memagent.serve.metrics import Measure
from memagent.serve.reading.conversation import LongText, Utterance, as_messages, split_long
from memagent.serve.reading.events import (
    BEGUN,
    AnswerEvents,
    AnswerText,
    Finished,
    Progress,
    SourceQuote,
    no_answer,
)
from memagent.serve.reading.files import RequestFiles
from memagent.serve.reading.readings import Account, OwnersEngine, Readings, ReadStep
from memagent.serve.reading.requests import GatewayRequest
from memagent.serve.reading.state import GatewayState, in_thread
from memagent.tokens.tokenizers import Tokenizer
from memagent.types import Completion, Message, Sampling, Usage

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


class PreparedAnswer(Protocol):
    """An answer that can be computed."""

    def events(self) -> AnswerEvents:
        """BEGUN, or what leaves no room; progress and the answer, and last what it took."""
        ...


@runtime_checkable
class StreamsTokens(Protocol):
    """An engine that gives the tokens of a reply as they are sampled, as the local one does."""

    def prompt_ids(self, messages: list[Message]) -> list[int]: ...

    def stream(self, prompt_ids: list[int], sampling: Sampling) -> AsyncGenerator[Any, None]: ...


class Answering:
    """Answers requests with one engine."""

    def __init__(
        self, engine: BaseEngine, reader: Reader, state: GatewayState, config: GatewayConfig
    ) -> None:
        """`reader` has the server's own settings and the tokenizer. Raises ConfigError where it has no room
        for questions."""
        question_limit(reader)
        self.num_short = 0
        """Requests that went to the engine as they were."""
        self.reading_config: AgentConfig = reader.config
        self.readings = Readings(
            engine,
            reader.tokenizer,
            state,
            max_readings=config.max_readings,
            reading_calls=config.reading_calls,
            keep_days=config.keep_days,
        )
        self._engine = engine
        self._tokenizer: Tokenizer = reader.tokenizer
        self._state = state
        self._prices = config.prices
        self._question_limits: dict[str, int] = {}
        """By the settings of the reader."""
        self._accounts: dict[str, Account] = {}
        """What each holder has used and may use, by id."""
        self._opening_accounts = asyncio.Lock()

    async def prepare(
        self, request: GatewayRequest, holder: KeyHolder, files: RequestFiles
    ) -> PreparedAnswer:
        """The answer to a request, short or long. Raises what is wrong with it."""
        account = await self._account_of(holder)
        config = request.reading_config(self.reading_config)
        if request.has_files:
            conversation = await in_thread(self._state.opening, request.conversation, files)
        else:
            conversation = request.conversation(files)
        short = await self._short(request, conversation, account, holder.cache_salt)
        if short is not None:
            self.num_short += 1
            return short
        return await in_thread(
            self._state.preparing, self._long, request, conversation, config, account
        )

    async def _short(
        self,
        request: GatewayRequest,
        conversation: list[Utterance],
        account: Account,
        cache_salt: str | None,
    ) -> ShortAnswer | None:
        """The answer if the conversation fits the window."""
        window = self.reading_config.window
        num_chars = sum(one.num_chars for one in conversation)
        if num_chars > CHARS_PER_TOKEN * window:
            return None
        messages = as_messages(conversation)
        count = self._tokenizer.count_messages
        if num_chars <= QUICK_CHARS:
            prompt_tokens = count(messages)
        else:
            prompt_tokens = await in_thread(self._state.preparing, count, messages)
        room = window - prompt_tokens
        if room < (request.max_tokens or min(self.reading_config.answer_tokens, window // 4)):
            return None
        sampling = Sampling(
            max_tokens=request.max_tokens or room,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            stop=request.stop,
            cache_salt=cache_salt,
        )
        return ShortAnswer(
            self._engine, self._tokenizer, account, messages, sampling, prompt_tokens
        )

    def _long(
        self,
        request: GatewayRequest,
        conversation: list[Utterance],
        config: AgentConfig,
        account: Account,
    ) -> LongAnswer:
        """The reading of a long conversation."""
        reader = self.readings.reader(config, account)
        text = split_long(conversation, self._is_below(self._question_limit(reader)))
        question = checked_question(text.question)
        if request.max_tokens is not None:
            asked = measure_budget(question, config, reader.prompts, reader.tokenizer)
            spare = config.window - asked.answer_total + config.answer_tokens
            config = config.model_copy(
                update={"answer_tokens": max(1, min(request.max_tokens, spare))}
            )
            reader = self.readings.reader(config, account)
        reader.check(question)
        return LongAnswer(self.readings, reader, account, text, stop=request.stop)

    def _question_limit(self, reader: Reader) -> int:
        """As `question_limit`, which measures prompts; requests mostly share their settings."""
        key = reader.config.model_dump_json()
        if key not in self._question_limits:
            if len(self._question_limits) >= MAX_KEPT_LIMITS:
                self._question_limits.clear()
            self._question_limits[key] = question_limit(reader)
        return self._question_limits[key]

    def _is_below(self, limit: int) -> Callable[[str], bool]:
        def is_below(text: str) -> bool:
            return len(text) <= CHARS_PER_TOKEN * limit and self._tokenizer.count(text) <= limit

        return is_below

    async def _account_of(self, holder: KeyHolder) -> Account:
        """The account of a holder, shared by all its requests."""
        async with self._opening_accounts:
            found = self._accounts.get(holder.id)
            if found is None or found.limits.max_cost != holder.limits.max_cost:
                found = self._accounts[holder.id] = await self._new_account(holder)
        return found

    async def _new_account(self, holder: KeyHolder) -> Account:
        limits = Limits(max_cost=holder.limits.max_cost, prices=self._prices)
        if self._prices is not None:
            used = await in_thread(self._state.counting, self._state.used, holder.id)
            limits.cost = used.cost
        account = Account(self._state, holder.id, limits, self._prices)
        limits.on_used = lambda usage: self._state.counting.submit(account.add, usage)
        return account

    def gauges(self) -> list[Measure]:
        """How busy the gateway is."""
        readings = self.readings
        return [
            ("readings_running", "Texts being read.", readings.num_running),
            (
                "reading_calls_waiting",
                "Calls that wait for their turn.",
                readings.num_waiting_calls,
            ),
        ]

    def counters(self) -> list[Measure]:
        """What was answered."""
        readings = self.readings
        return [
            ("short_answers", "Conversations passed to the engine as they are.", self.num_short),
            ("readings_finished", "Texts read to the answer.", readings.num_finished),
            ("sections", "Sections read.", readings.num_sections),
        ]


def question_limit(reader: Reader) -> int:
    """Tokens that a question may have. Raises ConfigError where there is no room for one."""
    config = reader.config
    empty = measure_budget("", config, reader.prompts, reader.tokenizer)
    room = config.window - max(empty.read_total, empty.answer_total)
    if room < MIN_QUESTION_TOKENS:
        raise ConfigError(
            f"a window of {config.window} tokens leaves no room for a question; lower `chunk_tokens` to "
            f"{max(16, config.chunk_tokens + room - MIN_QUESTION_TOKENS)}"
        )
    return min(room, max(MIN_QUESTION_TOKENS, int(QUESTION_SHARE * config.window)))


class ShortAnswer:
    """A conversation that fits the window."""

    def __init__(
        self,
        engine: BaseEngine,
        tokenizer: Tokenizer,
        account: Account,
        messages: list[Message],
        sampling: Sampling,
        prompt_tokens: int,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._account = account
        self._messages = messages
        self._sampling = sampling
        self._prompt_tokens = prompt_tokens

    async def events(self) -> AnswerEvents:
        """The reply of the engine."""
        limits = self._account.limits
        most = self._sampling.max_tokens
        limits.release(limits.reserve(prompt_tokens=self._prompt_tokens, completion_tokens=most))
        yield BEGUN
        source = self._streamed() if isinstance(self._engine, StreamsTokens) else self._whole()
        async with aclosing(_with_own_faults(source)) as events:
            async for event in events:
                yield event

    async def _whole(self) -> AnswerEvents:
        call = await call_model(
            OwnersEngine(self._engine, self._tokenizer, self._account),
            self._tokenizer,
            self._account.limits,
            self._messages,
            self._sampling,
            prompt_tokens=self._prompt_tokens,
        )
        await self._account.written()
        yield AnswerText(text=call.completion.text or call.completion.refusal or "")
        yield Finished(finish_reason=call.completion.finish_reason or "stop", usage=call.usage)

    async def _streamed(self) -> AnswerEvents:
        engine = self._engine
        assert isinstance(engine, StreamsTokens)
        reserved = self._account.limits.reserve(
            prompt_tokens=self._prompt_tokens, completion_tokens=self._sampling.max_tokens
        )
        usage = Usage()
        num_sampled, has_left = 0, False
        prompt_ids: list[int] = []
        try:
            prompt_ids = engine.prompt_ids(self._messages)
            room = self._prompt_tokens + self._sampling.max_tokens - len(prompt_ids)
            sampling = replace(
                self._sampling, max_tokens=max(1, min(self._sampling.max_tokens, room))
            )
            async with aclosing(engine.stream(prompt_ids, sampling)) as tokens:
                async for token in tokens:
                    if isinstance(token, Completion):
                        usage = token.usage or usage
                        yield Finished(finish_reason=token.finish_reason or "stop", usage=usage)
                        continue
                    num_sampled += 1
                    if token.text:
                        yield AnswerText(text=token.text)
        except (asyncio.CancelledError, GeneratorExit):
            has_left = True
            raise
        finally:
            if not usage.calls and (has_left or num_sampled):  # the client has what was sampled
                usage = Usage(calls=1, prompt_tokens=len(prompt_ids), completion_tokens=num_sampled)
            self._account.limits.settle(reserved, usage)
            await self._account.written()


class LongAnswer:
    """A conversation that is read."""

    def __init__(
        self,
        readings: Readings,
        reader: Reader,
        account: Account,
        text: LongText,
        *,
        stop: tuple[str, ...],
    ) -> None:
        self._readings = readings
        self._reader = reader
        self._account = account
        self._text = text
        self._stop = stop

    async def events(self) -> AnswerEvents:
        """Progress with each section, then the answer."""
        with self._readings.room():
            yield BEGUN
            async with aclosing(_with_own_faults(self._events())) as events:
                async for event in events:
                    yield event

    async def _events(self) -> AnswerEvents:
        done: list[ReadStep] = []
        text = self._text
        steps = self._readings.read(
            self._reader, self._account, text.question, text.document, file_ids=text.all_file_ids
        )
        async with aclosing(steps):
            async for read in steps:
                done.append(read)
                if read.step.kind == "answer":
                    break
                if not read.is_stored:
                    num_sections = sum(each.step.kind == "read" for each in done)
                    yield Progress(text=_progress_line(read, num_sections))
        trace = self._reader.trace(text.question, text.document, [read.step for read in done])
        if trace.final_answer is None:
            raise no_answer()
        yield AnswerText(text=_until(trace.final_answer, self._stop))
        yield _end_of(done, trace, text.file_ids)


def _end_of(done: list[ReadStep], trace: Trace, file_ids: Mapping[str, str]) -> Finished:
    """What a reading took in this request."""
    new = [read.step for read in done if not read.is_stored]
    memories = total_usage(step for step in new if step.kind != "answer")
    return Finished(
        finish_reason=next((ENDS[flag] for flag in done[-1].step.flags if flag in ENDS), "stop"),
        usage=total_usage(new),
        reasoning_tokens=memories.completion_tokens,
        num_sections=trace.num_chunks,
        num_stored=len(done) - len(new),
        citations=tuple(_cited(citation, file_ids) for citation in trace.citations),
    )


def _cited(citation: Citation, file_ids: Mapping[str, str]) -> SourceQuote:
    place = citation.quote.places[0]
    return SourceQuote(
        number=citation.number,
        quote=citation.quote.text,
        where=citation.where,
        source=place.source,
        start=place.start,
        end=place.end,
        file_id=file_ids.get(place.source),
    )


async def _with_own_faults(events: AnswerEvents) -> AnswerEvents:
    """What an engine refuses is the fault of the server's settings, not of the request."""
    async with aclosing(events):
        try:
            async for event in events:
                yield event
        except PromptTooLong:
            raise
        except EngineRefused as error:
            raise EngineError(str(error)) from None


def _progress_line(read: ReadStep, num_sections: int) -> str:
    if read.step.kind == "merge":
        return "Merged what was noted.\n"
    change = " Nothing new." if "memory_kept" in read.step.flags else ""
    return f"Read section {num_sections}, {read.share:.0%} of the text.{change}\n"


def _until(text: str, stop: tuple[str, ...]) -> str:
    """The text before the first stop text."""
    ends = [text.find(end) for end in stop if end in text]
    return text[: min(ends)] if ends else text

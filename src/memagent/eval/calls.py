"""Replies of unfinished items, on disk, so that a resumed run does not repeat their calls.

    RUN/calls.jsonl    one line per reply; lines of finished items are dropped from time to time

    method ──▶ ItemEngine ──▶ is the reply in the log? ──▶ yes: return it
                                   │ no
                                   └──▶ EngineGate ──▶ engine ──▶ append to calls.jsonl ──▶ method

Methods know nothing of this. A call is identified by its messages, its sampling, and how often the item
has made the same call before. Of the tokens of a reply only their log-probability together is stored: memories
that drop their least certain line depend on it. Lines survive the process, however it ends; a power cut may lose the last
ones, and those calls are repeated.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from memagent.engines.base import BaseEngine
from memagent.engines.embedding import Embedder, Vector
from memagent.engines.queueing import Queue, slot
from memagent.errors import EngineError, EngineRefused, RunError, RunNotWritable
from memagent.files import reason_of, write_atomically
from memagent.jsonl import LineFile, read_lines, sealed
from memagent.runs import stored_usage
from memagent.types import Completion, Engine, Message, Sampling, TokenEngine

CALLS = "calls.jsonl"
CHARS_PER_TOKEN = 4
"""For times of calls whose usage is not reported."""
MAX_DEAD_BYTES = 64_000_000
"""The file is rewritten when lines of finished items take more than this, and more than the rest."""


class LoggedReply(NamedTuple):
    """A reply, and how long it took."""

    completion: Completion
    seconds: float


class CallLog:
    """The replies of unfinished items. Without a path nothing is stored."""

    def __init__(
        self,
        path: Path | None,
        unfinished: Iterable[str] = (),
        *,
        max_dead_bytes: int = MAX_DEAD_BYTES,
    ) -> None:
        """Loads what the file holds of `unfinished` items, and drops the rest of it."""
        self._path = path
        self._max_dead_bytes = max_dead_bytes
        self._lines: dict[str, list[bytes]] = {}
        self._replies: dict[tuple[str, str], LoggedReply] = {}
        self._num_bytes = 0
        self._file: LineFile | None = None
        if path is not None:
            if path.exists():
                self._load(path, frozenset(unfinished))
            self._rewrite()

    def find(self, item: str, call: str) -> LoggedReply | None:
        """The reply to a call that was made before."""
        return self._replies.get((item, call))

    def append(self, item: str, call: str, reply: LoggedReply) -> None:
        """Store a reply until its item is finished."""
        if self._file is None:
            return
        line = _encode(_record(item, call, reply))
        try:
            self._file.append(line)
        except OSError as error:
            raise RunNotWritable(f"cannot write {self._path}: {reason_of(error)}") from None
        self._num_bytes += len(line) + 1
        self._lines.setdefault(item, []).append(line)

    def forget(self, item: str) -> None:
        """Drop the replies of a finished item."""
        self._lines.pop(item, None)
        for key in [key for key in self._replies if key[0] == item]:
            del self._replies[key]
        if self._num_bytes > self._max_dead_bytes:
            num_live = sum(len(line) + 1 for lines in self._lines.values() for line in lines)
            if self._num_bytes > num_live + max(self._max_dead_bytes, num_live):
                self._rewrite()

    def close(self) -> None:
        """Close the file; it is removed when it holds nothing of an unfinished item."""
        if self._file is not None:
            self._file.close()
            self._file = None
            assert self._path is not None
            if not self._lines:
                with suppress(OSError):
                    self._path.unlink(missing_ok=True)

    def _load(self, path: Path, unfinished: frozenset[str]) -> None:
        try:
            for number, (record, _) in enumerate(read_lines(path), start=1):
                item, call, reply = _parsed(record, f"{path}, line {number},")
                if item in unfinished:
                    self._lines.setdefault(item, []).append(_encode(record))
                    self._replies[item, call] = reply
        except RunError as error:
            raise RunError(f"{error}; delete the file to repeat its calls") from None

    def _rewrite(self) -> None:
        assert self._path is not None
        if self._file is not None:
            self._file.close()
        data = b"".join(line + b"\n" for lines in self._lines.values() for line in lines)
        try:
            write_atomically(self._path, data, sync=False)
            self._file = LineFile(self._path, sync=False)
        except OSError as error:
            raise RunNotWritable(f"cannot write {self._path}: {reason_of(error)}") from None
        self._num_bytes = len(data)


class EngineGate:
    """An engine as all items share it: one limit on concurrent calls, and a count of failures in a row."""

    def __init__(self, engine: Engine, *, concurrency: int) -> None:
        """Engines that limit themselves ignore `concurrency`: their limit leaves out retry waits."""
        self.engine = engine
        self.concurrency = concurrency
        self.num_in_flight = 0
        """Calls that were sent or wait for a slot."""
        self.num_answered = 0
        self.num_failed_in_a_row = 0
        self.last_error: EngineError | EngineRefused | None = None
        limits_itself = isinstance(engine, BaseEngine) and engine.limits_itself
        self._slots = None if limits_itself else asyncio.Semaphore(concurrency)

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """One reply of the engine."""
        return await self._counted(lambda: self.engine.complete(messages, sampling))

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """One reply of an engine that takes tokens."""
        engine = self.engine
        assert isinstance(engine, TokenEngine)
        return await self._counted(lambda: engine.generate(prompt_ids, sampling))

    async def _counted(self, ask: Callable[[], Awaitable[Completion]]) -> Completion:
        try:
            if self._slots is None:
                completion = await ask()
            else:
                async with slot(self._slots):
                    completion = await ask()
        except (EngineError, EngineRefused) as error:
            self.fail(error)
            raise
        self.num_answered += 1
        self.num_failed_in_a_row = 0
        return completion

    def fail(self, error: EngineError | EngineRefused) -> None:
        """Count a failed call."""
        self.num_failed_in_a_row += 1
        self.last_error = error


class GatedEmbedder(Embedder):
    """An embedder whose failures count as those of the engine: its outage is not the items' fault either."""

    def __init__(self, embedder: Embedder, gate: EngineGate) -> None:
        self.name = embedder.name
        self._embedder = embedder
        self._gate = gate

    async def embed(self, texts: Sequence[str], *, is_query: bool = False) -> list[Vector]:
        try:
            return await self._embedder.embed(texts, is_query=is_query)
        except (EngineError, EngineRefused) as error:
            self._gate.fail(error)
            raise

    async def aclose(self) -> None:
        await self._embedder.aclose()


class CallDone(NamedTuple):
    """A call that was answered now, not replayed."""

    method: str
    prompt_tokens: int
    completion_tokens: int
    limit: int
    """Most tokens that the reply could have had."""
    seconds: float
    in_flight: int = 1
    """Calls that the engine was answering when this one was finished, itself included."""


OnCall = Callable[[CallDone], None]


class ItemEngine(BaseEngine):
    """The engine as one item sees it: calls made before a restart return their logged reply."""

    def __init__(
        self,
        gate: EngineGate,
        calls: CallLog,
        item: str,
        *,
        method: str = "",
        on_call: OnCall | None = None,
    ) -> None:
        self.stand_for(gate.engine)
        self.calls_at_once = gate.concurrency
        self.seconds_before = 0.0
        """Time that logged replies took when they were generated."""
        self.queue = Queue()
        self._gate = gate
        self._calls = calls
        self._item = item
        self._method = method
        self._on_call = on_call
        self._num_same: dict[str, int] = {}

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """The logged reply, or a new one, which is logged before it is returned."""
        call = self._name(messages, sampling)
        num_chars = sum(len(message["content"]) for message in messages)
        return await self._logged(
            call,
            lambda: self._gate.complete(messages, sampling),
            limit=sampling.max_tokens,
            prompt_tokens=num_chars // CHARS_PER_TOKEN,
        )

    async def aclose(self) -> None:
        """Nothing to free: the engine belongs to the run."""

    async def _logged(
        self,
        call: str,
        ask: Callable[[], Awaitable[Completion]],
        *,
        limit: int,
        prompt_tokens: int,
    ) -> Completion:
        """`prompt_tokens` counts where the engine reports no usage."""
        logged = self._calls.find(self._item, call)
        if logged is not None:
            self.seconds_before += logged.seconds
            return logged.completion
        clock = time.perf_counter()
        self._gate.num_in_flight += 1
        try:
            with self.queue.call() as queued:
                completion = await ask()
        finally:
            in_flight = min(self._gate.num_in_flight, self._gate.concurrency)
            self._gate.num_in_flight -= 1
        seconds = round(time.perf_counter() - clock - queued.seconds, 6)
        self._calls.append(self._item, call, LoggedReply(completion, seconds))
        if self._on_call is not None:
            usage = completion.usage
            reply_tokens = len(completion.text) // CHARS_PER_TOKEN
            self._on_call(
                CallDone(
                    method=self._method,
                    prompt_tokens=usage.prompt_tokens if usage else prompt_tokens,
                    completion_tokens=usage.completion_tokens if usage else reply_tokens,
                    limit=limit,
                    seconds=seconds,
                    in_flight=in_flight,
                )
            )
        return completion

    def _name(self, messages: Sequence[Message], sampling: Sampling) -> str:
        """The fingerprint of a call, and its number among identical ones."""
        digest = hashlib.sha256(repr(sampling).encode())
        for message in messages:
            digest.update(f"\0{message['role']}\0".encode())
            digest.update(message["content"].encode("utf-8", "surrogatepass"))
        return self._numbered(digest.hexdigest()[:32])

    def _numbered(self, name: str) -> str:
        number = self._num_same[name] = self._num_same.get(name, 0) + 1
        return f"{name}-{number}"


class TokenItemEngine(ItemEngine):
    """The engine of an item where it also takes prompts as tokens, such as the local one."""

    @property
    def _tokens(self) -> TokenEngine:
        engine = self._gate.engine
        assert isinstance(engine, TokenEngine), "item_engine chooses the class by the engine"
        return engine

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation, ready for the reply."""
        return self._tokens.prompt_ids(messages)

    def decode(self, ids: Sequence[int]) -> str:
        """Tokens as text without special tokens."""
        return self._tokens.decode(ids)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """As `complete`, for a prompt of tokens."""
        name = hashlib.sha256(f"{sampling!r} {list(prompt_ids)}".encode()).hexdigest()[:32]
        call = self._numbered(name)
        return await self._logged(
            call,
            lambda: self._gate.generate(prompt_ids, sampling),
            limit=sampling.max_tokens,
            prompt_tokens=len(prompt_ids),
        )


def item_engine(
    gate: EngineGate,
    calls: CallLog,
    item: str,
    *,
    method: str = "",
    on_call: OnCall | None = None,
) -> ItemEngine:
    """The engine as one item sees it; `on_call` is called with each call that was answered."""
    kind = TokenItemEngine if isinstance(gate.engine, TokenEngine) else ItemEngine
    return kind(gate, calls, item, method=method, on_call=on_call)


def _record(item: str, call: str, reply: LoggedReply) -> dict[str, Any]:
    completion = reply.completion
    return {
        "item": item,
        "call": call,
        "seconds": reply.seconds,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "reasoning": completion.reasoning,
        "refusal": completion.refusal,
        "served": completion.served,
        "num_attempts": completion.num_attempts,
        "usage": None if completion.usage is None else asdict(completion.usage),
        "logprob": None if completion.logprobs is None else sum(completion.logprobs),
    }


def _encode(record: dict[str, Any]) -> bytes:
    return sealed(json.dumps(record, separators=(",", ":")).encode())


def _parsed(record: dict[str, Any], where: str) -> tuple[str, str, LoggedReply]:
    """The item, the call and its reply that a line holds; `where` names the line in errors."""
    try:
        completion = Completion(
            text=record["text"],
            finish_reason=record["finish_reason"],
            reasoning=record["reasoning"],
            refusal=record.get("refusal"),
            served=record.get("served"),
            num_attempts=int(record["num_attempts"]),
            usage=None if record["usage"] is None else stored_usage(record["usage"]),
            logprobs=_logprobs(record.get("logprob")),
        )
        texts = (record["item"], record["call"], completion.text)
        others = (
            completion.finish_reason,
            completion.reasoning,
            completion.refusal,
            completion.served,
        )
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("no text")
        if not all(isinstance(text, str | None) for text in others):
            raise TypeError("no text")
        seconds = float(record["seconds"])
        return record["item"], record["call"], LoggedReply(completion, seconds)
    except (KeyError, TypeError, ValueError):
        raise RunError(f"{where} is damaged; the run cannot be resumed") from None


def _logprobs(logprob: object) -> tuple[float, ...] | None:
    """The log-probability of a reply as a completion has it; None where the engine reported none."""
    if logprob is None:
        return None
    if not isinstance(logprob, int | float):
        raise TypeError("no number")
    return (float(logprob),)

"""Replies of a run by what they are replies to: work that is done again with them repeats no call.

    replies = Replies(run / REPLIES, also=[earlier / REPLIES])
    scope = replies.scope("0")                       # the number of a question, the name of an item
    reply = await scope.known(ask, messages, sampling)   # `ask` makes the call where the reply is not known

A reply is on disk before it is used, so whoever is killed runs again from the start and comes to where it was: what it does
depends on replies alone. A call is known by its scope, by what is sent, and by how often the scope has sent the
same before. Of the tokens of a reply only their log-probability together is kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, FiniteFloat, PositiveInt, TypeAdapter

from memagent.errors import RunError, RunNotWritable
from memagent.files import reason_of
from memagent.run_files import LineFile, Record, read_lines, recover
from memagent.runs import stored_usage
from memagent.types import Completion, Message, Sampling, Usage

REPLIES = "replies.jsonl"
"""File of a run with its replies."""

Call = tuple[str, str]
"""The scope of a call and its name there."""


class KeptReply(NamedTuple):
    """A completion, and when it was made."""

    completion: Completion
    started: float = 0.0
    """Unix time."""
    seconds: float = 0.0
    call: Call = ("", "")
    is_known: bool = False
    """Whether it was on disk."""
    is_carried: bool = False
    """Whether an earlier run has made it; it costs nothing in this one."""


class Replies:
    """The replies of a run. Without a path nothing is kept."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        also: Iterable[Path] = (),
        scopes: Collection[str] | None = None,
    ) -> None:
        """`also`: files of earlier runs, whose replies are used too; of several the first one that has a reply counts.
        `scopes`: those that are used; others are not loaded.

        Raises RunError where a file is damaged.
        """
        self.path = path
        self._lock = threading.Lock()
        self._file: LineFile | None = None
        self._earlier: dict[Call, KeptReply] = {}
        for each in also:
            found, _ = _loaded(each, scopes, is_own=False)
            self._earlier = {**found, **self._earlier}
        self._own, self.usage = _loaded(path, scopes) if path else ({}, Usage())
        """`usage`: what all replies of the run have used."""

    def scope(self, name: str) -> Scope:
        """The calls of one question or item, counted from the first."""
        return Scope(self, name)

    def find(self, call: Call) -> KeptReply | None:
        """The reply to a call, if it is known."""
        if call in self._own:
            return self._own[call]._replace(is_known=True)
        if earlier := self._earlier.get(call):
            completion = replace(earlier.completion, usage=Usage(), num_attempts=1)
            return earlier._replace(completion=completion, seconds=0.0, is_carried=True)
        return None

    async def keep(self, reply: KeptReply) -> None:
        """Put a reply on disk. Cancelled, it still waits until that is done."""
        self.usage += reply.completion.usage or Usage()
        await self._write(reply.call, _record(reply))

    async def forget(self, calls: Iterable[Call]) -> None:
        """Ask these again in a later process; what they used stays counted."""
        for call in calls:
            self._own.pop(call, None)
            self._earlier.pop(call, None)
            await self._write(call, {"is_forgotten": True})

    async def _write(self, call: Call, record: Record) -> None:
        if self.path is None:
            return
        line = json.dumps({"scope": call[0], "call": call[1], **record}, separators=(",", ":"))
        writing = asyncio.ensure_future(asyncio.to_thread(self._append, line.encode()))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await writing
            raise

    def _append(self, line: bytes) -> None:
        assert self.path is not None
        try:
            with self._lock:
                self._file = self._file or LineFile(self.path, checksums=True)
                self._file.append(line)
        except OSError as error:
            raise RunNotWritable(
                f"cannot write to {self.path}: {reason_of(error)}; what was written before is kept"
            ) from None

    def close(self, *, delete: bool = False) -> None:
        """Close the file, and delete it where all that it was for is kept elsewhere."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
        if delete and self.path is not None:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)


class Scope:
    """The calls of one question or item."""

    def __init__(self, replies: Replies, name: str) -> None:
        self._replies = replies
        self._name = name
        self._num_same: Counter[str] = Counter()

    async def known(
        self,
        ask: Callable[[], Awaitable[KeptReply]],
        prompt: Sequence[Message] | Sequence[int],
        sampling: Sampling,
    ) -> KeptReply:
        """The reply to a prompt: the one that is known, else that of `ask`, which is kept."""
        digest = _fingerprint(prompt, sampling)
        self._num_same[digest] += 1
        call = (self._name, f"{digest}-{self._num_same[digest]}")
        reply = self._replies.find(call)
        if reply is not None and reply.is_known:
            return reply
        if reply is None:
            reply = (await ask())._replace(call=call)
        await self._replies.keep(reply)
        return reply

    def knows(self, prompt: Sequence[Message], sampling: Sampling) -> bool:
        """Whether the first reply to a prompt is known."""
        return self._replies.find((self._name, f"{_fingerprint(prompt, sampling)}-1")) is not None

    async def forget(self, replies: Iterable[KeptReply]) -> None:
        """Ask these again in a later process."""
        await self._replies.forget([reply.call for reply in replies])


def _fingerprint(prompt: Sequence[Message] | Sequence[int], sampling: Sampling) -> str:
    digest = hashlib.sha256(repr(sampling).encode())
    for part in prompt:
        text = str(part) if isinstance(part, int) else f"{part['role']}\0{part['content']}"
        digest.update(f"\0{len(text)}\0{text}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:32]


# --- on disk --------------------------------------------------------------------------------------


class _Kept(NamedTuple):
    """What a line of the file has of a reply."""

    text: str
    finish_reason: str | None
    reasoning: str | None
    refusal: str | None
    served: str | None
    num_attempts: PositiveInt
    logprob: FiniteFloat | None
    started: FiniteFloat
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    is_carried: bool


_kept = TypeAdapter(_Kept)
_call = TypeAdapter(Call)


def _record(reply: KeptReply) -> Record:
    completion = reply.completion
    logprobs = completion.logprobs
    kept = _Kept(
        text=completion.text,
        finish_reason=completion.finish_reason,
        reasoning=completion.reasoning,
        refusal=completion.refusal,
        served=completion.served,
        num_attempts=completion.num_attempts,
        logprob=None if logprobs is None else sum(logprobs),
        started=reply.started,
        seconds=reply.seconds,
        is_carried=reply.is_carried,
    )
    usage = None if completion.usage is None else asdict(completion.usage)
    return {**kept._asdict(), "usage": usage}


def _loaded(
    path: Path, scopes: Collection[str] | None, *, is_own: bool = True
) -> tuple[dict[Call, KeptReply], Usage]:
    """The replies in a file, and what they have used. A torn last line of the run's own is removed."""
    found: dict[Call, KeptReply] = {}
    used: list[Usage] = []
    try:
        records = recover(path) if is_own else [line.record for line in read_lines(path)]
    except OSError as error:
        raise RunNotWritable(f"cannot read {path}: {reason_of(error)}") from None
    except RunError as error:
        raise RunError(f"{error}; delete the file to repeat its calls") from None
    for number, record in enumerate(records, start=1):
        try:
            call = _call.validate_python((record.pop("scope", None), record.pop("call", None)))
            if scopes is not None and call[0] not in scopes:
                continue
            if record.pop("is_forgotten", False):
                found.pop(call, None)
                continue
            found[call] = reply = _reply(record, call)
        except (KeyError, TypeError, ValueError):
            raise RunError(
                f"{path}, line {number}, is damaged; delete the file to repeat its calls"
            ) from None
        used.append(reply.completion.usage or Usage())
    return found, reduce(Usage.__add__, used, Usage())


def _reply(record: dict[str, Any], call: Call) -> KeptReply:
    usage = record.pop("usage")
    kept = _kept.validate_python(_Kept(**record))
    completion = Completion(
        text=kept.text,
        finish_reason=kept.finish_reason,
        reasoning=kept.reasoning,
        refusal=kept.refusal,
        served=kept.served,
        num_attempts=kept.num_attempts,
        usage=None if usage is None else stored_usage(usage),
        logprobs=None if kept.logprob is None else (kept.logprob,),
    )
    return KeptReply(completion, kept.started, kept.seconds, call, is_carried=kept.is_carried)

"""The calls of items that are not finished yet, on disk, so that a resumed run does not repeat them.

    RUN/calls.jsonl    one line per reply; lines of finished items are dropped now and then

    method ──▶ ItemEngine ──▶ is the reply kept? ──▶ yes: it is given again
                                   │ no
                                   └──▶ Gate ──▶ engine ──▶ written to calls.jsonl ──▶ method

A method knows nothing of this. A call is known by its messages and sampling, and by how often the item
has made the same one before. Lines outlive the process, however it ends; a power cut may take the last
ones, and then those calls are made again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from memagent.engines.base import BaseEngine
from memagent.errors import EngineError, EngineRefused, RunError
from memagent.types import Completion, Engine, Message, Sampling, Usage

CALLS = "calls.jsonl"
MAX_DEAD_BYTES = 64_000_000
"""The file is written anew when lines of finished items take more than this, and more than the rest."""


class Kept(NamedTuple):
    """A reply, and how long it took."""

    completion: Completion
    seconds: float


class CallLog:
    """The replies of unfinished items. Without a path, nothing is on disk."""

    def __init__(
        self,
        path: Path | None,
        unfinished: Iterable[str] = (),
        *,
        max_dead_bytes: int = MAX_DEAD_BYTES,
    ) -> None:
        """Takes over what the file holds of `unfinished` items, and drops the rest of it."""
        self._path = path
        self._max_dead_bytes = max_dead_bytes
        self._lines: dict[str, list[bytes]] = {}
        self._kept: dict[tuple[str, str], Kept] = {}
        self._num_bytes = 0
        self._file: int | None = None
        if path is not None:
            wanted = frozenset(unfinished)
            if path.exists():
                self._load(path, wanted)
            self._rewrite()

    def find(self, item: str, call: str) -> Kept | None:
        """The reply to a call that was made before."""
        return self._kept.get((item, call))

    def append(self, item: str, call: str, kept: Kept) -> None:
        """Keep a reply until its item is finished."""
        if self._file is None:
            return
        line = _line(item, call, kept)
        os.write(self._file, line)
        self._num_bytes += len(line)
        self._lines.setdefault(item, []).append(line)

    def forget(self, item: str) -> None:
        """Let go of the replies of an item that is finished."""
        self._lines.pop(item, None)
        for key in [key for key in self._kept if key[0] == item]:
            del self._kept[key]
        if self._num_bytes > self._max_dead_bytes:
            num_live = sum(len(line) for lines in self._lines.values() for line in lines)
            if self._num_bytes > num_live + max(self._max_dead_bytes, num_live):
                self._rewrite()

    def close(self) -> None:
        """Close the file; it is removed when nothing is left in it to keep."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            assert self._path is not None
            if not self._lines:
                self._path.unlink(missing_ok=True)

    def _load(self, path: Path, wanted: frozenset[str]) -> None:
        with path.open("rb") as lines:
            for line in lines:
                try:
                    record = json.loads(line)
                except ValueError:  # torn by a crash; all after it is from the same moment
                    return
                if record["item"] in wanted:
                    self._lines.setdefault(record["item"], []).append(line)
                    self._kept[record["item"], record["call"]] = _kept(record)

    def _rewrite(self) -> None:
        assert self._path is not None
        if self._file is not None:
            os.close(self._file)
        temporary = self._path.with_suffix(".tmp")
        try:
            with temporary.open("wb") as file:
                for lines in self._lines.values():
                    file.writelines(lines)
                self._num_bytes = file.tell()
            temporary.replace(self._path)
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise RunError(f"cannot write {self._path}: {error.strerror}") from None


class Gate:
    """The engine as all items share it: one limit on calls under way, and an eye on outages."""

    def __init__(self, engine: Engine, *, concurrency: int) -> None:
        """An engine that limits itself is left to it: its place is free while it waits to try again."""
        self.engine = engine
        self.num_answered = 0
        self.num_failed_in_a_row = 0
        self.last_error: EngineError | EngineRefused | None = None
        limits_itself = isinstance(engine, BaseEngine) and engine.limits_itself
        self._slots = None if limits_itself else asyncio.Semaphore(concurrency)

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """One reply of the engine."""
        try:
            async with self._slots or nullcontext():
                completion = await self.engine.complete(messages, sampling)
        except (EngineError, EngineRefused) as error:
            self.num_failed_in_a_row += 1
            self.last_error = error
            raise
        self.num_answered += 1
        self.num_failed_in_a_row = 0
        return completion


class ItemEngine:
    """The engine as one item sees it: what it was answered before is answered again."""

    def __init__(self, gate: Gate, calls: CallLog, item: str) -> None:
        self.model = gate.engine.model
        self.tokenizer = gate.engine.tokenizer
        self.seconds_before = 0.0
        """Time that replies took which were given again."""
        self._gate = gate
        self._calls = calls
        self._item = item
        self._num_same: dict[str, int] = {}

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """A reply that is kept, or a new one, on disk before it is given."""
        call = self._name(messages, sampling)
        kept = self._calls.find(self._item, call)
        if kept is not None:
            self.seconds_before += kept.seconds
            return kept.completion
        clock = time.perf_counter()
        completion = await self._gate.complete(messages, sampling)
        seconds = round(time.perf_counter() - clock, 6)
        self._calls.append(self._item, call, Kept(completion, seconds))
        return completion

    async def aclose(self) -> None:
        """Nothing to free: the engine belongs to the run."""

    def _name(self, messages: Sequence[Message], sampling: Sampling) -> str:
        """The fingerprint of a call, and its number among those alike."""
        digest = hashlib.sha256(repr(sampling).encode())
        for message in messages:
            digest.update(f"\0{message['role']}\0".encode())
            digest.update(message["content"].encode("utf-8", "surrogatepass"))
        name = digest.hexdigest()[:32]
        number = self._num_same[name] = self._num_same.get(name, 0) + 1
        return f"{name}-{number}"


def _line(item: str, call: str, kept: Kept) -> bytes:
    completion = kept.completion
    record = {
        "item": item,
        "call": call,
        "seconds": kept.seconds,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "reasoning": completion.reasoning,
        "num_attempts": completion.num_attempts,
        "usage": None if completion.usage is None else asdict(completion.usage),
    }
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _kept(record: dict[str, object]) -> Kept:
    values = dict(record)
    usage = values["usage"]
    completion = Completion(
        text=str(values["text"]),
        finish_reason=values["finish_reason"],  # type: ignore[arg-type]
        reasoning=values["reasoning"],  # type: ignore[arg-type]
        num_attempts=int(str(values["num_attempts"])),
        usage=None if usage is None else Usage(**usage),  # type: ignore[arg-type]
    )
    return Kept(completion, float(str(values["seconds"])))

"""A reading on disk: what makes two readings the same, and how one is resumed.

A run's identity is everything that decides its trace: the text, the questions, the model, the
tokenizer, the prompts, the settings. The address of the endpoint is not part of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import Any, Literal

from memagent.agent.modes.carried import CARRIED, Carried, Replies, lines_of, read_replies
from memagent.agent.prompts import PromptSet
from memagent.agent.trace import Step, journal_line, steps_by_question
from memagent.config import AgentConfig
from memagent.documents.document import Document
from memagent.errors import RunError, RunNotWritable
from memagent.files import reason_of
from memagent.jsonl import LineFile, recover, sealed
from memagent.runs import (
    JOURNAL,
    MANIFEST,
    LimitsShape,
    ManifestShape,
    Run,
    check_manifest,
    read_manifest,
    stored_usage,
)
from memagent.types import Usage

KIND = "ask"
FREE_SETTINGS = ("prompts", "answer_tokens", "ledger_tokens")
"""Settings that may change on resuming: the wording counts, not its name, and no memory depends on
the length of the answer or on what it is shown."""

SPENT = "spent.jsonl"
"""File of a run with the usage of calls whose replies led to no step, one line for each step that failed."""
LATER_SETTINGS: dict[str, Any] = {
    "section_ends": "natural",
    "empty_replies": "keep",
    "no_change": False,
    "evidence": False,
    "quotes": "asked",
    "items": False,
    "quote_tokens": 256,
    "ledger_tokens": 1024,
    "stop_early": False,
    "order": "text",
    "mode": "in_order",
    "rounds": 3,
    "notes": "asked",
}
"""What settings were before they existed."""


def identity(
    *,
    questions: Sequence[str],
    document: Document,
    model: str,
    tokenizer: str,
    config: AgentConfig,
    prompts: PromptSet,
) -> dict[str, Any]:
    """The part of a manifest that decides a reading's trace."""
    return {
        "kind": KIND,
        "questions": list(questions),
        "document": {
            "source": document.source,
            "sha256": document.sha256,
            "num_chars": len(document.text),
        },
        "model": model,
        "tokenizer": tokenizer,
        "prompts": {
            "name": prompts.name,
            "sha256": prompts.sha256,
            "system": prompts.system,
            "read": prompts.read,
            "answer": prompts.answer,
            "empty_memory": prompts.empty_memory,
            **({"no_change": prompts.no_change} if prompts.no_change else {}),
            **({"replace": prompts.replace} if prompts.replace else {}),
            **_merging(config, prompts),
        },
        "agent": config.model_dump(mode="json"),
    }


def _merging(config: AgentConfig, prompts: PromptSet) -> dict[str, str]:
    """The wording of notes and merges, where a reading has any."""
    if not config.merges:
        return {}
    return {
        "note": prompts.note,
        "merge": prompts.merge,
        "nothing": prompts.nothing,
        "merging_sha256": prompts.merging_sha256,
    }


class _DocumentShape(ManifestShape):
    source: str
    sha256: str
    num_chars: int


class _PromptsShape(ManifestShape):
    name: str
    sha256: str


class _CommandShape(ManifestShape):
    paths: list[str]
    folder: str
    encoding: str | None
    engine: str
    engine_settings: dict[str, Any]
    limits: LimitsShape


class ReadingShape(ManifestShape):
    """The manifest of a reading."""

    kind: Literal["ask"]
    questions: list[str]
    document: _DocumentShape
    model: str
    tokenizer: str
    prompts: _PromptsShape
    agent: dict[str, Any]
    command: _CommandShape | None = None


def read_reading(path: Path) -> dict[str, Any]:
    """The manifest of the reading at `path`, checked."""
    manifest = read_manifest(path)
    if manifest.get("kind") != KIND:
        raise RunError(f"cannot resume {path}: {_another_kind(manifest)}; start a new run for it")
    return check_manifest(manifest, ReadingShape, path)


def reads_in_order(manifest: Mapping[str, Any]) -> bool:
    """Whether the sections of a reading follow each other as in the text."""
    agent = manifest.get("agent", {})
    return bool(agent.get("order", "text") == "text")


class Journal:
    """The steps of a reading, finished ones and new ones. Without a run it keeps nothing on disk."""

    def __init__(self, run: Run | None, *, carried: Carried | None = None) -> None:
        """`carried`: what is taken over from an earlier run, where nothing is kept on disk."""
        carried = carried or Carried()
        self._run = run
        self._lock = threading.Lock()
        self._finished = (
            steps_by_question(run.records, run.path, in_order=reads_in_order(run.manifest))
            if run
            else {number: list(steps) for number, steps in carried.steps.items()}
        )
        self._replies = read_replies(run.path) if run else carried.replies
        self.spent = _stored_spent(run.path / SPENT) if run else Usage()
        """What calls used whose replies led to no step, in earlier processes too."""

    @classmethod
    def create(
        cls,
        path: Path | None,
        reading: Mapping[str, Any],
        *,
        files: Mapping[str, bytes] | None = None,
        carried: Carried | None = None,
        text: str = "",
    ) -> Journal:
        """Begin a run, with what is carried over from an earlier one; `text` is what is read.

        The run is there with all of it or not at all.
        """
        carried = carried or Carried()
        lines = [
            sealed(line_of(number, step, text)) + b"\n"
            for number, steps in carried.steps.items()
            for step in steps
        ]
        kept = {JOURNAL: b"".join(lines), CARRIED: b"".join(lines_of(carried.replies))}
        files = {**(files or {}), **{name: data for name, data in kept.items() if data}}
        run = Run.create(path, reading, files=files)
        if not lines:
            return cls(run)
        run.close()
        return cls(Run.open(run.path))

    @classmethod
    def open(
        cls,
        path: Path,
        reading: dict[str, Any],
        *,
        carried: Carried | None = None,
        text: str = "",
    ) -> Journal:
        """Begin a run at `path`, or resume the one that is there if it is the same reading."""
        if not (path / MANIFEST).exists():
            return cls.create(path, reading, carried=carried, text=text)
        check_same(read_reading(path), reading, path)
        return cls(Run.open(path))

    @property
    def path(self) -> Path | None:
        """Where the run is."""
        return self._run.path if self._run else None

    def finished(self, question_number: int) -> list[Step]:
        """Steps that were on disk when the run was opened."""
        return self._finished.get(question_number, [])

    def replies(self, question_number: int) -> Replies:
        """Replies of an earlier run that may be used again."""
        return self._replies.get(question_number, {})

    def append(self, question_number: int, step: Step, *, text: str) -> None:
        """Put a step on disk; returns when it is safe. `text` is what is read."""
        if self._run:
            with self._lock:
                self._run.append(line_of(question_number, step, text))

    def spend(self, usage: Usage) -> None:
        """Put on disk what calls used whose replies led to no step."""
        self.spent += usage
        if self._run is None:
            return
        path = self._run.path / SPENT
        try:
            with self._lock, LineFile(path, checksums=True) as lines:
                lines.append(json.dumps(asdict(usage)).encode())
        except OSError as error:
            raise RunNotWritable(f"cannot write to {path}: {reason_of(error)}") from None

    async def append_in_thread(self, question_number: int, step: Step, *, text: str) -> None:
        """As `append`, while other calls go on. Cancelled, it still waits until the step is safe."""
        if self._run is None:
            return
        writing = asyncio.ensure_future(
            asyncio.to_thread(self.append, question_number, step, text=text)
        )
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await writing
            raise

    def check_kept(self) -> None:
        """Raise RunNotWritable where what was written is no longer in the run directory."""
        if self._run:
            self._run.check_kept()

    def discard_if_empty(self) -> bool:
        """Remove a run in which nothing was ever finished; whether that was so."""
        return self._run is not None and self._run.discard_if_empty()

    def close(self) -> None:
        """Release the run directory."""
        if self._run:
            self._run.close()


def _stored_spent(path: Path) -> Usage:
    try:
        return reduce(Usage.__add__, map(stored_usage, recover(path)), Usage())
    except OSError as error:
        raise RunError(f"cannot read {path}: {reason_of(error)}") from None
    except ValueError:
        raise RunError(f"{path} is damaged; delete it to resume without what it counts") from None


def line_of(question_number: int, step: Step, text: str) -> bytes:
    """A step as a line of the journal of a reading of `text`."""
    section = step.section
    digest = None if section is None else section_digest(text[section.start : section.end])
    return journal_line(question_number, step, section_sha256=digest)


def section_digest(text: str) -> str:
    """Fingerprint of a section's text, by which a later run knows that it did not change."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def check_same(
    stored: dict[str, Any], reading: dict[str, Any], path: Path, *, what: str = "resume"
) -> None:
    """Raise RunError when a run is another reading than `reading`; `what` is to be done with it."""
    reason = _difference(stored, reading)
    if reason:
        raise RunError(f"cannot {what} {path}: {reason}; start a new run for it")


def _difference(stored: dict[str, Any], reading: dict[str, Any]) -> str | None:
    if stored.get("kind") != reading["kind"]:
        return _another_kind(stored)
    if stored["document"]["sha256"] != reading["document"]["sha256"]:
        was, now = stored["document"]["num_chars"], reading["document"]["num_chars"]
        return f"the text has changed since (then {was:,} characters, now {now:,})"
    for name in ("questions", "model", "tokenizer"):
        if stored[name] != reading[name]:
            return f"{name} was {_short(stored[name])}, now {_short(reading[name])}"
    if stored["prompts"]["sha256"] != reading["prompts"]["sha256"]:
        then, now = stored["prompts"]["name"], reading["prompts"]["name"]
        return f"the wording of the prompts has changed (then {then!r}, now {now!r})"
    then = {**LATER_SETTINGS, **stored["agent"]}
    free = FREE_SETTINGS if _merges(then) else (*FREE_SETTINGS, "notes")
    for name, value in reading["agent"].items():
        if name not in free and then.get(name) != value:
            return f"{name} was {then.get(name)}, now {value}"
    if stored["prompts"].get("merging_sha256") != reading["prompts"].get("merging_sha256"):
        return "the wording of the prompts for notes and merges has changed"
    return None


def _merges(agent: Mapping[str, Any]) -> bool:
    return bool(agent["mode"] != "in_order")


def _another_kind(stored: dict[str, Any]) -> str:
    return f"it is a run of kind {stored.get('kind')!r:.60}, not {KIND!r}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else "; ".join(value)
    return repr(text if len(text) <= 60 else text[:57] + "...")

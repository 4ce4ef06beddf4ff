"""A reading on disk: what makes two readings the same, and how one is resumed.

A run's identity is everything that decides its trace: the text, the questions, the model, the
tokenizer, the prompts, the settings. The address of the endpoint is not part of it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from memagent import trust
from memagent.agent.model_call import LimitSettings
from memagent.agent.prompts import PromptSet
from memagent.agent.trace import Step, journal_line
from memagent.config import AgentConfig
from memagent.documents.document import Document
from memagent.errors import RunError
from memagent.replies import REPLIES, Replies
from memagent.runs import MANIFEST, ManifestShape, Run, parse_manifest, read_manifest

KIND = "ask"
FREE_SETTINGS = ("prompts", "answer_tokens", "ledger_tokens")
"""Settings that may change on resuming: the wording counts, not its name, and no memory depends on
the length of the answer or on what it is shown."""


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
    merging = {  # the wording of notes and merges, where a reading has any
        "note": prompts.note,
        "merge": prompts.merge,
        "nothing": prompts.nothing,
        "merging_sha256": prompts.merging_sha256,
    }
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
            **(merging if config.merges else {}),
        },
        "agent": config.model_dump(mode="json"),
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
    limits: LimitSettings


class ReadingShape(ManifestShape):
    """The manifest of a reading."""

    kind: Literal["ask"]
    questions: list[str]
    document: _DocumentShape
    model: str
    tokenizer: str
    prompts: _PromptsShape
    agent: dict[str, Any]
    also: list[str] | None = None
    command: _CommandShape | None = None


def read_reading(path: Path) -> dict[str, Any]:
    """The manifest of the reading at `path`, checked."""
    manifest = read_manifest(path)
    if manifest.get("kind") != KIND:
        raise RunError(f"cannot resume {path}: {_another_kind(manifest)}; start a new run for it")
    parse_manifest(manifest, ReadingShape, path)
    return manifest


class Journal:
    """A reading on disk: its replies, from which it is done again, and its steps for people to look at."""

    def __init__(self, run: Run, *, also: Sequence[Path] = ()) -> None:
        """`also`: runs whose replies are used where the reading comes to the same prompts."""
        self._run = run
        self._lock = threading.Lock()
        self.path = run.path
        self.replies = earlier_replies(also, own=run.path / REPLIES)

    @classmethod
    def create(
        cls,
        path: Path | None,
        reading: Mapping[str, Any],
        *,
        files: Mapping[str, bytes] | None = None,
        also: Sequence[Path] = (),
    ) -> Journal:
        """Begin a run. A run that resumes it later finds `also` again if they were named on this machine."""
        names = [str(each.absolute()) for each in also]
        run = Run.create(
            path, {**reading, "also": names} if names else reading, files=files, is_derived=True
        )
        try:
            return cls(run, also=also)
        except BaseException:
            run.discard_if_empty()
            run.close()
            raise

    @classmethod
    def open(cls, path: Path, reading: dict[str, Any], *, also: Sequence[Path] = ()) -> Journal:
        """Begin a run at `path`, or resume the one that is there if it is the same reading."""
        if not (path / MANIFEST).exists():
            return cls.create(path, reading, also=also)
        stored = read_reading(path)
        check_same(stored, reading, path)
        known = [each for each in stored.get("also") or () if trust.is_known("file", each)]
        run = Run.open(path, is_derived=True)
        try:
            return cls(run, also=[*also, *map(Path, known)])
        except BaseException:
            run.close()
            raise

    def append(self, question_number: int, step: Step) -> None:
        """Write down a step."""
        with self._lock:
            self._run.append(journal_line(question_number, step))

    def sync(self) -> None:
        """Return when all steps are safe from a power cut."""
        self._run.sync()

    def check_kept(self) -> None:
        """Raise RunNotWritable where what was written is no longer in the run directory."""
        self._run.check_kept()

    def discard_if_empty(self) -> bool:
        """Remove a run in which nothing was ever finished; whether that was so."""
        return self._run.discard_if_empty()

    def close(self) -> None:
        """Release the run directory."""
        self.replies.close()
        self._run.close()


def earlier_replies(runs: Sequence[Path], *, own: Path | None = None) -> Replies:
    """The replies of earlier runs, and of the run that they are used in."""
    found = [path for path in (each / REPLIES for each in runs) if os.path.lexists(path)]
    return Replies(own, also=found)


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
    then = stored["agent"]
    free = (*FREE_SETTINGS, "notes") if then.get("mode") == "in_order" else FREE_SETTINGS
    for name, value in reading["agent"].items():
        if name not in free and then.get(name) != value:
            return f"{name} was {then.get(name)}, now {value}"
    if stored["prompts"].get("merging_sha256") != reading["prompts"].get("merging_sha256"):
        return "the wording of the prompts for notes and merges has changed"
    return None


def _another_kind(stored: dict[str, Any]) -> str:
    return f"it is a run of kind {stored.get('kind')!r:.60}, not {KIND!r}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else "; ".join(value)
    return repr(text if len(text) <= 60 else text[:57] + "...")

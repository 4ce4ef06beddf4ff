"""ItemRecord: what became of one example under one method, as a run's journal keeps it.

    RUN/run.json       kind "eval": engine, model, methods, tasks, lengths, num, seed, grader
    RUN/steps.jsonl    one ItemRecord per line, in the order in which items finished

    for record in read_items(Path("RUN")):
        print(record.task, record.target_tokens, record.method, record.score)

A failed item is a record like any other: its score is 0 and it stays in every denominator.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from memagent.errors import RunError
from memagent.runs import JOURNAL, read_manifest

KIND = "eval"

ItemStatus = Literal["ok", "failed"]


@dataclass(frozen=True, slots=True)
class Key:
    """Which item of a run a record is about; no two records of a run share it."""

    task: str
    method: str
    target_tokens: int | None
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemRecord:
    """One example, one method: the answer, its score, and what it took."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    id: str
    """The example's id; empty when the example could not be made."""
    task: str
    method: str
    target_tokens: int | None
    """The length the text was asked to have; None where it was not."""
    num_tokens: int | None
    """The length it has, by the tokenizer it was made with."""
    index: int
    """Number of the example within its task, or within its file."""
    seed: int
    """Sampling seed of the item."""
    depth: float | None = None
    """Mean place of the evidence, from 0, the beginning of the text, to 1; None without evidence."""
    status: ItemStatus
    error: str | None = None
    """Why the item failed."""
    answer: str = ""
    answers: tuple[str, ...] = ()
    """The accepted answers."""
    grader: str
    score: float
    """From 0 to 1, unless a method that grades itself gives another; 0 for a failed item."""
    extracted: str | None = None
    """What of the answer was graded."""
    num_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    """From the first call of the item to its end."""
    cost: float | None = None
    """None without prices."""
    num_sections: int = 0
    """Sections of the text that were read."""
    is_cut: bool = False
    """True when the method did not read the whole text."""
    trace: dict[str, Any] = field(default_factory=dict)
    """The full trace, as `Trace.to_dict` writes it; of a failed item, as far as it came."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What the example and the method say of themselves."""

    @property
    def key(self) -> Key:
        """Which item of the run this is."""
        return Key(self.task, self.method, self.target_tokens, self.index)

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}

    def to_json(self) -> bytes:
        """One JSON line without the newline."""
        line = json.dumps(self.to_dict(), ensure_ascii=False, separators=(",", ":"))
        return line.encode("utf-8", "backslashreplace")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ItemRecord:
        """A record as `to_dict` wrote it, checked."""
        return _record.validate_python(dict(values))


def read_items(path: Path, *, with_traces: bool = True) -> Iterator[ItemRecord]:
    """The records of an evaluation's directory, one by one; a torn last line is passed over.

    Without traces they are small, however long the texts.
    """
    manifest = read_manifest(path)
    if manifest.get("kind") != KIND:
        raise RunError(f"{path} is a run of kind {manifest.get('kind')!r}, not an evaluation")
    journal = path / JOURNAL
    if not journal.exists():
        return
    with journal.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            yield parse_item(line, f"{journal}, line {number},", with_trace=with_traces)


def parse_item(
    line: bytes | Mapping[str, Any], where: str, *, with_trace: bool = True
) -> ItemRecord:
    """The record that a line of the journal holds; `where` names the line in errors."""
    try:
        values = json.loads(line) if isinstance(line, bytes) else dict(line)
        if not with_trace:
            values["trace"] = {}
        return ItemRecord.from_dict(values)
    except (ValidationError, ValueError, TypeError):
        raise RunError(f"{where} is damaged; the run cannot go on") from None


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


_record = TypeAdapter(ItemRecord)

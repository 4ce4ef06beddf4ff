"""Example: a question, the text that answers it, and where in the text the evidence is.

    Example ── documents ── text()  ──▶ the one text that is read
       │           ▲
       ├─ evidence ┘  (document number, character offsets)
       ├─ answers     (any of them, or all of them)
       └─ origin      (task, settings, index: enough to rebuild the documents)

Texts of millions of tokens are not stored: such an example has an `origin` instead of documents, and
`memagent.data.tasks.registry.rebuild` rebuilds them, byte for byte.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import ConfigDict

from memagent.errors import DataError
from memagent.rewards.verifiers import Match

FROM_FILES = ConfigDict(extra="forbid", strict=True)
"""How strictly records are checked where they come from a file (`memagent.data.formats.files`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One document of an example.

    Example: Passage(title="Arthur's Magazine", text="Arthur's Magazine (1844-1846) was ...")
    """

    __pydantic_config__: ClassVar[ConfigDict] = FROM_FILES

    text: str
    title: str = ""
    """Heads the text where several documents are joined; empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A span of a document that the answer rests on.

    Example: Evidence(document=3, start=0, end=41, text="One of the magic numbers for fox is 512.")
    """

    __pydantic_config__: ClassVar[ConfigDict] = FROM_FILES

    document: int
    """Index of the passage."""
    start: int
    """Character offset into the passage's text; `passage.text[start:end] == text`."""
    end: int
    text: str
    note: str = ""
    """What a reader should remember of it, where that is not the text itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """How an example was generated; the same origin gives the same example.

    Example: Origin(task="ruler/niah_single_1", settings={"tokens": 8192, "seed": 7, ...}, index=12)
    """

    __pydantic_config__: ClassVar[ConfigDict] = FROM_FILES

    task: str
    settings: dict[str, Any]
    """All settings of the task, as `open_task` takes them."""
    index: int
    sources: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each source file that was read, by the source's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A question over a text, with its accepted answers."""

    __pydantic_config__: ClassVar[ConfigDict] = FROM_FILES

    id: str
    """Unique within a dataset, and the same whenever it is rebuilt."""
    task: str = "custom"
    """Groups examples in reports and metrics; names the rule of its demonstrations where one exists."""
    question: str
    answers: tuple[str, ...]
    match: Match = "any"
    """Whether one of the answers is enough, or all are required."""
    grader: str = "lenient"
    """Name of the grader in `memagent.rewards` that evaluation uses by default."""
    documents: tuple[Passage, ...] | None = ()
    """The text, in reading order; empty for a question without one, None when it must be rebuilt from
    `origin`."""
    evidence: tuple[Evidence, ...] = ()
    origin: Origin | None = None
    target_tokens: int | None = None
    """Requested length of the text in tokens; None when none was requested."""
    num_tokens: int | None = None
    """Actual length, by the tokenizer of its task."""
    seed: int = 0
    text_sha256: str = ""
    """Fingerprint of `text()`, checked when the text is rebuilt; empty when not known."""
    metadata: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """The text that is read."""
        return join(self.passages)

    @property
    def passages(self) -> tuple[Passage, ...]:
        """The documents; an error if they have to be rebuilt first."""
        if self.documents is None:
            raise DataError(f"the text of {self.id} is not in the file; rebuild it from its origin")
        return self.documents

    def evidence_offsets(self) -> list[tuple[int, int]]:
        """Spans of the evidence in `text()`, in the order of `evidence`."""
        starts = body_starts(self.passages)
        return [
            (starts[item.document] + item.start, starts[item.document] + item.end)
            for item in self.evidence
        ]


def join(passages: tuple[Passage, ...]) -> str:
    """The passages as one text: a single one without title as it is, several numbered and headed."""
    if _is_bare(passages):
        return passages[0].text
    return "\n\n".join(
        heading(number, passage) + passage.text for number, passage in enumerate(passages, start=1)
    )


def heading(number: int, passage: Passage) -> str:
    """The heading of a passage, counted from 1."""
    return f"Document {number}:\n{passage.title}\n" if passage.title else f"Document {number}:\n"


def body_starts(passages: tuple[Passage, ...]) -> list[int]:
    """Where each passage's own text begins in the joined text."""
    if _is_bare(passages):
        return [0]
    starts, position = [], 0
    for number, passage in enumerate(passages, start=1):
        position += len(heading(number, passage))
        starts.append(position)
        position += len(passage.text) + 2
    return starts


def fingerprint(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _is_bare(passages: tuple[Passage, ...]) -> bool:
    return len(passages) == 1 and not passages[0].title

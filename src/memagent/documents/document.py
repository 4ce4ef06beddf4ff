"""Document and Chunk: the text that is read, and spans of it that know where they came from.

A reading is always over one `Document`. Several files are joined into one, each headed by its name,
and every span can be traced back to the file, the offsets inside it, and its pages:

    report.pdf ─┐                       Document.text
    notes.md   ─┼─ Document.join ──▶  ┌─────────────────────────────────────────┐
    src/a.py   ─┘                     │ heading, report.pdf, heading, notes.md… │
                                      └───────────────▲─────────────────────────┘
                                      Chunk.places: report.pdf p. 3-4, notes.md 0-512
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from memagent.errors import DocumentError

BLOCK_CHARS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One source inside a document's text, as character offsets into `Document.text`."""

    source: str
    """Path or name of the source, as the user wrote it."""
    start: int
    end: int
    page_starts: tuple[int, ...] = ()
    """Where each page begins, as offsets into `Document.text`; empty for sources without pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a span lies in a source.

    Example: Place(source="report.pdf", start=1200, end=5400, first_page=3, last_page=4)
    """

    source: str
    start: int
    """Character offset into the source's own text."""
    end: int
    first_page: int | None = None
    """Page number, counted from 1; None for sources without pages."""
    last_page: int | None = None

    def __str__(self) -> str:
        if self.first_page is None:
            return f"{self.source} [{self.start}:{self.end}]"
        if self.first_page == self.last_page:
            return f"{self.source} p. {self.first_page}"
        return f"{self.source} p. {self.first_page}-{self.last_page}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A span of a document.

    Example: Chunk(index=0, text="It was", start=0, end=6, num_tokens=2, places=(...,))
    """

    index: int
    text: str
    start: int
    """Character offset into `Document.text`; `text == document.text[start:end]`."""
    end: int
    num_tokens: int
    places: tuple[Place, ...]
    """The sources this span covers, in order."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Document:
    """A text to read, and the sources in it."""

    text: str
    parts: tuple[Part, ...]
    """Sources in order of position, not overlapping. Headings between them belong to no part."""

    def __post_init__(self) -> None:
        for start, block in self._blocks():
            try:
                block.encode("utf-8")
            except UnicodeEncodeError as error:
                raise DocumentError(
                    f"{self.source} holds half a character (a lone surrogate) at "
                    f"{start + error.start}; decode it again with errors='replace'"
                ) from None

    def __repr__(self) -> str:  # never the text: it may be millions of characters
        return f"Document(source={self.source!r}, num_chars={len(self.text)})"

    @classmethod
    def from_text(cls, text: str, source: str = "text") -> Document:
        """A document from a string."""
        return cls(text=text, parts=(Part(source=source, start=0, end=len(text)),))

    @classmethod
    def from_pages(cls, pages: Sequence[str], source: str) -> Document:
        """A document from pages; each page is followed by a blank line."""
        starts, texts, position = [], [], 0
        for page in pages:
            starts.append(position)
            texts.append(page.rstrip() + "\n\n")
            position += len(texts[-1])
        part = Part(source=source, start=0, end=position, page_starts=tuple(starts))
        return cls(text="".join(texts), parts=(part,))

    @classmethod
    def load(cls, *paths: str | Path) -> Document:
        """Read files, folders or standard input (`-`) into one document."""
        from memagent.documents.loaders import load

        return load(paths)

    @classmethod
    def join(cls, documents: Sequence[Document]) -> Document:
        """Several documents as one text, each source headed by its name. A single document is returned unchanged."""
        if not documents:
            raise DocumentError("there is no document to read")
        if len(documents) == 1:
            return documents[0]
        texts: list[str] = []
        parts: list[Part] = []
        position = 0
        for document in documents:
            for part in document.parts:
                heading = f"===== {part.source} =====\n"
                body = document.text[part.start : part.end]
                shift = position + len(heading) - part.start
                parts.append(
                    Part(
                        source=part.source,
                        start=part.start + shift,
                        end=part.end + shift,
                        page_starts=tuple(start + shift for start in part.page_starts),
                    )
                )
                texts += [heading, body, "\n\n"]
                position += len(heading) + len(body) + 2
        return cls(text="".join(texts), parts=tuple(parts))

    @property
    def source(self) -> str:
        """A short name for people: the source, or the first of several."""
        first = self.parts[0].source if self.parts else "text"
        return first if len(self.parts) <= 1 else f"{first} and {len(self.parts) - 1} more"

    @cached_property
    def sha256(self) -> str:
        """Fingerprint of the text, by which a resumed run knows that it did not change."""
        digest = hashlib.sha256()
        for _, block in self._blocks():
            digest.update(block.encode("utf-8"))
        return digest.hexdigest()

    def places(self, start: int, end: int) -> tuple[Place, ...]:
        """The sources that a span of the text covers."""
        first = max(bisect_right(self._part_starts, start) - 1, 0)
        found: list[Place] = []
        for part in self.parts[first:]:
            if part.start >= end:
                break
            low, high = max(start, part.start), min(end, part.end)
            if low < high:
                found.append(_place(part, low, high))
        return tuple(found)

    def _blocks(self) -> Iterator[tuple[int, str]]:
        """The text in pieces, with their offsets: encoding all of it at once would double its size."""
        for start in range(0, len(self.text), BLOCK_CHARS):
            yield start, self.text[start : start + BLOCK_CHARS]

    @cached_property
    def _part_starts(self) -> list[int]:
        return [part.start for part in self.parts]


def _place(part: Part, start: int, end: int) -> Place:
    return Place(
        source=part.source,
        start=start - part.start,
        end=end - part.start,
        first_page=_page(part, start),
        last_page=_page(part, end - 1),
    )


def _page(part: Part, position: int) -> int | None:
    return max(bisect_right(part.page_starts, position), 1) if part.page_starts else None

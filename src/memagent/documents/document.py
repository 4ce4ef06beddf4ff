"""Document and Chunk: the text that is read, and spans of it that know where they came from.

A reading is always over one `Document`. Several files are joined into one, each headed by its name,
and every span can be traced back to the file, the offsets inside it, and its pages, headings or lines:

    report.pdf ─┐                       Document.text
    notes.md   ─┼─ Document.join ──▶  ┌─────────────────────────────────────────┐
    src/a.py   ─┘                     │ heading, report.pdf, heading, notes.md… │
                                      └───────────────▲─────────────────────────┘
                                      Chunk.places: report.pdf p. 3-4, notes.md "Plan" lines 1-20
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from memagent.errors import DocumentError

BLOCK_CHARS = 1 << 20
LINE_BLOCK_CHARS = 4096
"""The number of line ends is kept for every so many characters."""
MAX_HEADINGS = 100_000
"""A source with more headings than this has none."""
MAX_TITLE_CHARS = 80


@dataclass(frozen=True, slots=True)
class Heading:
    """Where a chapter or a part under a heading begins."""

    start: int
    """Character offset into the text."""
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One source inside a document's text, as character offsets into `Document.text`."""

    source: str
    """Path or name of the source, as the user wrote it."""
    start: int
    end: int
    page_starts: tuple[int, ...] = ()
    """Where each page begins, as offsets into `Document.text`; empty for sources without pages."""
    headings: tuple[Heading, ...] = ()
    """Chapters or headings in order, with offsets into `Document.text`."""
    has_lines: bool = False
    """Whether lines of the text are lines of the source, as in text files and code."""


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
    first_heading: str | None = None
    """The chapter or heading that the span begins under; None before the first, or without any."""
    last_heading: str | None = None
    """The one that the span ends under."""
    first_line: int | None = None
    """Line number, counted from 1; None for sources whose text has other lines than the file."""
    last_line: int | None = None

    def __str__(self) -> str:
        if self.first_page is not None:
            return f"{self.source} p. {_range(self.first_page, self.last_page)}"
        words = [self.source]
        if self.last_heading is not None:
            words.append(_headings(self.first_heading, self.last_heading))
        if self.first_line is not None:
            unit = "line" if self.first_line == self.last_line else "lines"
            words += [unit, _range(self.first_line, self.last_line)]
        if len(words) == 1 or (self.first_line is not None and self.first_line == self.last_line):
            words.append(f"[{self.start}:{self.end}]")
        return " ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A span of a document.

    Example: Chunk(index=0, text="It was", start=0, end=6, num_tokens=2, places=())
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
    def from_text(
        cls,
        text: str,
        source: str = "text",
        *,
        headings: Sequence[Heading] = (),
        has_lines: bool = False,
    ) -> Document:
        """A document from a string. `has_lines`: its lines are those of a file called `source`."""
        part = Part(
            source=source,
            start=0,
            end=len(text),
            headings=tuple(headings) if len(headings) <= MAX_HEADINGS else (),
            has_lines=has_lines,
        )
        return cls(text=text, parts=(part,))

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
    def join(cls, documents: Sequence[Document], *, heads_one: bool = False) -> Document:
        """Several documents as one text, each source headed by its name.

        A single document is returned unchanged unless `heads_one`.
        """
        if not documents:
            raise DocumentError("there is no document to read")
        if len(documents) == 1 and not heads_one:
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
                    replace(
                        part,
                        start=part.start + shift,
                        end=part.end + shift,
                        page_starts=tuple(start + shift for start in part.page_starts),
                        headings=tuple(
                            Heading(each.start + shift, each.title) for each in part.headings
                        ),
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
        first = max(bisect_right(self.parts, start, key=lambda part: part.start) - 1, 0)
        found: list[Place] = []
        for part in self.parts[first:]:
            low, last = max(start, part.start), min(end, part.end) - 1
            if part.start >= end:
                break
            if low > last:
                continue
            text = self.text[low : last + 1] if part.headings else ""
            begin = min(last + 1 - len(text.lstrip()), last)  # a heading may stand after blanks
            place = Place(
                source=part.source,
                start=low - part.start,
                end=last + 1 - part.start,
                first_page=_page(part, low),
                last_page=_page(part, last),
                first_heading=_title(part, begin),
                last_heading=_title(part, last),
                first_line=self._line(part, low),
                last_line=self._line(part, last),
            )
            found.append(place)
        return tuple(found)

    def _line(self, part: Part, position: int) -> int | None:
        if not part.has_lines:
            return None
        return self._num_line_ends(position) - self._num_line_ends(part.start) + 1

    def _num_line_ends(self, position: int) -> int:
        block = position // LINE_BLOCK_CHARS
        return self._line_ends[block] + self.text.count("\n", block * LINE_BLOCK_CHARS, position)

    @cached_property
    def _line_ends(self) -> list[int]:
        """Line ends before each block of the text."""
        starts = range(0, len(self.text), LINE_BLOCK_CHARS)
        counts = (self.text.count("\n", start, start + LINE_BLOCK_CHARS) for start in starts)
        return list(accumulate(counts, initial=0))

    def _blocks(self) -> Iterator[tuple[int, str]]:
        """The text in pieces, with their offsets: encoding all of it at once would double its size."""
        for start in range(0, len(self.text), BLOCK_CHARS):
            yield start, self.text[start : start + BLOCK_CHARS]


def _page(part: Part, position: int) -> int | None:
    return max(bisect_right(part.page_starts, position), 1) if part.page_starts else None


def _title(part: Part, position: int) -> str | None:
    index = bisect_right(part.headings, position, key=lambda heading: heading.start) - 1
    return part.headings[index].title if index >= 0 else None


def _range(first: int, last: int | None) -> str:
    return f"{first}" if first == last else f"{first}-{last}"


def _headings(first: str | None, last: str) -> str:
    if first == last:
        return _quoted(last)
    return f"up to {_quoted(last)}" if first is None else f"{_quoted(first)} to {_quoted(last)}"


def _quoted(title: str) -> str:
    return f'"{title[:MAX_TITLE_CHARS]}..."' if len(title) > MAX_TITLE_CHARS else f'"{title}"'

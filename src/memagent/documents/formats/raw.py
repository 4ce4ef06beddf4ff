"""RawFile: a file's bytes before its format is known, and the errors all formats share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from memagent.documents.document import Document, Heading
from memagent.documents.encoding import decode, normalize_newlines
from memagent.errors import DocumentError

HEADING_MARK = "\0"
"""Stands before a heading while a text is put together. `tidy` removes it from every text."""
MAX_TITLE_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RawFile:
    """A file's bytes, and what is known about them.

    Example: RawFile(source="logs/book.txt.gz", name="book.txt", data=b"It was", encoding=None)
    """

    source: str
    """What the user calls it; used in errors and in the document."""
    name: str
    """Its ending decides the format; for a gzip file the name of what is inside."""
    data: bytes
    encoding: str | None = None
    """Encoding that the user named; None: detect it. Formats with a fixed encoding ignore it."""
    num_packed: int | None = None
    """Bytes of the compressed file that `data` was in; None: it was in none."""
    max_bytes: int | None = None
    """What it may unpack to at most, whatever its size; None: what `budget` says."""

    @property
    def num_given(self) -> int:
        """Bytes of the file as it was given."""
        return len(self.data) if self.num_packed is None else self.num_packed

    @property
    def is_packed(self) -> bool:
        """Whether the file was compressed."""
        return self.num_packed is not None

    def text(self, *, declared: str | None = None) -> str:
        """The bytes as text; `declared` is the encoding the text names itself."""
        return decode(self.data, self.source, encoding=self.encoding, declared=declared)


FormatReader = Callable[[RawFile], Document]


class EmptyText(DocumentError):
    """There is nothing to read. Its own class, because a tree may well hold empty files."""


def damaged(raw: RawFile, kind: str, error: Exception | str, advice: str) -> DocumentError:
    """A file that its library cannot make sense of."""
    return DocumentError(f"{raw.source} is not a readable {kind} file ({reason(error)}); {advice}")


def missing_library(library: str, source: str) -> DocumentError:
    """An optional library is needed and not installed."""
    return DocumentError(
        f'reading {source} needs the library {library}: pip install "memagent[documents]"'
    )


def reason(error: Exception | str) -> str:
    """The message of a library, as one short line."""
    words = " ".join(str(error).split())
    return words[:120] or type(error).__name__


class MarkedText(NamedTuple):
    """Text of a container, and its headings."""

    text: str
    headings: tuple[Heading, ...]


def tidy_marked(text: str) -> MarkedText:
    r"""As `tidy`, of text in which HEADING_MARK stands before each heading.

    >>> tidy_marked("\0# Whales\n\nBig.")
    MarkedText(text='# Whales\n\nBig.', headings=(Heading(start=0, title='Whales'),))
    """
    pieces = [tidy(piece) for piece in text.split(HEADING_MARK)]
    starts = accumulate(map(len, pieces))
    headings = [
        Heading(start, title)
        for start, before, piece in zip(starts, pieces, pieces[1:], strict=False)
        if (not start or before.endswith("\n")) and (title := title_of(piece))
    ]
    return MarkedText("".join(pieces), tuple(headings))


def title_of(line: str) -> str:
    """The words of a heading, the first line of a text, without its `#` marks."""
    return " ".join(line.partition("\n")[0].strip().strip("#").split())[:MAX_TITLE_CHARS]


def tidy(text: str) -> str:
    r"""Text of a container, cleaned: `\n` newlines, no NUL, no half surrogate pairs."""
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return normalize_newlines(whole.replace("\0", ""))

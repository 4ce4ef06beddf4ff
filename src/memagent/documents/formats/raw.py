"""RawFile: a file's bytes before its format is known, and the errors all formats share."""

from __future__ import annotations

import gzip
import io
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple

from memagent.documents.document import Document, Heading
from memagent.documents.encoding import decode, normalize_newlines
from memagent.errors import DocumentError, one_line
from memagent.foreign import foreign_file

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
    return DocumentError(
        f"{raw.source} is not a readable {kind} file ({one_line(error, 120)}); {advice}"
    )


def missing_library(library: str, source: str) -> DocumentError:
    """An optional library is needed and not installed."""
    return DocumentError(
        f'reading {source} needs the library {library}: pip install "memagent[documents]"'
    )


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


# --- compressed files -----------------------------------------------------------------------------

# Both are unpacked under a limit, because a few kilobytes can claim terabytes.


GZIP_MAGIC = b"\x1f\x8b"
_STEP_BYTES = 1024 * 1024

ZIP_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, EOFError, OSError, KeyError, ValueError),
    *(RuntimeError, NotImplementedError),  # a password, a compression method we lack
)
"""What `zipfile` raises on a damaged archive. KeyError: the archive lacks a file."""


def is_gzip(name: str, head: bytes) -> bool:
    """Whether a file is gzip, by its name or by its first bytes."""
    return name.lower().endswith(".gz") or head.startswith(GZIP_MAGIC)


def unpack_gzip(raw: RawFile, *, max_bytes: int | None = None) -> RawFile:
    """What a gzip file holds, under the name without `.gz`."""
    if not raw.data.startswith(GZIP_MAGIC):
        raise damaged(
            raw, "gzip", "no gzip data", "if it is unpacked already, rename it without .gz"
        )
    try:
        data = _unpacked(raw, max_bytes or max_unpacked(raw))
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(raw, "gzip", error, "fetch it again, or unpack it first") from error
    inner = raw.name[:-3] if raw.name.lower().endswith(".gz") else raw.name
    return replace(raw, name=inner, data=data, num_packed=len(raw.data))


def open_zip(
    raw: RawFile, kind: str, advice: str, *, max_bytes: int | None = None
) -> zipfile.ZipFile:
    """The archive inside a docx or epub. Sizes it declares are binding: `zipfile` reads no further."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(raw.data))
    except ZIP_ERRORS as error:
        raise damaged(raw, kind, error, advice) from error
    max_bytes = max_bytes or max_unpacked(raw)
    if sum(info.file_size for info in archive.infolist()) > max_bytes:
        raise _too_large(raw, max_bytes)
    return archive


def _unpacked(raw: RawFile, max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    num_bytes = 0
    with gzip.GzipFile(fileobj=io.BytesIO(raw.data)) as stream:
        while piece := stream.read(_STEP_BYTES):
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise _too_large(raw, max_bytes)
            pieces.append(piece)
    return b"".join(pieces)


def _too_large(raw: RawFile, max_bytes: int) -> DocumentError:
    return DocumentError(
        f"{raw.source} unpacks to more than {max_bytes:,} bytes; if it is meant to, unpack it "
        "yourself and give the parts you need"
    )


# --- one budget for every format ------------------------------------------------------------------

#                         a small file            a larger one
#     bytes, unpacked     64 MiB                  100 times its size, 2 GiB at most
#     memory              450 MB                  of plain markup 200 times its size
#     time                6 s                     and 30 s for each MB of it
#     depth               Python's stack, about 1,000 levels; HTML may be nested deeper
# What parsing costs is estimated before it begins, from the number of pieces and the memory that each takes.
# Time is that of the processor, so a busy machine refuses nothing. Beyond the budget a file is refused in one
# line.


MAX_UNPACKED_BYTES = 2 * 1024**3
MIN_UNPACKED_BYTES = 64 * 1024**2
MAX_GROWTH = 100
"""Text shrinks to about a fifth; a hundredth is a decompression bomb or a mistake."""
MEMORY = 450_000_000
PLAIN_GROWTH = 200
"""Memory for each byte of plain markup: a table of single digits takes about 110."""
SECONDS = 6.0
SECONDS_PER_MB = 30.0

_ADVICE = "save its text as a .txt file"


class Cost(IntEnum):
    """Bytes of memory that parsing takes for each piece."""

    HTML_TAG = 1125
    XML_PIECE = 600
    """A tag or an attribute."""
    PDF_BYTE = 50
    """A byte of the content of a page."""


def max_unpacked(raw: RawFile) -> int:
    """How many bytes a compressed file may unpack to."""
    most = MAX_UNPACKED_BYTES if raw.max_bytes is None else raw.max_bytes
    return min(most, max(MIN_UNPACKED_BYTES, MAX_GROWTH * raw.num_given))


def check_pieces(raw: RawFile, num: int, cost: Cost, what: str, *, is_plain: bool = False) -> None:
    """Refuse a file of which so many pieces would have to be parsed at once.

    `is_plain`: they are in the file as it was given, not compressed.
    """
    grows = is_plain and raw.max_bytes is None
    memory = max(MEMORY, PLAIN_GROWTH * raw.num_given) if grows else MEMORY
    most = memory // cost
    if num > most:
        raise DocumentError(
            f"{raw.source} holds more than {most:,} {what}, far more than can be read at once; {_ADVICE}"
        )


@contextmanager
def limited(raw: RawFile) -> Iterator[None]:
    """Reading a file within its time; whatever a library raises is a DocumentError of one line."""
    seconds = round(SECONDS + SECONDS_PER_MB * raw.num_given / 1e6, 1)
    try:
        with foreign_file(
            raw.source,
            "cannot be read",
            seconds=seconds,
            is_processor_time=True,
            advice=f"; {_ADVICE}",
            error=DocumentError,
            unless=lambda error: isinstance(error, MemoryError | RecursionError),
        ):
            yield
    except RecursionError:
        raise DocumentError(f"{raw.source} is nested too deeply; {_ADVICE}") from None

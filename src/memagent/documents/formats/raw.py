"""RawFile: a file's bytes before its format is known, and the errors all formats share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memagent.documents.document import Document
from memagent.documents.encoding import decode, normalize_newlines
from memagent.errors import DocumentError

MAX_UNPACKED_BYTES = 2 * 1024**3
"""Compressed files may not grow beyond this: more is a decompression bomb or a mistake."""
MIN_UNPACKED_BYTES = 64 * 1024**2
MAX_GROWTH = 100
"""Nor to more than so many times their size, if that is more than `MIN_UNPACKED_BYTES`. Text grows about fivefold."""


def unpacked_limit(num_packed: int) -> int:
    """How many bytes a compressed file of so many may unpack to."""
    return min(MAX_UNPACKED_BYTES, max(MIN_UNPACKED_BYTES, MAX_GROWTH * num_packed))


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


def tidy(text: str) -> str:
    r"""Text of a container, cleaned: `\n` newlines, no NUL, no half surrogate pairs."""
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return normalize_newlines(whole.replace("\0", ""))

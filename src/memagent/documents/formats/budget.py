"""One budget for every format: what a file may unpack to, how much of it is parsed at once, how long.

                        a small file            a larger one
    bytes, unpacked     64 MiB                  100 times its size, 2 GiB at most
    memory              450 MB                  of plain markup 200 times its size
    time                6 s                     and 30 s for each MB of it
    depth               Python's stack, about 1,000 levels; HTML may be nested deeper

What parsing costs is estimated before it begins, from the number of pieces and the memory that each takes.
Time is that of the processor, so a busy machine refuses nothing. Beyond the budget a file is refused in one
line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from memagent.documents.formats.raw import RawFile
from memagent.errors import DocumentError
from memagent.foreign import foreign_file

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
    """Of the content of a page."""


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

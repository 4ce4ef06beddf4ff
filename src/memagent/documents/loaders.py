"""Read files, folders and standard input into one Document.

    book.txt  page.html  report.pdf  essay.docx  novel.epub  notes.ipynb  chat.jsonl  log.txt.gz
        └── read by their format ──▶ one Document each ──▶ Document.join ──▶ what the agent reads
    src/ ── its files, see `tree`──▶        ▲
    -    ── standard input ─────────────────┘

Each file becomes a `Part` under the name the user wrote; files of a folder are named by the folder
and the path inside it (`src/a.py`). Of several files each is headed by its name. A single file gets
no heading, not even as the only file of a folder.

A file named by the user that cannot be read is an error. A file met in a folder that cannot be read
is skipped and reported by `load_with_report`.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

from memagent.documents.document import Document
from memagent.documents.encoding import HEAD_BYTES, check_encoding
from memagent.documents.formats import check_head, read
from memagent.documents.formats.raw import EmptyText, RawFile
from memagent.documents.tree import Skipped, find_files
from memagent.errors import DocumentError
from memagent.names import hint

STDIN = "-"
MAX_PIPE_BYTES = 256 * 1024**2
"""What is read from a pipe, which may never end. A file has a size and may be larger."""
_PIECE_BYTES = 1024 * 1024
MAX_NAMED_SKIPPED = 3
"""Skipped files that are named one by one where all were skipped for the same reason."""
MAX_SKIPPED_LINES = 20


class Loaded(NamedTuple):
    """A document, and the files and pages that are missing from it."""

    document: Document
    skipped: tuple[Skipped, ...]


def load(paths: Sequence[str | Path], *, encoding: str | None = None) -> Document:
    r"""Read files, folders and standard input (`-`) into one document.

    Newlines `\r\n` and `\r` become `\n`. `encoding` is for text formats; None: it is detected, file
    by file. Files that cannot be read are errors, except in folders: see `load_with_report`.
    """
    return load_with_report(paths, encoding=encoding).document


def lines_of_skipped(skipped: Sequence[Skipped]) -> list[str]:
    """A report for people: files that were skipped for the same reason share a line where they are many."""
    by_reason: dict[str, list[str]] = {}
    for each in skipped:
        by_reason.setdefault(each.reason, []).append(each.source)
    lines: list[str] = []
    for reason, sources in by_reason.items():
        if len(sources) <= MAX_NAMED_SKIPPED:
            lines += [f"skipped {source}: {reason}" for source in sources]
        else:
            such = ", ".join(sources[:MAX_NAMED_SKIPPED])
            lines.append(f"skipped {len(sources):,} files, such as {such}: each {reason}")
    more = len(lines) - MAX_SKIPPED_LINES
    return [*lines[:MAX_SKIPPED_LINES], *([f"... {more:,} more lines"] if more > 0 else [])]


def load_with_report(
    paths: Sequence[str | Path], *, encoding: str | None = None, stdin: BinaryIO | None = None
) -> Loaded:
    """As `load`, with a report of the files of folders and pages of files that were skipped.

    Empty files and what `tree` leaves out on purpose are not reported. `stdin` is what `-` stands
    for; None: the standard input of this process.
    """
    paths = [paths] if isinstance(paths, str) else list(paths)
    if not paths:
        raise DocumentError(
            "there is nothing to read; name a file, a folder, or - for standard input"
        )
    if encoding is not None:
        check_encoding(encoding)
    if [str(path) for path in paths].count(STDIN) > 1:
        raise DocumentError("standard input (-) can be read only once; name it once")
    documents: list[Document] = []
    skipped: list[Skipped] = []
    for path in paths:
        if str(path) == STDIN:
            documents.append(load_stdin(stdin or _stdin(), encoding=encoding))
        elif _is_folder(path):
            documents += _load_folder(Path(path), encoding, skipped)
        else:
            documents.append(_load_file(path, _shown(path), encoding))
    skipped += [report for document in documents for report in _blank_pages(document)]
    return Loaded(Document.join(documents), tuple(skipped))


def _blank_pages(document: Document) -> Iterator[Skipped]:
    """Reports of pages without text, which are usually scans."""
    for part in document.parts:
        ends = [*part.page_starts[1:], part.end]
        pages = enumerate(zip(part.page_starts, ends, strict=False), start=1)
        blank = [
            str(number) for number, (low, high) in pages if not document.text[low:high].strip()
        ]
        if blank:
            shown = ", ".join(blank[:10]) + (", ..." if len(blank) > 10 else "")
            total = len(part.page_starts)
            reason = f"{len(blank)} of {total} pages hold no text (scans need OCR): {shown}"
            yield Skipped(part.source, reason)


def load_stdin(stream: BinaryIO, *, encoding: str | None = None) -> Document:
    """A document from a binary stream such as `sys.stdin.buffer`; its format is detected."""
    try:
        if stream.isatty():
            raise DocumentError(
                "standard input is a terminal; pipe a text into it (cat book.txt | ...) or name a file"
            )
        data = read_pipe(stream, "standard input")
    except (OSError, ValueError) as error:  # a folder, or closed
        raise _unreadable("standard input", error) from error
    if not data:
        raise EmptyText("standard input is empty; pipe a text into it or name a file")
    return load_bytes(data, "stdin", encoding=encoding)


def load_bytes(
    data: bytes, source: str, *, encoding: str | None = None, max_bytes: int | None = None
) -> Document:
    """A document from bytes. The ending of `source` decides the format (`book.txt.gz`).

    `max_bytes` is what a file of a stranger may unpack to.
    """
    raw = RawFile(source=source, name=source, data=data, encoding=encoding, max_bytes=max_bytes)
    try:
        return read(raw)
    except MemoryError as error:
        raise _too_large(source) from error


def _load_folder(folder: Path, encoding: str | None, skipped: list[Skipped]) -> list[Document]:
    """The documents of a folder; files that cannot be read are added to `skipped`."""
    try:
        found = find_files(folder)
    except OSError as error:
        raise _unreadable(_shown(folder), error) from error
    documents, num_before = list[Document](), len(skipped)
    for paths, reason in (
        (found.unreadable, "cannot be listed; make the folder readable"),
        (found.outside, "is a link that leads out of the folder; name the file itself"),
    ):
        skipped += [Skipped(_shown(folder / relative), reason) for relative in paths]
    for relative in found.files:
        path = folder / relative
        source = _shown(path)
        try:
            documents.append(_load_file(path, source, encoding))
        except EmptyText:
            continue
        except DocumentError as error:
            skipped.append(Skipped(source, str(error).removeprefix(f"{source} ")))
    if not documents:
        met = "none"
        if own := skipped[num_before:]:
            met = f"{len(own)} skipped, the first: {own[0].source} {own[0].reason}"
        raise DocumentError(
            f"{_shown(folder)} has no readable text files ({met}); name another folder"
        )
    return documents


def _load_file(path: str | Path, source: str, encoding: str | None) -> Document:
    try:
        data = _bytes_of(path, source, encoding)
    except FileNotFoundError as error:
        raise _not_found(path, source) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise _unreadable(source, error) from error
    except MemoryError as error:
        raise _too_large(source) from error
    return load_bytes(data, source, encoding=encoding)


def _bytes_of(path: str | Path, source: str, encoding: str | None) -> bytes:
    """The bytes of a file, unless its first ones show that the others are of no use."""
    with open(path, "rb", buffering=0) as file:  # a buffer would hold the file twice
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_ISREG(mode):
            head = file.read(HEAD_BYTES)
            check_head(RawFile(source=source, name=source, data=head, encoding=encoding))
            file.seek(0)
            return file.readall()
        if not stat.S_ISFIFO(mode):  # pipes may be read, but not /dev/zero and its like
            raise DocumentError(f"{source} is a device, not a file; name a file")
        return read_pipe(file, source)


def read_pipe(stream: BinaryIO | FileIO, source: str) -> bytes:
    """All that comes through a pipe, if that is not too much."""
    pieces: list[bytes] = []
    num_bytes = 0
    while piece := stream.read(_PIECE_BYTES):
        num_bytes += len(piece)
        if num_bytes > MAX_PIPE_BYTES:
            raise DocumentError(
                f"{source} gives more than {MAX_PIPE_BYTES:,} bytes; save what you need as a file and name it"
            )
        pieces.append(piece)
    return b"".join(pieces)


def _stdin() -> BinaryIO:
    stream: BinaryIO | None = getattr(sys.stdin, "buffer", None)
    if stream is None:
        raise DocumentError("standard input is closed; pipe a text into it or name a file")
    return stream


def _is_folder(path: str | Path) -> bool:
    """Whether a path is a folder. If that cannot be found out, opening it says why."""
    if str(path) == "":
        raise DocumentError(
            "one of the paths is empty; name a file, a folder, or - for standard input"
        )
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _shown(path: str | Path) -> str:
    """A path as the user wrote it, fit for one line: bytes that are no text and newlines escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(path))


def _not_found(path: str | Path, source: str) -> DocumentError:
    if "://" in str(path):
        return DocumentError(f"{source} is a web address; download it and name the file")
    if os.path.islink(path):
        return DocumentError(f"{source} is a link to a file that does not exist; correct the link")
    folder = Path(path).parent
    if not os.path.isdir(folder):
        return DocumentError(f"{source} does not exist: there is no folder {_shown(folder)}")
    names: list[str] = []
    with suppress(OSError):  # the folder may be one that may be entered but not listed
        names = [_shown(name) for name in sorted(os.listdir(folder))]
    remedy = hint(Path(path).name, names, max_num=3, otherwise="check the name")
    return DocumentError(f"{source} does not exist in {_shown(folder.resolve())}; {remedy}")


def _unreadable(source: str, error: OSError | ValueError) -> DocumentError:
    if isinstance(error, PermissionError):
        return DocumentError(
            f"{source} cannot be read: permission denied; make it readable (chmod +r)"
        )
    words = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return DocumentError(f"{source} cannot be read: {words}; name another file")


def _too_large(source: str) -> DocumentError:
    return DocumentError(f"{source} does not fit into the memory of this machine; split it")

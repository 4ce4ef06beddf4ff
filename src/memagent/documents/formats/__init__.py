"""From bytes to a Document: choose the format and read it.

To add a format, write a reader `RawFile -> Document` in a new file and name its endings in
`FORMATS`. A file of no known format is plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import PurePath

from memagent.documents.document import Document, Heading
from memagent.documents.encoding import HEAD_BYTES, binary_error, bom_encoding, looks_binary
from memagent.documents.formats.chat import read_chat
from memagent.documents.formats.epub import read_epub
from memagent.documents.formats.html import read_html, read_word
from memagent.documents.formats.notebook import read_notebook
from memagent.documents.formats.pdf import read_pdf
from memagent.documents.formats.raw import (
    EmptyText,
    FormatReader,
    RawFile,
    is_gzip,
    limited,
    title_of,
    unpack_gzip,
)
from memagent.errors import DocumentError


def read_text(raw: RawFile) -> Document:
    """Plain text, and everything that may be read as such."""
    return Document.from_text(raw.text(), raw.source, has_lines=True)


_line = re.compile(
    r"^ {0,3}(?:(?P<fence>`{3,}|~{3,})|(?P<marks>#{1,6})[ \t]|(?P<under>=+|-{3,})[ \t]*$)",
    re.MULTILINE,
)
_NO_TITLE = ("#", ">", "-", "*", "+", "|", "`", "~", "=")
"""How a line begins that `---` below does not make a heading."""


def read_markdown(raw: RawFile) -> Document:
    """The file's text, with its headings."""
    text = raw.text()
    return Document.from_text(
        text, raw.source, headings=list(markdown_headings(text)), has_lines=True
    )


def markdown_headings(text: str) -> Iterator[Heading]:
    """Headings marked by `#` or underlined, except in blocks of code."""
    fence = ""
    for found in _line.finditer(text):
        if found["fence"]:
            rest = text[found.end() : _line_end(text, found.end())]
            fence = _fence_after(found["fence"], rest, fence)
        elif fence:
            continue
        elif found["marks"]:
            if title := title_of(text[found.start("marks") : _line_end(text, found.end())]):
                yield Heading(found.start(), title)
        else:
            yield from _underlined(text, found.start())


def _fence_after(mark: str, rest: str, fence: str) -> str:
    """The fence of the block of code that is open after a line of backticks or tildes; "" for none."""
    if not fence:
        return "" if mark[0] == "`" and "`" in rest else mark
    return "" if mark.startswith(fence) and not rest.strip() else fence


def _underlined(text: str, underline: int) -> Iterator[Heading]:
    """The line above an underline, if it is a paragraph of one line."""
    start = text.rfind("\n", 0, max(underline - 1, 0)) + 1
    line = text[start:underline].strip()
    before = text[text.rfind("\n", 0, max(start - 1, 0)) + 1 : start]
    if line and not before.strip() and not line.startswith(_NO_TITLE):
        yield Heading(start, title_of(line))


def _line_end(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


FORMATS: dict[str, FormatReader] = {
    ".docx": read_word,
    ".epub": read_epub,
    ".htm": read_html,
    ".html": read_html,
    ".ipynb": read_notebook,
    ".jsonl": read_chat,
    ".markdown": read_markdown,
    ".md": read_markdown,
    ".ndjson": read_chat,
    ".pdf": read_pdf,
    ".xhtml": read_html,
}

PLAIN = (read_text, read_markdown)
"""Readers of files that are text as they are."""

MAGIC: dict[bytes, FormatReader] = {b"%PDF-": read_pdf}
"""First bytes that decide the format whatever the name is."""

OPENINGS: dict[re.Pattern[bytes], FormatReader] = {
    re.compile(rb"\s*(?:<\?xml[^>]*>\s*)?<(?:!doctype\s+html|html)\b", re.I): read_html,
    re.compile(rb'\s*\{\s*"cells"\s*:'): read_notebook,
    re.compile(rb"\s*\{"): read_chat,
}
"""How text formats begin; used only where there is no ending, as for standard input."""

REFUSED: dict[bytes, str] = {
    b"\xd0\xcf\x11\xe0": "an old or password-protected Office file; save it as .docx without password",
    b"{\\rtf": "rich text; save it as .docx",
}
"""First bytes of formats that would be misread, and what to do with them."""

_UNPACK = "unpack it and give the folder"
_OCR = "if it shows text, make a pdf of it with OCR (ocrmypdf)"
ADVICE: dict[str, str] = {
    ".7z": _UNPACK,
    ".azw3": "convert it to .epub (for example with Calibre)",
    ".djvu": "convert it to .pdf",
    ".gif": _OCR,
    ".jpeg": _OCR,
    ".jpg": _OCR,
    ".mobi": "convert it to .epub (for example with Calibre)",
    ".odt": "save it as .docx",
    ".parquet": "export it as .jsonl or .csv",
    ".png": _OCR,
    ".pptx": "export it as .pdf",
    ".rar": _UNPACK,
    ".tar": _UNPACK,
    ".tgz": _UNPACK,
    ".tif": _OCR,
    ".tiff": _OCR,
    ".xlsx": "export it as .csv",
    ".zip": _UNPACK,
}
"""What to do with files that are binary and of no format above."""


def read(raw: RawFile) -> Document:
    """A document from the bytes of one file, which must hold some text."""
    if not raw.data:
        raise EmptyText(f"{raw.source} is empty; give a file with text in it")
    if is_gzip(raw.name, raw.data):
        raw = unpack_gzip(raw)
        if is_gzip(raw.name, raw.data):
            raise DocumentError(f"{raw.source} is gzip inside gzip; unpack it first")
    check_head(raw)
    reader = reader_for(raw.name, raw.data[:HEAD_BYTES])
    with nullcontext() if reader is read_text else limited(raw):
        document = reader(raw)
    if not document.text or document.text.isspace():
        raise EmptyText(f"{raw.source} holds no text but blanks; give a file with text in it")
    return document


def check_head(raw: RawFile) -> None:
    """Refuse by its first bytes what cannot be read. They are enough, so a caller may have no more."""
    head = raw.data[:HEAD_BYTES]
    for magic, advice in REFUSED.items():
        if head.startswith(magic):
            raise DocumentError(f"{raw.source} is {advice}")
    if is_gzip(raw.name, head) or reader_for(raw.name, head) not in PLAIN:
        return
    is_announced = raw.encoding is not None or bom_encoding(head) is not None  # utf-16 has NULs
    if looks_binary(head) and not is_announced:
        raise binary_error(raw.source, ADVICE.get(_ending(raw.name)))


def reader_for(name: str, head: bytes) -> FormatReader:
    """The reader of a file by its first bytes, its name, or how its text begins."""
    for magic, reader in MAGIC.items():
        if head.startswith(magic):
            return reader
    ending = _ending(name)
    if ending:
        return FORMATS.get(ending, read_text)
    if head.startswith(b"PK\x03\x04"):
        return _read_unnamed_zip
    return next((reader for opening, reader in OPENINGS.items() if opening.match(head)), read_text)


def _read_unnamed_zip(raw: RawFile) -> Document:
    """An archive from standard input: docx and epub say what they are by the files inside."""
    return read_epub(raw) if b"application/epub+zip" in raw.data[:HEAD_BYTES] else read_word(raw)


def _ending(name: str) -> str:
    return PurePath(name).suffix.lower()

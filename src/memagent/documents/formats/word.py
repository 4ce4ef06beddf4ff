"""Word documents (docx) through python-docx: paragraphs and tables in the order of the document.

The XML is walked rather than python-docx's paragraphs, which leave out text in content controls,
tracked insertions and text boxes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from memagent.documents.document import Document
from memagent.documents.formats.budget import Cost, check_pieces
from memagent.documents.formats.packed import open_zip
from memagent.documents.formats.raw import (
    HEADING_MARK,
    RawFile,
    damaged,
    missing_library,
    tidy_marked,
)
from memagent.errors import DocumentError

if TYPE_CHECKING:
    from docx.document import Document as WordDocument

_ADVICE = "open it in a word processor and save it again as .docx"
_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_MATH_TEXT = "{http://schemas.openxmlformats.org/officeDocument/2006/math}t"
PARAGRAPH, TABLE, ROW, CELL = f"{_W}p", f"{_W}tbl", f"{_W}tr", f"{_W}tc"
DROPPED = frozenset(
    {
        *(f"{_W}pPr", f"{_W}rPr", f"{_W}sdtPr", f"{_W}sectPr"),  # settings
        *(f"{_W}del", f"{_W}moveFrom"),  # text that was taken out
        "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback",  # a repetition
    }
)
CHARACTERS = {f"{_W}tab": "\t", f"{_W}br": "\n", f"{_W}cr": "\n", f"{_W}noBreakHyphen": "-"}
_HEAD_BYTES = 64
_BLANK = b"\xef\xbb\xbf\xff\xfe\0 \t\r\n"
_ENTITIES = tuple("<!ENTITY".encode(name) for name in ("utf-8", "utf-16-le", "utf-16-be"))
_HEADING = re.compile(r"heading ([1-9])", re.IGNORECASE)


def read_word(raw: RawFile) -> Document:
    """Paragraphs apart by a blank line, headings marked by `#`, table rows as `cell | cell`."""
    try:
        import docx
    except ImportError as error:
        raise missing_library("python-docx", raw.source) from error
    try:
        _check_markup(raw)
        document = docx.Document(io.BytesIO(raw.data))
        blocks = list(_blocks(document.element.body, _heading_marks(document)))
    except (DocumentError, RecursionError):
        raise
    except Exception as error:  # on damaged files the XML may be anything, and so is what it raises
        raise damaged(raw, "docx", error, _ADVICE) from error
    text, headings = tidy_marked("\n\n".join(blocks))
    return Document.from_text(text, raw.source, headings=headings)


def _check_markup(raw: RawFile) -> None:
    """Refuse what would take gigabytes as a tree, and entities, whose text would be lost."""
    num_pieces = 0
    with open_zip(raw, "docx", _ADVICE) as archive:
        for info in archive.infolist():
            with archive.open(info) as file:
                is_xml = file.read(_HEAD_BYTES).lstrip(_BLANK).startswith(b"<")
            if not is_xml or info.filename.endswith(".svg"):
                continue
            data = archive.read(info)
            num_pieces += data.count(b"<") + data.count(b"=")
            check_pieces(raw, num_pieces, Cost.XML_PIECE, "pieces of markup")
            if any(mark in data for mark in _ENTITIES):
                raise damaged(raw, "docx", f"{info.filename} declares entities", _ADVICE)


def _heading_marks(document: WordDocument) -> dict[str, str]:
    """`#` marks by style id. Word keeps English names for its own styles in every language."""
    marks: dict[str, str] = {}
    for style in document.styles:
        name = style.name or ""
        if found := _HEADING.fullmatch(name):
            marks[style.style_id] = HEADING_MARK + "#" * int(found[1]) + " "
        elif name == "Title":
            marks[style.style_id] = HEADING_MARK + "# "
    return marks


def _blocks(parent: Any, marks: Mapping[str, str]) -> Iterator[str]:
    for element in parent.iterchildren():
        if element.tag == PARAGRAPH:
            if text := _inline(element).strip():
                yield _marked(element, text, marks)
        elif element.tag == TABLE:
            if rows := "\n".join(filter(None, map(_row, element.iter(ROW)))):
                yield rows
        elif element.tag not in DROPPED:  # content controls and other wrappers
            yield from _blocks(element, marks)


def _marked(paragraph: Any, text: str, marks: Mapping[str, str]) -> str:
    style = paragraph.find(f"{_W}pPr/{_W}pStyle")
    mark = marks.get(style.get(f"{_W}val")) if style is not None else None
    return text if mark is None else mark + " ".join(text.split())


def _row(row: Any) -> str:
    """Cells side by side. A table inside a cell becomes rows of its own after this one."""
    cells = [" ".join(_inline(cell).split()) for cell in row.iter(CELL) if _row_of(cell) is row]
    return " | ".join(cells) if any(cells) else ""


def _row_of(cell: Any) -> Any:
    return next(cell.iterancestors(ROW), None)


def _inline(element: Any) -> str:
    if element.tag in CHARACTERS:
        return CHARACTERS[element.tag]
    if element.tag in (f"{_W}t", _MATH_TEXT):
        return element.text or ""
    if element.tag in DROPPED or element.tag == TABLE:
        return ""
    text = "".join(map(_inline, element.iterchildren()))
    return text + "\n" if element.tag == PARAGRAPH else text

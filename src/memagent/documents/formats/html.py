"""HTML as a person reads it: text in blocks, without scripts, styles and navigation.

<h1>Whales</h1><nav>…</nav>            # Whales
<p>A <a href="…">whale</a>
   is big.</p>                    ─▶   A whale is big.
<table><tr><td>Name<td>Blue            Name | Blue
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memagent.documents.document import Document
from memagent.documents.formats.raw import (
    HEADING_MARK,
    Cost,
    MarkedText,
    RawFile,
    check_pieces,
    missing_library,
    tidy_marked,
)

if TYPE_CHECKING:
    from bs4 import BeautifulSoup, Tag
import io
import zipfile

from memagent.documents.formats.raw import damaged, open_zip
from memagent.errors import DocumentError


def tags(names: str) -> frozenset[str]:
    """Names of tags, from one string."""
    return frozenset(names.split())


DROPPED = tags(
    "script style template noscript head nav svg canvas iframe object embed audio video button select"
    " textarea datalist dialog rt rp annotation"
)
"""Not text, not meant to be read, or repeated elsewhere (`rt`, `annotation`)."""
HEADINGS = {f"h{level}": HEADING_MARK + "#" * level + " " for level in range(1, 7)}
PARAGRAPHS = HEADINGS.keys() | tags(
    "p ul ol dl table blockquote pre section article main aside header footer figure form fieldset"
    " address details hr"
)
"""Set apart by a blank line."""
LINES = tags("div br li dt dd tr caption figcaption legend summary center td th")
"""Begin a new line."""
CELLS = frozenset({"td", "th"})
LISTS = frozenset({"ul", "ol"})
MAX_NESTED_CELLS = 32
"""Cells nested deeper than this are read as lines: the text of a cell is handled once for each cell around it."""
MAX_CELL_CHARS = 200
"""A longer cell with paragraphs in it arranges a page and is no piece of data."""

_CHARSET = re.compile(
    rb"""<(?:meta\b[^>]*?charset|\?xml\b[^>]*?encoding)\s*=\s*["']?([\w.:-]+)""", re.I
)
_CHARSET_BYTES = 4096


def read_html(raw: RawFile) -> Document:
    """A web page. Its title is kept where no first heading says it."""
    markup = raw.text(declared=declared_charset(raw.data))
    num_tags = markup.count("<") - markup.count("</")
    check_pieces(raw, num_tags, Cost.HTML_TAG, "tags", is_plain=not raw.is_packed)
    page = html_text(markup, raw.source, with_title=True)
    return Document.from_text(page.text, raw.source, headings=page.headings)


def declared_charset(data: bytes) -> str | None:
    """The encoding a page names in its first lines; None if it names none."""
    found = _CHARSET.search(data, 0, _CHARSET_BYTES)
    return found[1].decode("ascii") if found else None


def html_text(markup: str, source: str, *, with_title: bool = False) -> MarkedText:
    """The readable text of a page, and its headings. `source` names it in errors."""
    soup = _parse(markup, source)
    layout = _Layout()
    if with_title and soup.title is not None and soup.h1 is None:
        layout.heading(HEADINGS["h1"], soup.title.get_text().replace(HEADING_MARK, ""))
    for node, is_end in _walk(soup):
        if isinstance(node, str):
            layout.text(node.replace(HEADING_MARK, ""))
        elif is_end:
            layout.close(node)
        else:
            layout.open(node)
    return tidy_marked(layout.finish())


def _parse(markup: str, source: str) -> BeautifulSoup:
    try:
        from bs4 import BeautifulSoup, FeatureNotFound
    except ImportError as error:
        raise missing_library("beautifulsoup4", source) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on XHTML, and on text that resembles a file name
            return BeautifulSoup(markup, "lxml")
    except FeatureNotFound as error:
        raise missing_library("lxml", source) from error


def _walk(root: Tag) -> Iterator[tuple[Tag | str, bool]]:
    """Texts and tags in order, a tag at its start (False) and its end (True).

    Without recursion: pages nest deeper than Python's stack allows.
    """
    from bs4.element import CData, NavigableString, Tag

    stack: list[tuple[Tag, Iterator[object]]] = [(root, iter(root.contents))]
    while stack:
        tag, children = stack[-1]
        child = next(children, None)
        if child is None:
            stack.pop()
            yield tag, True
        elif isinstance(child, Tag):
            if not (
                child.name in DROPPED
                or child.has_attr("hidden")
                or child.get("role") == "navigation"
            ):
                yield child, False
                stack.append((child, iter(child.contents)))
        elif type(child) is NavigableString or type(child) is CData:  # not comments and the like
            yield str(child), False


@dataclass(slots=True)
class _Row:
    cells: list[str] = field(default_factory=list)
    has_code: bool = False
    """Whether there is a `pre` in it, at any depth."""

    @property
    def is_arrangement(self) -> bool:
        """Whether it sets blocks of a page side by side, where a row of data has values."""
        return (
            self.has_code
            or len(self.cells) == 1
            or any("\n\n" in cell and len(cell) > MAX_CELL_CHARS for cell in self.cells)
        )


class _Layout:
    """Turns tags into text. Cells are laid out on their own and joined at the end of their row."""

    def __init__(self) -> None:
        self._flows = [_Flow()]
        self._rows: list[_Row] = []
        self._items: list[int] = []
        """The items of each open list so far."""
        self._num_pre = 0
        self._num_deep_cells = 0

    def heading(self, mark: str, text: str) -> None:
        self._flow.mark = mark
        self._flow.add(text)
        self._flow.break_line(2)

    def text(self, text: str) -> None:
        if self._num_pre:
            self._flow.add_exactly(text)
        else:
            self._flow.add(text)

    def open(self, tag: Tag) -> None:
        if _is_cell(tag):
            if len(self._flows) <= MAX_NESTED_CELLS:
                self._flows.append(_Flow())
                return
            self._num_deep_cells += 1
        self._break(tag)
        if tag.name == "tr":
            self._rows.append(_Row())
        elif tag.name == "pre":
            self._num_pre += 1
            if self._rows:
                self._rows[-1].has_code = True
        elif tag.name in LISTS:
            self._items.append(0)
        elif tag.name == "li":
            self._flow.mark = self._item_mark(tag)
        elif tag.name in HEADINGS:
            self._flow.mark = HEADINGS[tag.name]

    def close(self, tag: Tag) -> None:
        if _is_cell(tag):
            if self._num_deep_cells == 0:
                self._rows[-1].cells.append(self._flows.pop().finish())
                return
            self._num_deep_cells -= 1
        if tag.name == "tr":
            row = self._rows.pop()
            if self._rows:
                self._rows[-1].has_code |= row.has_code
            if row.is_arrangement:  # blocks; a row of data is on one line
                for cell in row.cells:
                    self._flow.break_line(1)
                    self._flow.add_exactly(cell)
            elif any(row.cells):
                self._flow.add_exactly(" | ".join(" ".join(cell.split()) for cell in row.cells))
        elif tag.name in LISTS:
            self._items.pop()
        elif tag.name == "pre":
            self._num_pre -= 1
            self._flow.trim()
        elif tag.name == "li" or tag.name in HEADINGS:
            self._flow.mark = None  # there was no text before it
        self._break(tag)

    def finish(self) -> str:
        return self._flow.finish()

    @property
    def _flow(self) -> _Flow:
        return self._flows[-1]

    def _break(self, tag: Tag) -> None:
        if tag.name in PARAGRAPHS:
            self._flow.break_line(2)
        elif tag.name in LINES:
            self._flow.break_line(1)

    def _item_mark(self, item: Tag) -> str:
        """`- `, or the number of an item in a numbered list."""
        if item.parent is None or item.parent.name != "ol":
            return "- "
        self._items[-1] += 1
        return f"{self._items[-1]}. "


def _is_cell(tag: Tag) -> bool:
    return tag.name in CELLS and tag.parent is not None and tag.parent.name == "tr"


class _Flow:
    """Text being set: runs of space become one, and of several breaks in a row the largest counts."""

    def __init__(self) -> None:
        self.mark: str | None = None
        """Goes before the next text, such as `- ` of a list item; None: nothing does."""
        self._pieces: list[str] = []
        self._num_breaks = 0
        self._has_space = False

    def break_line(self, num_breaks: int) -> None:
        self._num_breaks = max(self._num_breaks, num_breaks)

    def add(self, text: str) -> None:
        words = " ".join(text.replace("\u00ad", "").split())
        if not words:
            self._has_space = self._has_space or bool(text)
            return
        self._has_space = self._has_space or text[0].isspace()
        self._put(words)
        self._has_space = text[-1].isspace()

    def add_exactly(self, text: str) -> None:
        if text:
            self._put(text)

    def trim(self) -> None:
        """Drop the newline at the end, which code in `pre` mostly has."""
        if self._pieces:
            self._pieces[-1] = self._pieces[-1].rstrip("\n")

    def finish(self) -> str:
        return "".join(self._pieces).strip("\n")

    def _put(self, text: str) -> None:
        if self._pieces and self._num_breaks:
            self._pieces.append("\n" * self._num_breaks)
        elif self._pieces and self._has_space and self.mark is None:
            self._pieces.append(" ")
        if self.mark is not None:
            self._pieces.append(self.mark)
        self._pieces.append(text)
        self.mark, self._num_breaks, self._has_space = None, 0, False


# --- Word documents -------------------------------------------------------------------------------

# Lists, footnotes, tables, content controls, text boxes and tracked insertions come with it. Formulas, which
# mammoth leaves out, are made runs of text before.


STYLES = """
p[style-name='Title'] => h1:fresh
p[style-name='heading 7'] => h6:fresh
p[style-name='heading 8'] => h6:fresh
p[style-name='heading 9'] => h6:fresh
"""
"""Besides those that mammoth knows. Word keeps English names for its own styles in every language."""
_ADVICE = "open it in a word processor and save it again as .docx"
_HEAD_BYTES = 64
_BLANK = b"\xef\xbb\xbf\xff\xfe\0 \t\r\n"
_ENTITIES = tuple("<!ENTITY".encode(name) for name in ("utf-8", "utf-16-le", "utf-16-be"))
_MATH_TEXT = re.compile(rb"<(/?)m:([rt])\b")
_MATH = re.compile(rb"</?m:[^>]*>")
_BACK_LINK = re.compile(r"<p> ?<a href=\"#[^\"]*\">\u2191</a></p>| ?<a href=\"#[^\"]*\">\u2191</a>")
"""From a footnote to its place."""


def read_word(raw: RawFile) -> Document:
    """Paragraphs apart by a blank line, headings marked by `#`, table rows as `cell | cell`."""
    try:
        import mammoth
    except ImportError as error:
        raise missing_library("mammoth", raw.source) from error
    try:
        converted = mammoth.convert_to_html(
            _checked(raw),
            style_map=STYLES,
            include_embedded_style_map=False,
            convert_image=lambda image: [],
        )
        page = html_text(_BACK_LINK.sub("", converted.value), raw.source)
    except (DocumentError, RecursionError):
        raise
    except Exception as error:  # on damaged files the XML may be anything, and so is what it raises
        raise damaged(raw, "docx", error, _ADVICE) from error
    return Document.from_text(page.text, raw.source, headings=page.headings)


def _checked(raw: RawFile) -> io.BytesIO:
    """The markup of the archive; refuses what would take gigabytes as a tree, and entities."""
    num_pieces = 0
    checked = io.BytesIO()
    with open_zip(raw, "docx", _ADVICE) as archive, zipfile.ZipFile(checked, "w") as kept:
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
            kept.writestr(info.filename, _MATH.sub(b"", _MATH_TEXT.sub(rb"<\1w:\2", data)))
    checked.seek(0)
    return checked

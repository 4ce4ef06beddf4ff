"""Markdown is read as it is; its headings are found, so that sections can be named by them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from memagent.documents.document import Document, Heading
from memagent.documents.formats.raw import RawFile, title_of

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

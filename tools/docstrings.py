"""For the API reference: keep the pictures and examples in docstrings as they are written.

Docstrings are read as Markdown, which would join the lines of a picture to one paragraph. A paragraph
is taken for a picture or for code if its lines are aligned in columns, if it draws with lines, or if it
starts as a program does, and is then indented to a code block.
"""

from __future__ import annotations

import re
from textwrap import indent
from typing import Any

from griffe import Extension, Object

_aligned = re.compile(r"\S {2,}\S")
_drawn = re.compile(r"[─│▶▼└├┌┐┘→]|-->|->$")
_code = re.compile(
    r"(from \w[\w.]* import |import \w|python |python3 |memagent |\$ |>>> |@|async def |def |\w+ = |print\()"
)
_list_or_table = re.compile(r"([-*|]|\d+\.) ?")


def displayed(docstring: str) -> str:
    """The docstring, with its pictures and its code as code blocks."""
    return "\n\n".join(
        indent(text, "    ") if is_picture(text) else text for text in docstring.split("\n\n")
    )


def is_picture(paragraph: str) -> bool:
    """Whether a paragraph is a picture or code that is not indented yet."""
    lines = paragraph.splitlines()
    if not lines or lines[0].startswith("    ") or _list_or_table.match(lines[0]):
        return False
    if _code.match(lines[0]):
        return True
    return any(_aligned.search(line) or _drawn.search(line) for line in lines)


class Pictures(Extension):
    """Applies `displayed` to every docstring."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = displayed(obj.docstring.value)

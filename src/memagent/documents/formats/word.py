"""Word documents (docx): mammoth turns them into HTML, which is read as a page is.

Lists, footnotes, tables, content controls, text boxes and tracked insertions come with it. Formulas, which
mammoth leaves out, are made runs of text before.
"""

from __future__ import annotations

import io
import re
import zipfile

from memagent.documents.document import Document
from memagent.documents.formats.budget import Cost, check_pieces
from memagent.documents.formats.html import html_text
from memagent.documents.formats.packed import open_zip
from memagent.documents.formats.raw import RawFile, damaged, missing_library
from memagent.errors import DocumentError

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

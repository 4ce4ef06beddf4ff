"""EPUB books: a zip archive whose package file lists the chapters, which are XHTML pages.

META-INF/container.xml ─▶ content.opf: manifest (id -> file), spine (ids in reading order)
"""

from __future__ import annotations

import posixpath
import re
import zipfile
from collections.abc import Iterator
from urllib.parse import unquote
from xml.etree import ElementTree

from memagent.documents.document import Document
from memagent.documents.encoding import decode
from memagent.documents.formats.html import declared_charset, html_text
from memagent.documents.formats.packed import ZIP_ERRORS, open_zip, too_much_markup
from memagent.documents.formats.raw import RawFile, damaged
from memagent.errors import DocumentError

CONTAINER = "META-INF/container.xml"
ENCRYPTION = "META-INF/encryption.xml"
PAGE_TYPES = frozenset({"application/xhtml+xml", "text/html", "application/x-dtbook+xml"})
MIN_TAGS = 100_000
"""Tags that any book may hold; a larger file may hold one for each of its bytes, several times the usual."""

_ADVICE = "fetch it again, or convert it to a new .epub (for example with Calibre)"
_XML_DECLARATION = re.compile(r"^\s*<\?xml[^>]*\?>")
_EMPTY_TAG = re.compile(r"<([A-Za-z][\w:.-]*)((?:\s[^<>]*)?)/>")
_VOID_TAGS = frozenset(
    [
        "area",
        "base",
        "br",
        "col",
        "embed",
        "hr",
        "img",
        "input",
        "link",
        "meta",
        "param",
        "source",
        "track",
        "wbr",
    ]
)


def read_epub(raw: RawFile) -> Document:
    """The chapters in reading order, a blank line between them."""
    with open_zip(raw, "epub", _ADVICE) as archive:
        try:
            chapters = [html_text(page, raw.source) for page in _pages(archive, raw)]
        except (*ZIP_ERRORS, ElementTree.ParseError) as error:
            raise damaged(raw, "epub", error, _ADVICE) from error
    return Document.from_text("\n\n".join(filter(None, chapters)), raw.source)


def _pages(archive: zipfile.ZipFile, raw: RawFile) -> Iterator[str]:
    package_path = _package_path(archive, raw)
    paths = _spine(_xml(archive, package_path, raw), posixpath.dirname(package_path))
    if _encrypted(archive, raw).intersection(paths):
        raise DocumentError(f"{raw.source} is protected by DRM; get an unprotected copy")
    max_tags, num_tags = max(MIN_TAGS, len(raw.data)), 0
    for path in dict.fromkeys(paths):  # a page is read once, however often it is named
        data = archive.read(path)
        num_tags += data.count(b"<")
        if num_tags > max_tags:
            raise too_much_markup(raw, max_tags)
        page = (
            decode(data, f"{raw.source} ({path})", declared=declared_charset(data)) if data else ""
        )
        yield _EMPTY_TAG.sub(_with_end_tag, page)


def _package_path(archive: zipfile.ZipFile, raw: RawFile) -> str:
    rootfile = _xml(archive, CONTAINER, raw).find(".//{*}rootfile")
    path = rootfile.get("full-path") if rootfile is not None else None
    if path is None:
        raise damaged(raw, "epub", f"{CONTAINER} names no package", _ADVICE)
    return path


def _spine(package: ElementTree.Element, folder: str) -> list[str]:
    """Paths of the pages in reading order. Pictures and styles in the manifest are not pages."""
    pages = {
        item.get("id"): posixpath.normpath(posixpath.join(folder, unquote(item.get("href", ""))))
        for item in package.iterfind(".//{*}manifest/{*}item")
        if item.get("media-type") in PAGE_TYPES
    }
    ids = [reference.get("idref") for reference in package.iterfind(".//{*}spine/{*}itemref")]
    return [pages[name] for name in ids if name in pages]


def _encrypted(archive: zipfile.ZipFile, raw: RawFile) -> set[str]:
    """Files that cannot be read without a key. Often only fonts, which do not matter here."""
    if ENCRYPTION not in archive.namelist():
        return set()
    references = _xml(archive, ENCRYPTION, raw).iterfind(".//{*}CipherReference")
    return {unquote(reference.get("URI", "")) for reference in references}


def _xml(archive: zipfile.ZipFile, path: str, raw: RawFile) -> ElementTree.Element:
    """An XML file of the archive; entities, which could expand without end, are refused."""
    text = decode(archive.read(path), f"{raw.source} ({path})")
    if "<!ENTITY" in text:
        raise damaged(raw, "epub", f"{path} declares entities", _ADVICE)
    # ElementTree gets text, so that the encoding it was checked in is the one it is parsed in.
    return ElementTree.fromstring(_XML_DECLARATION.sub("", text, count=1))


def _with_end_tag(tag: re.Match[str]) -> str:
    """`<title/>` is complete in XHTML, but an HTML parser would wait for its end and eat the page."""
    name, attributes = tag[1], tag[2]
    return tag[0] if name.lower() in _VOID_TAGS else f"<{name}{attributes}></{name}>"

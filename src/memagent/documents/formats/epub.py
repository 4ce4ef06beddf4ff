"""EPUB books: a zip archive whose package file lists the chapters, which are XHTML pages.

META-INF/container.xml ─▶ content.opf: manifest (id -> file), spine (ids in reading order)
                              └─▶ toc.ncx or nav.xhtml: titles of chapters
"""

from __future__ import annotations

import posixpath
import re
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import unquote
from xml.etree import ElementTree

from memagent.documents.document import Document, Heading
from memagent.documents.encoding import decode
from memagent.documents.formats.html import declared_charset, html_text, tags
from memagent.documents.formats.raw import (
    MAX_TITLE_CHARS,
    ZIP_ERRORS,
    Cost,
    MarkedText,
    RawFile,
    check_pieces,
    damaged,
    open_zip,
)
from memagent.errors import DocumentError

CONTAINER = "META-INF/container.xml"
ENCRYPTION = "META-INF/encryption.xml"
PAGE_TYPES = frozenset({"application/xhtml+xml", "text/html", "application/x-dtbook+xml"})
NCX_TYPE = "application/x-dtbncx+xml"
EPUB_TYPE = "{http://www.idpf.org/2007/ops}type"
BETWEEN_PAGES = "\n\n"
MAX_CONTENTS_BYTES = 2 * 1024**2
"""A larger table of contents is not read; that of a book of 1,000 chapters has 200 kB."""
_ADVICE = "fetch it again, or convert it to a new .epub (for example with Calibre)"
_XML_DECLARATION = re.compile(r"^\s*<\?xml[^>]*\?>")
_EMPTY_TAG = re.compile(r"<([A-Za-z][\w:.-]*)((?:\s[^<>]*)?)/>")
_VOID_TAGS = tags("area base br col embed hr img input link meta param source track wbr")


def read_epub(raw: RawFile) -> Document:
    """The chapters in reading order, a blank line between them."""
    with open_zip(raw, "epub", _ADVICE) as archive:
        try:
            package = _Package.read(archive, raw)
            pages = [
                (path, html_text(markup, raw.source))
                for path, markup in _pages(archive, package.pages(), raw)
            ]
            labels = _contents(archive, package, raw)
        except (*ZIP_ERRORS, ElementTree.ParseError) as error:
            raise damaged(raw, "epub", error, _ADVICE) from error
    texts: list[str] = []
    headings: list[Heading] = []
    position = 0
    for path, page in pages:
        if page.text:
            headings += _chapters(page, labels.get(path, []), position)
            texts.append(page.text)
            position += len(page.text) + len(BETWEEN_PAGES)
    return Document.from_text(BETWEEN_PAGES.join(texts), raw.source, headings=headings)


def _chapters(page: MarkedText, labels: Sequence[str], start: int) -> Iterator[Heading]:
    """The chapters that begin on a page, which itself begins at `start`.

    They are what the table of contents names. Where it names several, those that are headings of the page;
    where it names none, the first heading.
    """
    if len(labels) > 1:
        named = {_folded(label) for label in labels}
        found = [heading for heading in page.headings if _folded(heading.title) in named]
        if found:
            yield from (Heading(start + heading.start, heading.title) for heading in found)
            return
    title = labels[0] if labels else page.headings[0].title if page.headings else None
    if title is not None:
        yield Heading(start, title)


def _folded(title: str) -> str:
    return " ".join(title.casefold().split())


@dataclass(frozen=True, slots=True)
class _Package:
    """The package file: which files there are, and in which order they are read."""

    root: ElementTree.Element
    folder: str

    @classmethod
    def read(cls, archive: zipfile.ZipFile, raw: RawFile) -> _Package:
        rootfile = _xml(archive, CONTAINER, raw).find(".//{*}rootfile")
        path = rootfile.get("full-path") if rootfile is not None else None
        if path is None:
            raise damaged(raw, "epub", f"{CONTAINER} names no package", _ADVICE)
        return cls(_xml(archive, path, raw), posixpath.dirname(path))

    def items(self) -> Iterator[tuple[ElementTree.Element, str]]:
        """Entries of the manifest with their paths."""
        for item in self.root.iterfind(".//{*}manifest/{*}item"):
            yield item, _resolved(self.folder, item.get("href", ""))

    def pages(self) -> list[str]:
        """Paths of the pages in reading order. Pictures and styles in the manifest are not pages."""
        found = (each for each in self.items() if each[0].get("media-type") in PAGE_TYPES)
        pages = {item.get("id"): path for item, path in found}
        ids = [each.get("idref") for each in self.root.iterfind(".//{*}spine/{*}itemref")]
        return [pages[name] for name in ids if name in pages]

    def contents(self) -> str | None:
        """Path of the table of contents: the page for it, or the older form for programs."""
        for item, path in self.items():
            if "nav" in item.get("properties", "").split() or item.get("media-type") == NCX_TYPE:
                return path
        return None


def _contents(archive: zipfile.ZipFile, package: _Package, raw: RawFile) -> dict[str, list[str]]:
    """The titles in the table of contents by the page they lead to; empty if it cannot be read."""
    path = package.contents()
    labels: dict[str, list[str]] = {}
    with suppress(DocumentError, ElementTree.ParseError, *ZIP_ERRORS):
        if path is None or archive.getinfo(path).file_size > MAX_CONTENTS_BYTES:
            return {}
        folder = posixpath.dirname(path)
        for target, title in _entries(_xml(archive, path, raw)):
            if words := " ".join(title.split())[:MAX_TITLE_CHARS]:
                page = _resolved(folder, target.partition("#")[0])
                labels.setdefault(page, []).append(words)
    return labels


def _entries(root: ElementTree.Element) -> Iterator[tuple[str, str]]:
    """Links of a table of contents, and what they are called."""
    for point in root.iterfind(".//{*}navPoint"):
        link, label = point.find("{*}content"), point.find("{*}navLabel/{*}text")
        if link is not None and label is not None:
            yield link.get("src", ""), label.text or ""
    navs = root.findall(".//{*}nav")
    tables = [nav for nav in navs if nav.get(EPUB_TYPE) == "toc"] or navs[:1]
    for table in tables[:1]:
        for link in table.iterfind(".//{*}a"):
            yield link.get("href", ""), _words(link)


def _words(link: ElementTree.Element) -> str:
    """The text of a link and of the tags in it, not deeper: links may be nested without end."""
    parts = [link.text, *(part for child in link for part in (child.text, child.tail))]
    return "".join(part for part in parts if part)


def _resolved(folder: str, href: str) -> str:
    return posixpath.normpath(posixpath.join(folder, unquote(href)))


def _pages(archive: zipfile.ZipFile, paths: list[str], raw: RawFile) -> Iterator[tuple[str, str]]:
    """The path and the markup of each page."""
    if _encrypted(archive, raw).intersection(paths):
        raise DocumentError(f"{raw.source} is protected by DRM; get an unprotected copy")
    for path in dict.fromkeys(paths):  # a page is read once, however often it is named
        data = archive.read(path)
        check_pieces(raw, data.count(b"<") - data.count(b"</"), Cost.HTML_TAG, "tags on a page")
        page = (
            decode(data, f"{raw.source} ({path})", declared=declared_charset(data)) if data else ""
        )
        yield path, _EMPTY_TAG.sub(_with_end_tag, page)


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

"""PDF through pypdf, page by page, so that a span of the text knows its page numbers."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from memagent.documents.document import Document
from memagent.documents.formats.raw import (
    Cost,
    RawFile,
    check_pieces,
    damaged,
    missing_library,
    tidy,
)
from memagent.errors import DocumentError, one_line

if TYPE_CHECKING:
    from pypdf import PageObject, PdfReader

_REPAIR = "open it in a viewer and print it to a new pdf, or repair it with `qpdf in.pdf out.pdf`"
_UNLOCK = (
    "save an unprotected copy, for example with `qpdf --decrypt --password=... in.pdf out.pdf`"
)


def read_pdf(raw: RawFile) -> Document:
    """The text of every page. A pdf of pictures of pages has none and is refused."""
    pages = list(_page_texts(_open(raw), raw))
    if not any(page.strip() for page in pages):
        number = "1 page" if len(pages) == 1 else f"{len(pages)} pages"
        raise DocumentError(
            f"{raw.source} has {number} and no text, so it is probably scanned; add a text "
            "layer with OCR, for example `ocrmypdf in.pdf out.pdf`"
        )
    return Document.from_pages(pages, raw.source)


def _open(raw: RawFile) -> PdfReader:
    try:
        from pypdf import PdfReader
    except ImportError as error:
        raise missing_library("pypdf", raw.source) from error
    logger = logging.getLogger("pypdf")  # remarks on sloppy files, unless a user has set its level
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        reader = PdfReader(io.BytesIO(raw.data))
        # Many files are locked against printing only and open with the empty password.
        is_locked = reader.is_encrypted and not reader.decrypt("")
    except RecursionError:
        raise
    except Exception as error:  # on damaged files pypdf raises whatever its parsing ran into
        raise _refusal(raw, error) from error
    if is_locked:
        raise DocumentError(f"{raw.source} is protected by a password; {_UNLOCK}")
    return reader


def _page_texts(reader: PdfReader, raw: RawFile) -> Iterator[str]:
    number = 0
    try:
        for number in range(1, len(reader.pages) + 1):
            page = reader.pages[number - 1]
            check_pieces(raw, _content_bytes(page), Cost.PDF_BYTE, "bytes on a page")
            yield tidy(page.extract_text())
    except (DocumentError, RecursionError):
        raise
    except Exception as error:  # as in _open
        raise _refusal(raw, error, page=number or None) from error


def _content_bytes(page: PageObject) -> int:
    """How much there is to interpret on a page, unpacked; 0 where pypdf cannot say."""
    with suppress(Exception):  # extracting the text reports what is damaged
        contents = page.get_contents()
        return 0 if contents is None else len(contents.get_data())
    return 0


def _refusal(raw: RawFile, error: Exception, *, page: int | None = None) -> DocumentError:
    """What pypdf ran into: a cipher that it lacks a library for, or else damage."""
    from pypdf.errors import DependencyError

    if isinstance(error, DependencyError):
        return DocumentError(f"{raw.source} is encrypted ({one_line(error, 120)}); {_UNLOCK}")
    where = f"page {page}: {one_line(error, 120)}" if page is not None else error
    return damaged(raw, "pdf", where, _REPAIR)

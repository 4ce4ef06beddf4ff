"""Compressed files: gzip around one file, and the zip archives that docx and epub are.

Both are unpacked under a limit, because a few kilobytes can claim terabytes.
"""

from __future__ import annotations

import gzip
import io
import zipfile
import zlib
from dataclasses import replace

from memagent.documents.formats.budget import max_unpacked
from memagent.documents.formats.raw import RawFile, damaged
from memagent.errors import DocumentError

GZIP_MAGIC = b"\x1f\x8b"
_STEP_BYTES = 1024 * 1024

ZIP_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, EOFError, OSError, KeyError, ValueError),
    *(RuntimeError, NotImplementedError),  # a password, a compression method we lack
)
"""What `zipfile` raises on a damaged archive. KeyError: the archive lacks a file."""


def is_gzip(name: str, head: bytes) -> bool:
    """Whether a file is gzip, by its name or by its first bytes."""
    return name.lower().endswith(".gz") or head.startswith(GZIP_MAGIC)


def unpack_gzip(raw: RawFile, *, max_bytes: int | None = None) -> RawFile:
    """What a gzip file holds, under the name without `.gz`."""
    if not raw.data.startswith(GZIP_MAGIC):
        raise damaged(
            raw, "gzip", "no gzip data", "if it is unpacked already, rename it without .gz"
        )
    try:
        data = _unpacked(raw, max_bytes or max_unpacked(raw))
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(raw, "gzip", error, "fetch it again, or unpack it first") from error
    inner = raw.name[:-3] if raw.name.lower().endswith(".gz") else raw.name
    return replace(raw, name=inner, data=data, num_packed=len(raw.data))


def open_zip(
    raw: RawFile, kind: str, advice: str, *, max_bytes: int | None = None
) -> zipfile.ZipFile:
    """The archive inside a docx or epub. Sizes it declares are binding: `zipfile` reads no further."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(raw.data))
    except ZIP_ERRORS as error:
        raise damaged(raw, kind, error, advice) from error
    max_bytes = max_bytes or max_unpacked(raw)
    if sum(info.file_size for info in archive.infolist()) > max_bytes:
        raise _too_large(raw, max_bytes)
    return archive


def _unpacked(raw: RawFile, max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    num_bytes = 0
    with gzip.GzipFile(fileobj=io.BytesIO(raw.data)) as stream:
        while piece := stream.read(_STEP_BYTES):
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise _too_large(raw, max_bytes)
            pieces.append(piece)
    return b"".join(pieces)


def _too_large(raw: RawFile, max_bytes: int) -> DocumentError:
    return DocumentError(
        f"{raw.source} unpacks to more than {max_bytes:,} bytes; if it is meant to, unpack it "
        "yourself and give the parts you need"
    )

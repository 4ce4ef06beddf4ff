"""Fetch a file over HTTP: resumed where it stopped, retried, and complete or not there.

file.json.part    what has arrived; a later call requests only the rest
file.json         all of it, verified; the part renamed
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from memagent._version import __version__
from memagent.errors import DataError, one_line

BLOCK_BYTES = 1 << 16
TIMEOUT_SECONDS = 30.0
MAX_FRUITLESS = 5
"""Attempts in a row without a new byte before the download fails."""
FIRST_DELAY_SECONDS = 0.5
SPARE_BYTES = 50_000_000
"""Space to leave free on the disk."""
RETRIED_STATUSES = (408, 425, 429, 500, 502, 503, 504)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """How much of a file has arrived."""

    num_bytes: int
    total_bytes: int | None
    """Size of the file; None while the server has not reported it."""


OnFetched = Callable[[Fetched], None]


def download(
    url: str,
    target: Path,
    *,
    num_bytes: int | None = None,
    sha256: str | None = None,
    on_progress: OnFetched | None = None,
    elsewhere: str = "fetch it elsewhere",
    first_delay_seconds: float = FIRST_DELAY_SECONDS,
) -> None:
    """Fetch `url` to `target`; size and checksum are compared where they are known.

    `elsewhere` is what a message advises where the file cannot be fetched from here.
    """
    part = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        missing = (num_bytes or 0) - _size(part)
        if missing > 0 and missing + SPARE_BYTES > shutil.disk_usage(target.parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _fetch_all(url, part, num_bytes, on_progress, first_delay_seconds)
        _check(url, part, num_bytes, sha256)
        part.replace(target)
    except _Unobtainable as error:
        raise DataError(f"{error}, or {elsewhere}") from None
    except OSError as error:
        if error.errno in DISK_FULL:
            raise DataError(
                f"the disk of {target.parent} is full; free some space, or set XDG_CACHE_HOME to "
                "another disk (what has arrived is kept)"
            ) from None
        raise DataError(
            f"cannot write {error.filename or target} ({error.strerror}); allow it, or set "
            "XDG_CACHE_HOME to a folder of yours"
        ) from None


class _Unobtainable(Exception):
    """The file cannot be downloaded here; says why and what to try."""


class _Retry(Exception):
    """The connection failed, not the request."""


def _fetch_all(
    url: str, part: Path, num_bytes: int | None, on_progress: OnFetched | None, first_delay: float
) -> None:
    fruitless = 0
    while True:
        before = _size(part)
        try:
            return _fetch_rest(url, part, num_bytes, on_progress)
        except _Retry as error:
            fruitless = fruitless + 1 if _size(part) <= before else 0
            if fruitless >= MAX_FRUITLESS:
                raise _unreachable(url, str(error)) from None
        if fruitless:
            time.sleep(first_delay * 2 ** (fruitless - 1))


def _fetch_rest(url: str, part: Path, num_bytes: int | None, on_progress: OnFetched | None) -> None:
    """One request for what is missing. Returns when everything has arrived."""
    have = _size(part)
    headers = {"User-Agent": f"memagent/{__version__}"}
    if have:
        headers["Range"] = f"bytes={have}-"
    request = urllib.request.Request(url, headers=headers)
    try:
        with _connection():
            reply = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            if have == _total(error.headers.get("Content-Range"), None):
                return  # it was complete, only not renamed
            part.unlink()  # longer than the file is now: the file has changed
            raise _Retry("the file there has changed") from None
        if error.code in RETRIED_STATUSES:
            raise _Retry(f"HTTP {error.code}") from None
        raise _unreachable(url, f"HTTP {error.code} {error.reason}") from None
    with reply:
        is_rest = reply.status == http.client.PARTIAL_CONTENT
        ranges = reply.headers.get("Content-Range") if is_rest else None
        if is_rest and not str(ranges).startswith(f"bytes {have}-"):
            raise _unreachable(url, f"it sent {ranges!r} instead of the requested bytes")
        length = reply.headers.get("Content-Length")
        total = _total(ranges, int(length) if length and not is_rest else None) or num_bytes
        with part.open("ab" if is_rest else "wb") as file:  # "wb": the server ignored the range
            while True:
                with _connection():
                    data = reply.read(BLOCK_BYTES)
                if not data:
                    break
                file.write(data)
                if on_progress:
                    on_progress(Fetched(num_bytes=file.tell(), total_bytes=total))
            arrived = file.tell()
    if total is not None and arrived < total:
        raise _Retry(f"the connection was cut at {arrived:,} of {total:,} bytes")


@contextmanager
def _connection() -> Iterator[None]:
    """Raise _Retry for errors of the connection; the disk is not used inside."""
    try:
        yield
    except urllib.error.HTTPError:
        raise
    except (OSError, http.client.HTTPException) as error:
        raise _Retry(one_line(getattr(error, "reason", error))) from None


def _check(url: str, part: Path, num_bytes: int | None, sha256: str | None) -> None:
    if num_bytes is not None and _size(part) != num_bytes:
        found = _size(part)
        part.unlink()
        raise _Unobtainable(
            f"{url} is {found:,} bytes long, not {num_bytes:,} as published, and was deleted; fetch it "
            "again"
        )
    if sha256 is None:
        return
    with part.open("rb") as stream:
        found_sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    if found_sha256 != sha256:
        part.unlink()
        raise _Unobtainable(
            f"{url} is not the published file (sha256 {found_sha256[:16]}..., not {sha256[:16]}...) "
            "and was deleted; fetch it again"
        )


def _unreachable(url: str, reason: str) -> _Unobtainable:
    return _Unobtainable(f"cannot fetch {url} ({reason}); run it again to resume")


def _total(content_range: str | None, otherwise: int | None) -> int | None:
    """The size in a header such as `bytes 100-199/1234` or `bytes */1234`."""
    total = (content_range or "").rpartition("/")[2]
    return int(total) if total.isdigit() else otherwise


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0

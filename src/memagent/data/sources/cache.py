"""Sources on this machine: a file of the user, or the published one, fetched once and verified ever after.

path = open_source("hotpotqa-dev")                     # from the cache, fetched if needed
path = open_source("hotpotqa-dev", "my/dev.jsonl.gz")  # or a file or folder of yours

~/.cache/memagent/sources/
  hotpot_dev_distractor_v1.json            as published
  hotpot_dev_distractor_v1.json.sha256     its checksum when it arrived
  hotpot_dev_distractor_v1.json.part       what has arrived; a later call requests only the rest
"""

from __future__ import annotations

import errno
import gzip
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
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock
from platformdirs import user_cache_path

from memagent._version import __version__
from memagent.data.choices import Source, find_source, source_setting
from memagent.data.sources.readers import distinct, hotpot_paragraphs, paragraph_line, text_files
from memagent.errors import ConfigError, DataError, one_line
from memagent.files import replacing, write_atomically

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


class Checksum(NamedTuple):
    """SHA-256 of a file, and of the published one."""

    found: str
    published: str | None
    """None where no checksum is published."""


def open_source(
    name: str,
    path: str | Path | None = None,
    *,
    fetch: bool = True,
    on_progress: OnFetched | None = None,
) -> Path:
    """The file or folder of a source: `path` if it is given, else from the cache, fetched if needed.

    `path` may be a folder that holds the file under one of its usual names. Without `fetch`, a source
    that is not in the cache is an error. Without `on_progress`, a download reports on standard error
    what it fetches.
    """
    source = find_source(name)
    if path is not None:
        return _own(name, source, Path(path).expanduser())
    if source.kind == "texts":
        raise ConfigError(
            f"{name} are texts of yours; name a folder of .txt files: {source_setting(name)}"
        )
    if not fetch and not is_here(name):
        raise ConfigError(f"{name} is not on this machine; run `memagent data sources pull {name}`")
    target = cached_path(name)
    with _lock(target):
        if target.exists():
            _verify(target)
        elif source.url is None:
            _derive_paragraphs(target, on_progress)
        else:
            with _reported(name, source, on_progress) as report:
                download(
                    source.url,
                    target,
                    num_bytes=source.num_bytes,
                    sha256=source.sha256,
                    on_progress=report,
                    elsewhere=f"fetch it elsewhere and give its path: {source_setting(name)}",
                )
            _record(target)
    return target


def check_source(name: str, path: str | Path) -> Checksum:
    """The checksum of a file or folder of yours, and the published one."""
    return Checksum(sha256_of(open_source(name, path)), find_source(name).sha256)


def is_here(name: str) -> bool:
    """Whether a source is in the cache."""
    return find_source(name).kind != "texts" and cached_path(name).exists()


def cached_path(name: str) -> Path:
    """Where a source lies once it has been fetched."""
    folder = user_cache_path("memagent", appauthor=False) / "sources"
    return folder / find_source(name).file


_checksums: dict[tuple[str, int, int], str] = {}


def sha256_of(path: str | Path) -> str:
    """SHA-256 of a file, or of the names and contents of a folder's texts; known ones are kept."""
    path = Path(path)
    if path.is_dir():
        parts = (f"{file.name} {sha256_of(file)}\n" for file in text_files(path))
        return hashlib.sha256("".join(parts).encode()).hexdigest()
    try:
        state = path.stat()
        key = (str(path.resolve()), state.st_size, state.st_mtime_ns)
        if key not in _checksums:
            with path.open("rb") as stream:
                _checksums[key] = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    return _checksums[key]


def _own(name: str, source: Source, path: Path) -> Path:
    if not path.exists():
        raise DataError(
            f"{path} does not exist; name the file or folder of {name}: {source_setting(name)}"
        )
    if not path.is_dir():
        return path
    if source.kind == "texts":
        text_files(path)  # an error if it has none
        return path
    for candidate in source.names:
        if (path / candidate).is_file():
            return path / candidate
    raise DataError(
        f"{path} holds no {name}: no {source.names[0]} or {source.names[-1]}; name a file: "
        f"{source_setting(name)}"
    )


def _lock(target: Path) -> FileLock:
    """A second process that needs the same file waits, then finds it there."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(target.with_name(f".{target.name}.lock"))
    except OSError as error:
        raise DataError(
            f"cannot write to {target.parent} ({error.strerror}); set XDG_CACHE_HOME to a folder "
            "of yours"
        ) from None


def _derive_paragraphs(target: Path, on_progress: OnFetched | None) -> None:
    """Write the distinct paragraphs of the official files."""
    files = [
        open_source(name, on_progress=on_progress) for name in ("hotpotqa-train", "hotpotqa-dev")
    ]
    paragraphs = distinct(chain.from_iterable(hotpot_paragraphs(file) for file in files))
    with (
        replacing(target) as part,
        part.open("wb") as raw,
        gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed,
    ):
        for paragraph in paragraphs:
            packed.write(paragraph_line(paragraph).encode() + b"\n")
    _record(target)


def _record(target: Path) -> None:
    """Keep the checksum beside the file, in the form that `sha256sum -c` takes."""
    line = f"{sha256_of(target)}  {target.name}\n"
    write_atomically(target.with_name(f"{target.name}.sha256"), line.encode())


def _verify(target: Path) -> None:
    recorded = target.with_name(f"{target.name}.sha256")
    if not recorded.exists():
        _record(target)
    elif recorded.read_text().split()[:1] != [sha256_of(target)]:
        raise DataError(
            f"{target} is not what was fetched (its checksum in {recorded.name} differs); delete "
            "it, and it is fetched again"
        )


@contextmanager
def _reported(name: str, source: Source, on_progress: OnFetched | None) -> Iterator[OnFetched]:
    """Reports what is fetched, from where and under which licence; shows a bar on a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    size = f", {source.num_bytes / 1e6:,.0f} MB" if source.num_bytes else ""
    licence = f", licence {source.licence}" if source.licence else ""
    console.print(f"fetching {name}: {source.url}{size}{licence}", markup=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(name, total=source.num_bytes)

        def show(fetched: Fetched) -> None:
            bar.update(task, completed=fetched.num_bytes, total=fetched.total_bytes)

        yield on_progress or show

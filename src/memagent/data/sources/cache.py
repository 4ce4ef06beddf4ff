"""Sources on this machine: a file of the user, or the published one, fetched once and verified ever after.

path = open_source("hotpotqa-dev")                     # from the cache, fetched if needed
path = open_source("hotpotqa-dev", "my/dev.jsonl.gz")  # or a file or folder of yours

~/.cache/memagent/sources/
  hotpot_dev_distractor_v1.json            as published
  hotpot_dev_distractor_v1.json.sha256     its checksum when it arrived
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock
from platformdirs import user_cache_path

from memagent.data.sources.catalogue import Source, find_source, source_setting
from memagent.data.sources.download import Fetched, OnFetched, download
from memagent.data.sources.readers import distinct, hotpot_paragraphs, paragraph_line, text_files
from memagent.errors import ConfigError, DataError
from memagent.files import replacing, write_atomically


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

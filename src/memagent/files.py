"""Files that are complete or not there: written under another name, synced, then renamed.

write_atomically(path, data)
with replacing(path) as part:           # for writers that need a path of their own
    tensors.save(part)
with replacing_folder(path) as part:    # a folder with everything in it
    (part / "weights").write_bytes(data)

`evict_oldest` keeps a cache folder within a size.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PART = ".part"
"""Suffix of files that are being written. They are hidden, and may be deleted when no process writes them."""


def write_atomically(path: Path, data: bytes, *, mode: int = 0o600, sync: bool = True) -> None:
    """Put a file on disk: all of it, or what was there before. `sync` as for `replacing`."""
    with replacing(path, sync=sync) as part:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            write_all(descriptor, data)
        finally:
            os.close(descriptor)


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """A path to write to. It is renamed to `path` if all goes well, else removed.

    Without `sync` a power cut may leave an empty file: for caches, which are checked when read.
    """
    part = _part_of(path)
    try:
        yield part
        if sync:
            sync_file(part)
        part.replace(path)
    except BaseException:
        with suppress(OSError):  # the first error counts
            part.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


@contextmanager
def replacing_folder(path: Path, *, is_shared: bool = False) -> Iterator[Path]:
    """A hidden folder to write into. It is synced and renamed to `path`, which must not exist.

    With `is_shared`, several processes may write the same folder at once: the first one to finish wins.
    """
    part = _part_of(path) if is_shared else path.with_name(f".{path.name}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        yield part
        _sync_tree(part)
        try:
            part.rename(path)
        except OSError:
            if not (is_shared and path.is_dir()):
                raise
            shutil.rmtree(part)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    sync_folder(path.parent)


def make_folders(path: Path, *, mode: int = 0o777) -> None:
    """Create a folder and those above it that are missing, with their names on disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder, which may change meanwhile."""
    files = [os.path.join(parent, name) for parent, _, names in os.walk(path) for name in names]
    total = 0
    for file in files if path.is_dir() else [str(path)]:
        with suppress(OSError):  # a download renames its files
            total += os.lstat(file).st_size
    return total


def mark_used(path: Path) -> None:
    """Note that an entry of a cache is in use, for `evict_oldest`."""
    with suppress(OSError):
        os.utime(path)


def evict_oldest(folder: Path, *, max_bytes: int, keep: Path) -> None:
    """Remove the entries of a cache that were not used for longest until the others have at most so many bytes.

    `keep` and entries that are being written stay.
    """
    with suppress(OSError):
        entries = [path for path in folder.iterdir() if path != keep and path.name[0] != "."]
        used = {path: (path.stat().st_mtime, size_of(path)) for path in entries}
        total = size_of(keep) + sum(size for _, size in used.values())
        for path in sorted(used, key=lambda path: used[path][0]):
            if total <= max_bytes:
                return
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            total -= used[path][1]


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of the data; a single `os.write` may write less."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_file(path: Path) -> None:
    """Put the contents of a file on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Put the names in a folder on disk: files that were created, renamed or removed in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason_of(error: OSError) -> str:
    """What the system says is wrong, in a few words."""
    reason = error.strerror or str(error)
    if error.errno == errno.EMFILE:
        return f"{reason}; read fewer texts at once, or raise the limit with `ulimit -n`"
    return reason


def _part_of(path: Path) -> Path:
    """A name beside `path` that no other process uses."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(3)}{PART}")


def _sync_tree(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            _sync_tree(path)
        else:
            sync_file(path)
    sync_folder(folder)

"""The one door to the files of a run directory, which may come from anybody.

    data = read_file(run / "run.json")
    write_file(run, "grades/f1.jsonl", data)
    with open_reader(run / "grades" / "f1.jsonl", inside=run) as file:
        ...

A file is opened only if it is a regular one, in folders that are no links up to the run directory (`inside`, by
default the folder of the file); the run directory itself may be a link, for the user names it. Nothing waits:
a pipe is refused, not read. A file with other names (hard links) is read and not written to, because the
other names would change too. Lines and whole files have limits, so that no file takes all memory.

What is refused is a RunError; other errors of the system pass as they are.

Files of JSON lines are only appended to, and survive a kill at any moment:

    records = recover(path)                  # what was written; a torn last line is removed
    with LineFile(path) as lines:
        lines.append(json.dumps(record).encode())

A process that is killed loses at most the line it was writing. Any other damage is an error that names
the line: nothing is skipped. With `checksums`, lines end in `,"crc":"1a2b3c4d"}`, the CRC-32 of the line
without it, so that a changed value is found too.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

from filelock import FileLock, Timeout

from memagent.errors import RunError, RunNotWritable
from memagent.files import reason_of, sync_folder, write_all, write_atomically

LOCK = ".lock"
MAX_BYTES = 32 << 20
"""The size of a file that is read as a whole, such as a manifest."""
MAX_LINE_BYTES = 256 << 20
NOT_A_FILE = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO)
"""What opening a link, a folder, a pipe or a socket gives, or a file beneath one."""


def open_file(
    path: Path, flags: int = os.O_RDONLY, *, inside: Path | None = None, mode: int = 0o600
) -> int:
    """The descriptor of a regular file; `mode` is that of a new one."""
    folder = inside or path.parent
    *folders, name = path.relative_to(folder).parts
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for each in folders:
            inner = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = inner
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode, dir_fd=at)
    except OSError as error:
        if error.errno in NOT_A_FILE:
            raise _refused(path) from None
        raise
    finally:
        os.close(at)
    found = os.fstat(descriptor)
    has_other_names = found.st_nlink > 1 and flags & (os.O_WRONLY | os.O_RDWR)
    if has_other_names or ".." in folders or not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise _refused(path)
    return descriptor


def open_reader(path: Path, *, inside: Path | None = None) -> BinaryIO:
    """A regular file, to be read in parts."""
    return os.fdopen(open_file(path, inside=inside), "rb")


def read_file(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """A whole file, if it is not larger than that."""
    with open_reader(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise RunError(f"{path} has more than {max_bytes:,} bytes")
    return data


def each_line(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The lines from where a file is, each with its end, which only the last one may lack."""
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            raise RunError(
                f"{path} has a line of more than {MAX_LINE_BYTES:,} bytes; it is damaged"
            )
        yield line


def make_folder(run: Path, name: str) -> Path:
    """A folder of a run, made if it is not there. Raises RunError for a link or a file."""
    path = run / name
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
        sync_folder(run)
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise _refused(path)
    return path


def write_file(run: Path, name: str, data: bytes) -> None:
    """Put a file such as `grades/f1.jsonl` into a folder of a run: all of it, or what was there before."""
    folder, _, own_name = name.partition("/")
    try:
        write_atomically(make_folder(run, folder) / own_name, data)
    except OSError as error:
        raise RunNotWritable(f"cannot write {run / name}: {reason_of(error)}") from None


def check_tree(path: Path) -> Path:
    """The path, if only regular files and folders are there, if anything: for libraries that open files themselves."""
    with suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            for each in path.iterdir():
                check_tree(each)
        elif not stat.S_ISREG(mode):
            raise _refused(path)
    return path


class FolderLock:
    """A folder that one process at a time holds, until it releases it or ends.

    Locked are the file `.lock` and the folder itself: the folder stays locked when the file is deleted, and
    there are file systems that lock files only, such as NFS.
    """

    def __init__(self, folder: Path) -> None:
        """Raises Timeout where another process holds the folder."""
        os.close(open_file(folder / LOCK, os.O_RDWR | os.O_CREAT))  # no link to another file
        # it may be taken in one thread and released in another
        file = FileLock(folder / LOCK, mode=0o600, thread_local=False)
        file.acquire(timeout=0)
        self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self._held = ExitStack()
        self._held.callback(file.release)
        self._held.callback(os.close, self._descriptor)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise Timeout(str(folder)) from None
        except OSError:
            return

    def is_at(self, folder: Path) -> bool:
        """Whether the folder that is held is still the one with this path."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), folder.stat())
        except OSError:
            return False

    def release(self) -> None:
        """Let other processes have the folder. Does nothing the second time."""
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def _refused(path: Path) -> RunError:
    return RunError(
        f"{path} is a link, no regular file, in a folder that is a link, or has other names that would change "
        "with it; no file of a run is opened like that"
    )


# --- files of JSON lines --------------------------------------------------------------------------

Record = dict[str, Any]
Shrink = Callable[[Record], Record]
"""Makes a record smaller before it is held in memory."""

_seal = re.compile(rb'"crc":"[0-9a-f]{8}"\}\n')
_SEAL_BYTES = len(b'"crc":"00000000"}\n')

_sync_data = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync


class Line(NamedTuple):
    """One complete line of a file."""

    record: Record
    end: int
    """Offset of the first byte after the line."""


def read_lines(path: Path) -> Iterator[Line]:
    """The complete lines of a file. A torn last line is left out; any other damage is a RunError."""
    end = 0
    has_checksums = False
    with open_reader(path) as lines:
        for number, line in enumerate(each_line(lines, path), start=1):
            if not line.endswith(b"\n"):
                return
            is_sealed = _seal.fullmatch(line[-_SEAL_BYTES:]) is not None
            has_checksums = has_checksums or is_sealed
            record = _parsed(line, is_sealed) if is_sealed or not has_checksums else None
            if record is None:
                if not lines.read(1):  # the last line
                    return
                raise RunError(f"{path}, line {number}, is damaged; the run cannot be resumed")
            end += len(line)
            yield Line(record, end)


def parse_line(line: bytes) -> Record | None:
    """The record of one complete line; None if it is damaged."""
    return _parsed(line, _seal.fullmatch(line[-_SEAL_BYTES:]) is not None)


def sealed(line: bytes) -> bytes:
    """A JSON object with its checksum as the last field."""
    assert line.endswith(b"}"), "a line is a JSON object"
    comma = b"" if line == b"{}" else b","
    return b'%b%b"crc":"%08x"}' % (line[:-1], comma, zlib.crc32(line))


def _parsed(line: bytes, is_sealed: bool) -> Record | None:
    """The record of a line; None if it is damaged."""
    try:
        record = json.loads(line)
        if not isinstance(record, dict):
            return None
        if is_sealed:
            del record["crc"]
            bare = line[:-_SEAL_BYTES].removesuffix(b",") + b"}"
            return record if sealed(bare) == line[:-1] else None
    except (ValueError, RecursionError):
        return None
    return record


def recover(path: Path, shrink: Shrink | None = None) -> list[Record]:
    """The records of a file that will be appended to; a torn last line is removed from it."""
    records, end = [], 0
    try:
        for record, end in read_lines(path):  # noqa: B007 - the last one is needed below
            records.append(shrink(record) if shrink else record)
    except FileNotFoundError:
        return []
    truncate(path, end)
    return records


def truncate(path: Path, num_bytes: int) -> None:
    """Cut a file, if it is longer."""
    descriptor = open_file(path, os.O_WRONLY)
    try:
        if num_bytes < os.fstat(descriptor).st_size:
            os.ftruncate(descriptor, num_bytes)
    finally:
        os.close(descriptor)


class LineFile:
    """A file that lines are appended to, created if it is not there."""

    def __init__(
        self, path: Path, *, sync: bool = True, checksums: bool = False, mode: int = 0o600
    ) -> None:
        """With `sync`, a line survives a power cut; without, it survives the process.

        `mode` is that of a new file.
        """
        self._checksums = checksums
        self._sync = sync
        self._whole_bytes: int | None = None
        """Where half a line begins that could not be removed."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._descriptor: int | None = open_file(path, flags, mode=mode)
        sync_folder(path.parent)

    def append(self, *lines: bytes) -> None:
        """Put lines on disk: all of them or, if the disk is full, none."""
        assert self._descriptor is not None, "the file is closed"
        size = os.fstat(self._descriptor).st_size
        if self._whole_bytes is not None:
            size = self._whole_bytes
            os.ftruncate(self._descriptor, size)
        try:
            whole = [sealed(line) if self._checksums else line for line in lines]
            if max(map(len, whole), default=0) >= MAX_LINE_BYTES:  # it could not be read again
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            write_all(self._descriptor, b"".join(line + b"\n" for line in whole))
            if self._sync:
                _sync_data(self._descriptor)
        except OSError:
            self._whole_bytes = size
            os.ftruncate(self._descriptor, size)
            raise
        self._whole_bytes = None

    def sync(self) -> None:
        """Return when all lines survive a power cut."""
        if self._descriptor is not None and not self._sync:
            _sync_data(self._descriptor)

    def close(self) -> None:
        """Close the file. Does nothing the second time."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

"""Files of JSON lines that are only appended to, and survive a kill at any moment.

    records = recover(path)                  # what was written; a torn last line is removed
    with LineFile(path) as lines:
        lines.append(json.dumps(record).encode())

A process that is killed loses at most the line it was writing. Any other damage is an error that names
the line: nothing is skipped. With `checksums`, lines end in `,"crc":"1a2b3c4d"}`, the CRC-32 of the line
without it, so that a changed value is found too; lines of earlier versions have none.
"""

from __future__ import annotations

import errno
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from memagent.errors import RunError
from memagent.files import sync_folder, write_all
from memagent.run_files import MAX_LINE_BYTES, each_line, open_file, open_reader

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

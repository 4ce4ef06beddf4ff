"""Files of JSON lines that are only appended to, and survive a kill at any moment.

    records = recover(path)                  # what was written; a torn last line is removed
    with LineFile(path) as lines:
        lines.append(json.dumps(record).encode())

A process that is killed loses at most the line it was writing. Any other damage is an error that names
the line: nothing is skipped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from memagent.errors import RunError
from memagent.files import sync_folder, write_all

Record = dict[str, Any]
Shrink = Callable[[Record], Record]
"""Makes a record smaller before it is held in memory."""

_sync_data = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync


class Line(NamedTuple):
    """One complete line of a file."""

    record: Record
    end: int
    """Offset of the first byte after the line."""


def read_lines(path: Path) -> Iterator[Line]:
    """The complete lines of a file. A torn last line is left out; any other damage is a RunError."""
    end = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict):
                if not lines.read(1):  # the last line
                    return
                raise RunError(f"{path}, line {number}, is damaged; the run cannot be resumed")
            end += len(line)
            yield Line(record, end)


def recover(path: Path, shrink: Shrink | None = None) -> list[Record]:
    """The records of a file that will be appended to; a torn last line is removed from it."""
    if not path.exists():
        return []
    records, end = [], 0
    for record, end in read_lines(path):  # noqa: B007 - the last one is needed below
        records.append(shrink(record) if shrink else record)
    truncate(path, end)
    return records


def truncate(path: Path, num_bytes: int) -> None:
    """Cut a file, if it is longer."""
    if num_bytes < path.stat().st_size:
        os.truncate(path, num_bytes)


class LineFile:
    """A file that lines are appended to, created if it is not there."""

    def __init__(self, path: Path, *, sync: bool = True, mode: int = 0o600) -> None:
        """With `sync`, a line survives a power cut; without, it survives the process.

        `mode` is that of a new file.
        """
        self._sync = sync
        self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)
        if sync:
            sync_folder(path.parent)

    def append(self, *lines: bytes) -> None:
        """Put lines on disk: all of them or, if the disk is full, none."""
        assert self._descriptor is not None, "the file is closed"
        size = os.fstat(self._descriptor).st_size
        try:
            write_all(self._descriptor, b"".join(line + b"\n" for line in lines))
            if self._sync:
                _sync_data(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, size)
            raise

    def close(self) -> None:
        """Close the file. Does nothing the second time."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

"""Waiting for files to change.

    seen = state_of(paths)
    seen = await wait_for_change(paths, seen, seconds=2.0)

A folder changes when a file in it is written, added or removed. A change counts when nothing has changed for as long
as one wait, so that a file which is being written is not read halfway.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

FileState = tuple[tuple[str, int, int], ...]
"""Name, size and time of change of each file."""


def state_of(paths: Sequence[Path]) -> FileState:
    """The files as they are now; those that are gone are left out."""
    return tuple(
        (str(file), status.st_size, status.st_mtime_ns)
        for path in paths
        for file, status in _files(path)
    )


async def wait_for_change(paths: Sequence[Path], seen: FileState, *, seconds: float) -> FileState:
    """Wait until the files differ from what was seen, and stay as they are for one more wait."""
    before = seen
    while True:
        await asyncio.sleep(seconds)
        now = await asyncio.to_thread(state_of, paths)
        if now and now != seen and now == before:
            return now
        before = now


def _files(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """A file, or the files of a folder, with their status."""
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    for file in found:
        try:
            status = file.stat()
        except OSError:
            continue
        if file.is_file():
            yield file, status

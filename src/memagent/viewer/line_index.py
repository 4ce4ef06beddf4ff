"""The lines of a file that grows, by number, without holding them.

    index = LineIndex(folder, "steps.jsonl", head_of)
    index.refresh()            # reads what was appended since
    index.heads                # what `head_of` made of each line
    index.line(41)             # one whole line, from its place in the file

A head is small: what a list shows of a line. An incomplete last line is left for the next refresh.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from memagent.errors import RunError
from memagent.files import reason_of
from memagent.run_files import Record, each_line, open_reader, parse_line

H = TypeVar("H")


class LineIndex(Generic[H]):
    """Offsets and heads of the complete lines of a file inside a folder."""

    def __init__(self, folder: Path, name: str, head_of: Callable[[bytes], H]) -> None:
        """`head_of` gets a line with its end and raises ValueError for a damaged one."""
        self.heads: list[H | None] = []
        """The head of each line; None for a damaged line."""
        self.generation = 0
        """Changes when lines that were known are no longer what the file holds."""
        self._folder = folder
        self._name = name
        self._head_of = head_of
        self._ends: list[int] = []
        self._file_id: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Read what was appended; all of it again where the file was replaced or cut."""
        with self._lock:
            path = self._folder / self._name
            try:
                with open_reader(path, inside=self._folder) as file:
                    state = os.fstat(file.fileno())
                    file_id = (state.st_dev, state.st_ino)
                    if file_id != self._file_id or state.st_size < self._end:
                        self._forget(file_id)
                    file.seek(self._end)
                    for line in each_line(file, path):
                        if not line.endswith(b"\n"):
                            break
                        self._add(line)
            except FileNotFoundError:
                self._forget(None)
            except OSError as error:
                raise RunError(f"cannot read {path}: {reason_of(error)}") from None

    def head(self, number: int) -> H:
        """The head of a line. Raises RunError where there is none, or where it is damaged."""
        found = self.heads[number] if 0 <= number < len(self.heads) else None
        if found is None:
            raise RunError(f"{self._name} has no line {number + 1}, or it is damaged")
        return found

    def line(self, number: int) -> bytes:
        """A whole line. Raises RunError where there is none."""
        with self._lock:
            if not 0 <= number < len(self._ends):
                raise RunError(f"{self._name} has no line {number + 1}")
            start = self._ends[number - 1] if number else 0
            length = self._ends[number] - start
        path = self._folder / self._name
        try:
            with open_reader(path, inside=self._folder) as file:
                file.seek(start)
                return file.read(length)
        except OSError as error:
            raise RunError(f"cannot read {path}: {reason_of(error)}") from None

    def record(self, number: int) -> Record:
        """A whole line, parsed, its checksum compared. Raises RunError where it is damaged."""
        record = parse_line(self.line(number))
        if record is None:
            raise RunError(f"{self._folder / self._name}, line {number + 1}, is damaged")
        return record

    @property
    def _end(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _add(self, line: bytes) -> None:
        try:
            head = self._head_of(line)
        except (ValueError, RecursionError, OverflowError):
            head = None
        self._ends.append(self._end + len(line))
        self.heads.append(head)

    def _forget(self, file_id: tuple[int, int] | None) -> None:
        self._file_id = file_id
        self._ends, self.heads = [], []
        self.generation += 1

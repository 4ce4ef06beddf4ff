"""A disk whose operations fail, and one that has lost power.

    programs (tests.support.preloaded) ── LD_PRELOAD ──▶ disk.so ──▶ the system
                                                            │
                       which operations fail ──▶ disk.state │ disk.log ──▶ what was done, in order

disk.c stands between a command and the system and sees every operation on a file below one folder, whoever
makes it: Python, SQLite, libraries in Rust. `Disk` says which of them fail and reads what was done. From that,
`states_without_power` builds what a disk may hold if the power goes at any moment:

    disk = Disk(tmp_path, library)
    call(..., env=disk.environment(fault=Fault(7, errno.ENOSPC)))   # the 8th operation fails, once
    call(..., env=disk.environment())
    for outage in states_without_power(disk.operations(), before, acknowledged):
        outage.contents.restore(disk.root)                         # then resume there
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_suffix(".c")
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
IS_SUPPORTED = COMPILER is not None and sys.platform == "linux"
MOST = 65536
FOR_EVER = 2**62
_HEADER = struct.Struct("<5q")


class Kind(enum.IntEnum):
    """What is done to a file; the numbers are those of disk.c."""

    OPEN = 0
    """For writing: it is created if it is not there."""
    WRITE = 1
    TRUNCATE = 2
    SYNC = 3
    RENAME = 4
    LINK = 5
    UNLINK = 6
    MKDIR = 7
    RMDIR = 8
    SAID = 9
    """Something was written to standard output or standard error."""
    SENT = 10
    """Something was sent over a connection."""


class Operation(NamedTuple):
    """One operation that succeeded."""

    kind: Kind
    path: str
    other: str
    """The new name, where there are two."""
    offset: int
    """Where data is written, the size of a truncated file, 1 for files that were emptied on opening."""
    data: bytes


class Fault(NamedTuple):
    """Which operations fail."""

    first: int
    """The first one is 0."""
    error: int
    num: int = 1


class _State(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("error", ctypes.c_int64),
        ("kinds", ctypes.c_char * MOST),
    )


def build(folder: Path) -> Path:
    """Compile disk.c."""
    library = folder / "disk.so"
    assert COMPILER is not None
    flags = ("-O1", "-shared", "-fPIC", "-D_GNU_SOURCE")
    subprocess.run([COMPILER, *flags, "-o", library, SOURCE], check=True)
    return library


class Disk:
    """A folder that is watched in commands which have its environment."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "disk"
        self._state, self._log = folder / "disk.state", folder / "disk.log"
        self.clear()

    def clear(self) -> None:
        """An empty disk."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()

    def environment(self, fault: Fault | None = None) -> dict[str, str]:
        """For a command whose operations are counted and logged anew."""
        first, error, num = fault or Fault(FOR_EVER, 0)
        state = _State(0, first, min(first + num - 1, FOR_EVER), error)
        self._state.write_bytes(bytes(state))
        self._log.write_bytes(b"")
        paths = {"ROOT": self.root, "STATE": self._state, "LOG": self._log}
        return {f"DISK_{name}": str(path) for name, path in paths.items()}

    @property
    def kinds(self) -> list[Kind]:
        """The operations of the last command, those that failed included."""
        state = _State.from_buffer_copy(self._state.read_bytes())
        raw = bytes(state)[_State.kinds.offset :]
        return [Kind(number) for number in raw[: state.count]]

    def operations(self) -> list[Operation]:
        """What the last command did, in order."""
        data = self._log.read_bytes()
        found, start = [], 0
        while start < len(data):
            kind, offset, *sizes = _HEADER.unpack_from(data, start)
            start += _HEADER.size
            parts = []
            for size in sizes:
                parts.append(data[start : start + size])
                start += size
            path, other, written = parts
            names = (
                os.path.relpath(os.fsdecode(name), self.root) if name else ""
                for name in (path, other)
            )
            found.append(Operation(Kind(kind), *names, offset, written))
        return found


# --- without power ----------------------------------------------------------------------------------


NUM_VERSIONS = 5


class Version(NamedTuple):
    """What a file may hold."""

    data: bytes
    digest: bytes


class _Folder:
    """A folder by itself, whatever it is called."""


class _File:
    """A file by itself, whatever it is called: what is kept of it, and what was written since."""

    def __init__(self, kept: bytes = b"") -> None:
        self._kept = kept
        self._pending: list[Operation] = []
        self._versions: list[Version] = []

    def write(self, operation: Operation) -> None:
        self._pending.append(operation)
        self._versions = []

    def sync(self) -> None:
        self._kept = self._contents(self._pending)
        self._pending, self._versions = [], []

    @property
    def versions(self) -> Sequence[Version]:
        """What a disk may hold of it: all, nothing new, half of the last write, the length alone, the last write alone."""
        if not self._versions:
            found = [self._contents(self._pending)]
            if self._pending:
                last = self._pending[-1]
                half = last._replace(data=last.data[: len(last.data) // 2])
                found.append(self._kept)
                found.append(self._contents([*self._pending[:-1], half]))
                found.append(self._kept.ljust(len(found[0]), b"\0"))
                found.append(self._contents(self._pending[-1:]))
            self._versions = [Version(data, hashlib.sha256(data).digest()) for data in found]
        return self._versions

    def _contents(self, pending: Sequence[Operation]) -> bytes:
        data = bytearray(self._kept)
        for one in pending:
            if one.kind is Kind.TRUNCATE or len(data) < one.offset:
                data = data[: one.offset].ljust(one.offset, b"\0")
            data[one.offset : one.offset + len(one.data)] = one.data
        return bytes(data)


class _Edit(NamedTuple):
    """A change of names: it happens as a whole or not at all."""

    removed: tuple[tuple[_Folder, str], ...]
    added: tuple[tuple[_Folder, str, _Folder | _File], ...]
    unsynced: frozenset[_Folder]
    """Folders in which it is not kept yet."""


class Contents(NamedTuple):
    """All files and folders of a disk, by their paths."""

    files: Mapping[str, bytes]
    folders: frozenset[str]

    @classmethod
    def of(cls, root: Path) -> Contents:
        """Those that are there."""
        paths = {str(path.relative_to(root)): path for path in root.rglob("*")}
        files = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
        return cls(files, frozenset(name for name, path in paths.items() if path.is_dir()))

    def restore(self, root: Path) -> None:
        """Put exactly these below `root`."""
        shutil.rmtree(root, ignore_errors=True)
        for name in (".", *sorted(self.folders)):
            (root / name).mkdir(mode=0o700)
        for name, data in self.files.items():
            (root / name).write_bytes(data)


class _Platter:
    """What operations leave on a disk that keeps only what it must.

    Data of a file are kept when the file is synced, and a change of names when all folders concerned are synced,
    as POSIX says; no file system keeps less.
    """

    def __init__(self, before: Contents) -> None:
        self.root = _Folder()
        self.names: dict[_Folder, dict[str, _Folder | _File]] = {self.root: {}}
        self.edits: list[_Edit] = []
        for name in sorted(before.folders):
            self._add(name, _Folder())
        for name, data in before.files.items():
            self._add(name, _File(data))
        self.edits = [edit._replace(unsynced=frozenset()) for edit in self.edits]

    def apply(self, operation: Operation) -> None:
        """What the program did next."""
        kind, path = operation.kind, operation.path
        node = self._find(path)
        if node is None and kind in (Kind.SYNC, Kind.UNLINK):
            node = self._unseen(path)
        if kind is Kind.OPEN:
            if node is None:
                self._add(path, _File())
            elif operation.offset:
                self._write(node, Operation(Kind.TRUNCATE, path, "", 0, b""))
        elif kind in (Kind.WRITE, Kind.TRUNCATE):
            self._write(node, operation)
        elif kind is Kind.SYNC:
            self._sync(node)
        elif kind is Kind.MKDIR:
            self._add(path, _Folder())
        elif kind in (Kind.UNLINK, Kind.RMDIR):
            self._change((self._place(path),), ())
        elif kind in (Kind.RENAME, Kind.LINK):
            assert node is not None
            old = (self._place(path),) if kind is Kind.RENAME else ()
            self._change(old, ((*self._place(operation.other), node),))

    def states(self) -> Iterator[tuple[Hashable, Contents]]:
        """What the disk may hold now, with a key for each; first all that was done."""
        pending = [edit for edit in self.edits if edit.unsynced]
        lost: list[list[_Edit]] = [pending[num:] for num in range(len(pending), -1, -1)]
        lost += [[edit] for edit in pending]
        for edits in lost:
            kept = [edit for edit in self.edits if not any(edit is one for one in edits)]
            files, folders = self._found(self._names(kept))
            for number in range(NUM_VERSIONS):
                if number == 0 or any(number < len(file.versions) for file in files.values()):
                    held = {
                        name: file.versions[min(number, len(file.versions) - 1)]
                        for name, file in files.items()
                    }
                    key = (folders, frozenset((name, one.digest) for name, one in held.items()))
                    yield key, Contents({name: one.data for name, one in held.items()}, folders)

    def _found(
        self, names: Mapping[_Folder, Mapping[str, _Folder | _File]]
    ) -> tuple[dict[str, _File], frozenset[str]]:
        """Files and folders that can be reached."""
        files: dict[str, _File] = {}
        folders: set[str] = set()
        waiting = [("", self.root)]
        while waiting:
            prefix, folder = waiting.pop()
            for name, node in names.get(folder, {}).items():
                if isinstance(node, _Folder):
                    folders.add(prefix + name)
                    waiting.append((f"{prefix}{name}/", node))
                else:
                    files[prefix + name] = node
        return files, frozenset(folders)

    def _names(self, edits: Sequence[_Edit]) -> dict[_Folder, dict[str, _Folder | _File]]:
        names: dict[_Folder, dict[str, _Folder | _File]] = {}
        for edit in edits:
            for folder, name in edit.removed:
                names.get(folder, {}).pop(name, None)
            for folder, name, node in edit.added:
                names.setdefault(folder, {})[name] = node
        return names

    def _find(self, path: str) -> _Folder | _File | None:
        node: _Folder | _File | None = self.root
        for part in Path(path).parts:
            node = self.names.get(node, {}).get(part) if isinstance(node, _Folder) else None
        return node

    def _unseen(self, path: str) -> _Folder | _File | None:
        """A file that safetensors has renamed, by a system call of its own."""
        folder, name = self._place(path)
        for other, node in self.names.get(folder, {}).items():
            if other.startswith(".tmp"):
                self._change(((folder, other),), ((folder, name, node),))
                return node
        return None

    def _place(self, path: str) -> tuple[_Folder, str]:
        folder = self._find(os.path.dirname(path))
        assert isinstance(folder, _Folder), path
        return folder, os.path.basename(path)

    def _add(self, path: str, node: _Folder | _File) -> None:
        self._change((), ((*self._place(path), node),))

    def _change(
        self,
        removed: tuple[tuple[_Folder, str], ...],
        added: tuple[tuple[_Folder, str, _Folder | _File], ...],
    ) -> None:
        folders = frozenset(folder for folder, *_ in (*removed, *added))
        self.edits.append(_Edit(removed, added, folders))
        for folder, name in removed:
            del self.names[folder][name]
        for folder, name, node in added:
            self.names.setdefault(folder, {})[name] = node

    def _write(self, node: _Folder | _File | None, operation: Operation) -> None:
        if isinstance(node, _File):  # one without a name is gone with the power
            node.write(operation)

    def _sync(self, node: _Folder | _File | None) -> None:
        if isinstance(node, _File):
            node.sync()
        self.edits = [edit._replace(unsynced=edit.unsynced - {node}) for edit in self.edits]


def contents_after(operations: Sequence[Operation], before: Contents) -> Contents:
    """All that operations leave behind: what must be on the disk if each of them was seen."""
    platter = _Platter(before)
    for operation in operations:
        platter.apply(operation)
    return next(platter.states())[1]


class Outage(NamedTuple):
    """A state in which the disk may be found."""

    contents: Contents
    acknowledged: int
    """The most that had been acknowledged when the power went and left this."""


def states_without_power(
    operations: Sequence[Operation],
    before: Contents,
    acknowledged: Callable[[Sequence[Operation]], int],
) -> list[Outage]:
    """What may be left when the power goes after any operation, each state once."""
    platter = _Platter(before)
    found: dict[Hashable, Outage] = {}
    for number in range(len(operations) + 1):
        least = acknowledged(operations[:number])
        for key, state in platter.states():
            earlier = found.get(key)
            found[key] = Outage(state, max(least, earlier.acknowledged if earlier else 0))
        if number < len(operations):
            platter.apply(operations[number])
    return list(found.values())

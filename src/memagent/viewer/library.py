"""The runs that are shown: run directories that were given, and those in folders that were given.

    library = Library([Path("runs")])
    for listed in library.runs():
        print(listed.id, listed.run.kind, listed.run.state)

A run is known to the browser by its id alone, so no request can name a path.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from memagent.documents.document import Document
from memagent.documents.loaders import MAX_PIPE_BYTES, load, load_bytes
from memagent.errors import DocumentError, RunError
from memagent.run_files import read_file
from memagent.runs import JOURNAL, MANIFEST, METRICS, StoredRun, describe_run, find_run, runs_folder

FileState = tuple[int, int] | None
"""Time of the last change and size of a file; None where there is none."""

MCP = "mcp"
"""Folder beside that of runs where `memagent mcp` keeps its readings."""

_not_plain = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """A run and the id that the browser knows it by.

    Example: ListedRun(id="20260301-093000-a1b2c3-5f1c09", run=StoredRun(...))
    """

    id: str
    run: StoredRun


class Library:
    """Run directories, and folders of them. Runs that appear in a folder later are found."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = [path.resolve() for path in paths]
        self._known: dict[Path, tuple[tuple[FileState, ...], StoredRun]] = {}
        self._lock = threading.Lock()

    def runs(self) -> list[ListedRun]:
        """All runs, the newest first."""
        found = [ListedRun(id=_id_of(path), run=self._described(path)) for path in self._folders()]
        return sorted(found, key=lambda each: (each.run.created, each.run.name), reverse=True)

    def find(self, run_id: str) -> ListedRun:
        """The run with an id. Raises RunError where there is none."""
        for path in self._folders():
            if _id_of(path) == run_id:
                return ListedRun(id=run_id, run=self._described(path))
        raise RunError("there is no such run; it may have been deleted")

    def _folders(self) -> Iterator[Path]:
        seen: set[Path] = set()
        for path in self._paths:
            for folder in [path] if _is_run(path) else _runs_in(path):
                if folder not in seen:
                    seen.add(folder)
                    yield folder

    def _described(self, path: Path) -> StoredRun:
        """The run, read again only when one of its files has changed."""
        state = version_of(path)
        with self._lock:
            known = self._known.get(path)
            if known is None or known[0] != state or known[1].is_in_use:
                known = self._known[path] = (state, describe_run(path, looks_only=True))
            return known[1]


def open_library(names: Sequence[str]) -> Library:
    """The library of what a user names: run directories, names of runs, folders of runs.

    Without a name it is the user's state folder, with the readings of `memagent mcp`. Raises RunError for
    what is none of these.
    """
    if not names:
        return Library([runs_folder(), runs_folder().with_name(MCP)])
    return Library([_named(name) for name in names])


def version_of(path: Path) -> tuple[FileState, ...]:
    """Changes when a run does."""
    return tuple(_state(path / name) for name in (MANIFEST, JOURNAL, METRICS))


def _named(name: str) -> Path:
    path = Path(name).expanduser()
    return path if path.is_dir() and not _is_run(path) else find_run(name)


def _is_run(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _runs_in(folder: Path) -> list[Path]:
    """The runs in a folder; links that lead out of it are not followed."""
    try:
        inside = [path for path in folder.iterdir() if _is_run(path)]
    except OSError:
        return []
    return sorted(path for path in inside if path.resolve() == path)


def _state(path: Path) -> FileState:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _id_of(path: Path) -> str:
    name = _not_plain.sub("-", path.name)[:60].strip("-")
    return f"{name}-{hashlib.sha256(str(path).encode('utf-8', 'surrogateescape')).hexdigest()[:6]}"


# --- texts shown beside runs ----------------------------------------------------------------------

# A text belongs to a reading when its fingerprint is the one that the reading stores. Paths that a run
# directory names are never opened.


STDIN = "stdin"
"""What a run keeps of standard input."""


class Texts:
    """Files and folders whose texts may be shown."""

    def __init__(self, paths: Sequence[Path] = ()) -> None:
        self._paths = list(paths)
        self._found: dict[str, Document] | None = None
        self._lock = threading.Lock()

    def find(self, sha256: str, run: Path) -> Document | None:
        """The text with a fingerprint: one that was given, or what the run keeps of standard input."""
        with self._lock:
            if self._found is None:
                self._found = {document.sha256: document for document in self._load()}
        return self._found.get(sha256) or _kept_input(sha256, run)

    def _load(self) -> Iterator[Document]:
        """All paths as one text, as `memagent ask` reads them, and each path by itself."""
        if self._paths:
            yield load(self._paths)
        if len(self._paths) > 1:
            yield from (load([path]) for path in self._paths)


def _kept_input(sha256: str, run: Path) -> Document | None:
    try:
        document = load_bytes(read_file(run / STDIN, max_bytes=MAX_PIPE_BYTES), STDIN)
    except (DocumentError, RunError, OSError):
        return None
    return document if document.sha256 == sha256 else None

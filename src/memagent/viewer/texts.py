"""Texts that were given to show beside runs: a reading stores where a section lies, not its words.

A text belongs to a reading when its fingerprint is the one that the reading stores. Paths that a run
directory names are never opened.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from memagent.documents.document import Document
from memagent.documents.loaders import MAX_PIPE_BYTES, load, load_bytes
from memagent.errors import DocumentError, RunError
from memagent.run_files import read_file

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

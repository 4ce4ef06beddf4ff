"""Questions about documents in given folders, each a reading on disk that can be continued.

    desk = DocumentDesk(reader, [Path("~/papers")], runs=Path("state/mcp"))
    found = await desk.ask("thesis.pdf", "What was measured?")
    found.answer, found.reading
    await desk.continue_reading(found.reading)      # after the file has grown, or a reading was cut off

Only files inside the folders are opened, links out of them are not followed, and only readings that this desk
began are continued.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from memagent.agent.journal import Journal, read_reading
from memagent.agent.reader import Reader, checked_question
from memagent.agent.trace import Step, Trace
from memagent.documents.chunking import Chunks
from memagent.documents.document import Document
from memagent.documents.loaders import MAX_PIPE_BYTES, load
from memagent.errors import ConfigError, DocumentError, RunError
from memagent.run_files import read_file
from memagent.runs import MANIFEST, default_path

KEY = "desk"
"""Key of a manifest that says which document a reading is of."""
TEXT = "text"
"""File of a run that keeps a text which came with the question."""
MAX_PATH_CHARS = 1000

OnProgress = Callable[[int, int, str], Awaitable[None]]
"""Gets the characters that are read, the characters of the text, and a line for people."""

_name = re.compile(r"[0-9A-Za-z-]{1,80}")
_path = re.compile(r"[^\s].*(?:[/\\].*|\.\w{1,8})")


class Quotation(BaseModel):
    """A quote that an answer rests on."""

    text: str
    where: str
    """File with page or line."""


class DocumentAnswer(BaseModel):
    """What a question about a document gives."""

    answer: str
    reading: str
    """Name of the reading, for `continue_reading`."""
    source: str
    num_sections: int
    """Sections that were read in all."""
    num_calls: int
    """Calls that this question took."""
    citations: list[Quotation] = []


class DocumentDesk:
    """Reads documents inside given folders, and texts that come with a question."""

    def __init__(self, reader: Reader, folders: Sequence[Path], *, runs: Path) -> None:
        """Raises ConfigError for a folder that is not there."""
        self._reader = reader
        self._runs = runs
        self._folders = [folder.expanduser().resolve() for folder in folders]
        for folder in self._folders:
            if not folder.is_dir():
                raise ConfigError(f"there is no folder {folder}; name folders that exist")

    async def ask(
        self, path_or_text: str, question: str, on_progress: OnProgress | None = None
    ) -> DocumentAnswer:
        """Read a document and answer. Raises DocumentError for a file that may not or cannot be read."""
        question = checked_question(question)
        if not names_file(path_or_text):
            document = Document.from_text(path_or_text)
            files = {TEXT: path_or_text.encode("utf-8", "surrogatepass")}
            return await self._read(document, question, None, on_progress, files=files)
        document = await self._load(path_or_text)
        return await self._read(document, question, path_or_text, on_progress)

    async def continue_reading(
        self, reading: str | None = None, on_progress: OnProgress | None = None
    ) -> DocumentAnswer:
        """Finish a reading that was cut off, or read what its file has gained since; the newest without a name.

        Raises RunError where there is no such reading.
        """
        path = self._find(reading)
        manifest = read_reading(path)
        [question] = manifest["questions"]
        kept = manifest.get(KEY)
        name = kept.get("path") if isinstance(kept, dict) else None
        document = await self._load(name) if isinstance(name, str) else _kept_text(path)
        if document.sha256 == manifest["document"]["sha256"]:
            return await self._resume(path, document, question, on_progress)
        return await self._read(document, question, name, on_progress, continues=path)

    async def _read(
        self,
        document: Document,
        question: str,
        name: str | None,
        on_progress: OnProgress | None,
        *,
        files: dict[str, bytes] | None = None,
        continues: Path | None = None,
    ) -> DocumentAnswer:
        chunks = self._reader.chunks(document)
        also = self._reader.continued(continues, [question], document)
        manifest = {**self._reader.identity([question], document), KEY: {"path": name}}
        path = self._runs / default_path().name
        journal = Journal.create(path, manifest, files=files, also=also)
        return await self._answer(journal, chunks, question, on_progress)

    async def _resume(
        self, path: Path, document: Document, question: str, on_progress: OnProgress | None
    ) -> DocumentAnswer:
        chunks = self._reader.chunks(document)
        journal = Journal.open(path, self._reader.identity([question], document))
        return await self._answer(journal, chunks, question, on_progress)

    async def _answer(
        self, journal: Journal, chunks: Chunks, question: str, on_progress: OnProgress | None
    ) -> DocumentAnswer:
        reading = journal.path.name
        reports: list[asyncio.Future[None]] = []
        num_before = journal.replies.usage.calls
        progress = _Progress(chunks, reading)

        def on_step(_: int, step: Step) -> None:
            told = progress.after(step)
            if on_progress is not None:
                reports.append(asyncio.ensure_future(on_progress(*told)))

        try:
            if on_progress is not None:
                await on_progress(0, len(chunks.document.text), f"reading {reading} begins")
            [trace] = await self._reader.read([question], chunks, journal, on_step)
            await asyncio.gather(*reports)
        finally:
            journal.close()
        return _found(trace, reading, num_calls=journal.replies.usage.calls - num_before)

    async def _load(self, name: str) -> Document:
        path = self._allowed(name)
        return await asyncio.to_thread(load, [path])

    def _allowed(self, name: str) -> Path:
        """The file that a name means, with or without the name of its folder, as assistants write it.

        Whether there is one elsewhere is not told.
        """
        parents = [folder.parent for folder in self._folders]
        for place in (*self._folders, *parents):
            with suppress(OSError, ValueError):  # no name of a file: too long, or with a NUL
                path = (place / name).resolve()
                is_ours = any(path.is_relative_to(folder) for folder in self._folders)
                if is_ours and (path.is_file() or path.is_dir()):  # a pipe may never end
                    return path
        folders = ", ".join(map(str, self._folders)) or "none"
        raise DocumentError(
            f"there is no document {name!r:.200} in the folders of this server: {folders}"
        )

    def _find(self, reading: str | None) -> Path:
        if reading is None:
            found = sorted(path.parent for path in self._runs.glob(f"*/{MANIFEST}"))
            if not found:
                raise RunError("there is no reading to continue; ask a document first")
            return found[-1]
        if not _name.fullmatch(reading) or not (self._runs / reading / MANIFEST).is_file():
            raise RunError(f"there is no reading {reading!r:.100} of this server")
        return self._runs / reading


def names_file(path_or_text: str) -> bool:
    """Whether a string is meant as a path: one short line with a separator or an ending."""
    text = path_or_text.strip()
    is_line = "\n" not in text and 0 < len(text) <= MAX_PATH_CHARS
    return is_line and _path.fullmatch(text) is not None and " . " not in text


def _kept_text(path: Path) -> Document:
    try:
        return Document.from_text(
            read_file(path / TEXT, max_bytes=MAX_PIPE_BYTES).decode("utf-8", "surrogatepass")
        )
    except (OSError, ValueError):
        raise RunError(f"the text of the reading {path.name} is gone") from None


class _Progress:
    """How much of a text is read, in whatever order its sections are."""

    def __init__(self, chunks: Chunks, reading: str) -> None:
        self._chunks = chunks
        self._reading = reading
        self._lengths: dict[int, int] = {}
        """Characters of the sections that were read, by where they begin."""

    def after(self, step: Step) -> tuple[int, int, str]:
        """The characters that are read, those of the text, and a line for people."""
        if step.section is not None:
            self._lengths[step.section.start] = step.section.end - step.section.start
        total = len(self._chunks.document.text)
        if step.section is None:
            done = "answered" if step.kind == "answer" else "merged"
            return total, total, f"reading {self._reading}: {done}"
        number = self._chunks.number_at(step.section.start) + 1
        line = f"reading {self._reading}: section {number} read"
        return sum(self._lengths.values()), total, line


def _found(trace: Trace, reading: str, *, num_calls: int) -> DocumentAnswer:
    values: dict[str, Any] = {
        "answer": trace.final_answer or "",
        "reading": reading,
        "source": trace.source,
        "num_sections": trace.num_chunks,
        "num_calls": num_calls,
        "citations": [
            Quotation(text=each.quote.text, where=each.where) for each in trace.citations
        ],
    }
    return DocumentAnswer(**values)

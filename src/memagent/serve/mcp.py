"""Tools for assistants, with the official `mcp` package: questions about documents in given folders, each a reading on
disk that can be continued.

    serve_tools(desk)                               # `ask_document` and `continue_reading`, until standard input ends

    desk = DocumentDesk(reader, [Path("~/papers")], runs=Path("state/mcp"))
    found = await desk.ask("thesis.pdf", "What was measured?")
    found.answer, found.reading
    await desk.continue_reading(found.reading)      # after the file has grown, or a reading was cut off

Only files inside the folders are opened, links out of them are not followed, and only readings that this desk
began are continued. A failure that a user can act on is the tool's error, in one line; progress goes to the client
while it reads.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel

from memagent import blocking
from memagent._version import __version__
from memagent.agent.journal import Journal, read_reading
from memagent.agent.reader import Reader, checked_question
from memagent.agent.trace import Step
from memagent.documents.chunking import Chunks
from memagent.documents.document import Document
from memagent.documents.loaders import MAX_PIPE_BYTES, load
from memagent.errors import ConfigError, DocumentError, MemagentError, RunError
from memagent.run_files import read_file
from memagent.runs import MANIFEST, default_path

KEY = "desk"
"""Key of a manifest that says which document a reading is of."""
TEXT = "text"
"""File of a run that keeps a text which came with the question."""
MAX_PATH_CHARS = 1000
INSTRUCTIONS = (
    "Answers questions about documents of any length: books, reports, logs, folders of sources. The document is "
    "read section by section with a small memory, which takes a model call per section; progress is reported. "
    "Prefer one precise question to several vague ones."
)

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
            return await self._begin(document, question, None, on_progress, files=files)
        document = await self._load(path_or_text)
        return await self._begin(document, question, path_or_text, on_progress)

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
        if document.sha256 != manifest["document"]["sha256"]:
            return await self._begin(document, question, name, on_progress, continues=path)
        journal = Journal.open(path, self._reader.identity([question], document))
        return await self._answer(journal, self._reader.chunks(document), question, on_progress)

    async def _begin(
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

    async def _answer(
        self, journal: Journal, chunks: Chunks, question: str, on_progress: OnProgress | None
    ) -> DocumentAnswer:
        reading, total = journal.path.name, len(chunks.document.text)
        reports: list[asyncio.Future[None]] = []
        num_before = journal.replies.usage.calls
        lengths: dict[int, int] = {}  # of the sections that were read, by where they begin

        def on_step(_: int, step: Step) -> None:
            if on_progress is None:
                return
            if step.section is not None:
                lengths[step.section.start] = step.section.end - step.section.start
                said = f"section {chunks.number_at(step.section.start) + 1} read"
            else:
                said = "answered" if step.kind == "answer" else "merged"
            num_read = total if step.section is None else sum(lengths.values())
            told = on_progress(num_read, total, f"reading {reading}: {said}")
            reports.append(asyncio.ensure_future(told))

        try:
            if on_progress is not None:
                await on_progress(0, total, f"reading {reading} begins")
            [trace] = await self._reader.read([question], chunks, journal, on_step)
            await asyncio.gather(*reports)
        finally:
            journal.close()
        return DocumentAnswer(
            answer=trace.final_answer or "",
            reading=reading,
            source=trace.source,
            num_sections=trace.num_chunks,
            num_calls=journal.replies.usage.calls - num_before,
            citations=[Quotation(text=one.quote.text, where=one.where) for one in trace.citations],
        )

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


# --- the server ----------------------------------------------------------------------------------


def make_server(desk: DocumentDesk) -> MCPServer[None]:
    """The server over a desk."""
    server: MCPServer[None] = MCPServer(
        "memagent", version=__version__, instructions=INSTRUCTIONS, log_level="WARNING"
    )

    @server.tool()
    async def ask_document(path_or_text: str, question: str, ctx: Context) -> DocumentAnswer:
        """Read a document of any length and answer a question about it.

        `path_or_text`: a file or folder inside the folders of this server (PDF, DOCX, EPUB, HTML, Markdown,
        text, code, ...), or the text itself. The answer names a reading that `continue_reading` takes.
        """
        try:
            return await desk.ask(path_or_text, question, ctx.report_progress)
        except MemagentError as error:
            raise ToolError(str(error)) from None

    @server.tool()
    async def continue_reading(ctx: Context, reading: str | None = None) -> DocumentAnswer:
        """Continue a reading: one that was cut off, or one whose file has grown or changed since.

        `reading`: the name that `ask_document` gave or reported; the newest reading without one. What was read
        before and has not changed is not read again.
        """
        try:
            return await desk.continue_reading(reading, ctx.report_progress)
        except MemagentError as error:
            raise ToolError(str(error)) from None

    return server


def serve_tools(desk: DocumentDesk) -> None:
    """Serve over standard input and output until the client closes them."""
    blocking.run(make_server(desk).run_stdio_async())

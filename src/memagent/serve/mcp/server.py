"""The tools `ask_document` and `continue_reading`, with the official `mcp` package.

serve_tools(desk)      # until standard input ends

A failure that a user can act on is the tool's error, in one line; progress goes to the client while it reads.
"""

from __future__ import annotations

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from memagent import blocking
from memagent._version import __version__
from memagent.errors import MemagentError
from memagent.serve.mcp.desk import DocumentAnswer, DocumentDesk

INSTRUCTIONS = (
    "Answers questions about documents of any length: books, reports, logs, folders of sources. The document is "
    "read section by section with a small memory, which takes a model call per section; progress is reported. "
    "Prefer one precise question to several vague ones."
)


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

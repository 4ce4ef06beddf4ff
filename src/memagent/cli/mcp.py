"""`memagent mcp`: documents for assistants, over the Model Context Protocol."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click
from platformdirs import user_state_path

from memagent.cli.shared.console import CommandConsole
from memagent.cli.shared.options import PanelCommand, panel_option, taking
from memagent.cli.shared.run_options import ReaderOptions, open_chosen, open_reader, reader_options
from memagent.plugins import require


@dataclass(frozen=True, slots=True, kw_only=True)
class McpOptions:
    """The options of the command."""

    folders: tuple[Path, ...]
    readings: Path | None
    reader: ReaderOptions


@click.command("mcp", cls=PanelCommand)
@click.argument(
    "folders", nargs=-1, metavar="[FOLDER]...", type=click.Path(path_type=Path, file_okay=False)
)
@panel_option(
    "--readings",
    type=click.Path(path_type=Path),
    panel="Options",
    help="Folder to keep readings in. [default: one in your state folder]",
)
@reader_options(shown=("mode", "window", "chunk_tokens", "prompts", "evidence", "items"))
@taking(McpOptions)
def command(options: McpOptions) -> int:
    """Offer documents in FOLDERS to an assistant that speaks the Model Context Protocol, over standard
    input and output: the tools ask_document and continue_reading.

    \b
      memagent mcp ~/papers ~/notes --base-url http://localhost:8000/v1

    Without a FOLDER only texts that come with a question are read. Nothing outside of the folders is
    opened. Limits on calls and cost hold for the whole time the server runs.
    """
    require("mcp", 'memagent mcp needs mcp; pip install "memagent[mcp]"')
    # imported here: it imports the mcp package
    from memagent.serve.mcp import DocumentDesk, serve_tools

    runs = options.readings or user_state_path("memagent", appauthor=False) / "mcp"
    console = CommandConsole()
    with open_chosen(options.reader.engine.choose(), console) as engine:
        reader = open_reader(
            engine,
            console,
            options.reader.agent,
            tokenizer=options.reader.tokenizer,
            limits=options.reader.limits.open(),
            **options.reader.agent,
        )
        serve_tools(DocumentDesk(reader, options.folders, runs=runs))
    return 0

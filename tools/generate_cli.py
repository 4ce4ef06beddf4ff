"""Write docs/cli.md from the command line's own help, so that the two cannot differ.

python tools/generate_cli.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from memagent.cli.main import app
from memagent.cli.shared.lazy import LazyGroup

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
WIDTH = 88
HEAD = """\
# Command line

This page is written by `tools/generate_cli.py` from the help of the commands. Change the help, then
run `make docs`.
"""


def cli_page() -> str:
    """The page: the help of `memagent` and of each of its commands."""
    context = click.Context(app, info_name="memagent", terminal_width=WIDTH, **app.context_settings)
    return "\n".join([HEAD, *_sections(context)])


def _sections(context: click.Context) -> Iterator[str]:
    """The help of a command, then that of the commands inside it."""
    lines = (line.rstrip() for line in context.get_help().splitlines())
    yield "\n".join([f"## {context.command_path}", "", "```text", *lines, "```", ""])
    group = context.command
    for name in group.list_commands(context) if isinstance(group, click.Group) else []:
        if isinstance(group, LazyGroup) and name == group.default:
            continue  # its help is that of the group
        command = group.get_command(context, name)
        assert command is not None, f"{name} is listed but cannot be loaded"
        yield from _sections(
            click.Context(command, info_name=name, parent=context, terminal_width=WIDTH)
        )


if __name__ == "__main__":
    PAGE.write_text(cli_page(), encoding="utf-8")

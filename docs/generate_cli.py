"""Write docs/cli.md from the command line's own help, so that the two cannot differ.

python docs/generate_cli.py
"""

from __future__ import annotations

from pathlib import Path

import click

from memagent.cli.main import COMMANDS, app

PAGE = Path(__file__).with_name("cli.md")
WIDTH = 88
HEAD = """\
# Command line

This page is written by `docs/generate_cli.py` from the help of the commands. Change the help, then
run `make docs`.
"""


def cli_page() -> str:
    """The page: the help of `memagent` and of each of its commands."""
    context = click.Context(app, info_name="memagent", terminal_width=WIDTH, **app.context_settings)
    sections = [_section("memagent", context)]
    for name in COMMANDS:
        command = app.get_command(context, name)
        assert command is not None, f"{name} is listed but cannot be loaded"
        inner = click.Context(command, info_name=name, parent=context, terminal_width=WIDTH)
        sections.append(_section(f"memagent {name}", inner))
    return "\n".join([HEAD, *sections])


def _section(title: str, context: click.Context) -> str:
    lines = (line.rstrip() for line in context.get_help().splitlines())
    return "\n".join([f"## {title}", "", "```text", *lines, "```", ""])


if __name__ == "__main__":
    PAGE.write_text(cli_page(), encoding="utf-8")

"""`memagent demo`: `memagent ask` on a text that comes with the package."""

from __future__ import annotations

import os
import shlex
from contextlib import chdir
from pathlib import Path

import click
from platformdirs import user_data_path

from memagent.cli.ask import command as ask
from memagent.cli.shared.console import CommandConsole, with_options
from memagent.cli.shared.run_options import named_path, pull_known
from memagent.documents.sample import FACTS, QUESTIONS, town_archive
from memagent.engines import store
from memagent.engines.base import EMBEDDED, opener_of
from memagent.errors import ConfigError, MemagentError
from memagent.files import write_atomically

FILE_NAME = "town-archive.txt"


@click.command("demo")
@click.option(
    "--engine",
    help="Engine as KIND:MODEL, as for `memagent ask`. [default: the embedded model, or a keyword rule "
    "where it cannot be used]",
)
@click.option(
    "--save",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the text to this file, and stop.",
)
@click.option(
    "--run-dir",
    type=named_path,
    metavar="PATH",
    help="Folder to keep the run in. [default: a new one in your state folder]",
)
@click.pass_context
def command(
    context: click.Context, engine: str | None, save: Path | None, run_dir: Path | None
) -> int:
    """Ask two questions of the archive of an invented town, about 12,000 tokens, and show the memory as
    it changes.

    \b
      memagent demo
      memagent demo --engine scripted          # a keyword rule in place of a model
      memagent demo --save archive.txt
      memagent ask archive.txt -q "Who cast the school bell?"
    """
    console = CommandConsole()
    if save is not None:
        _save(save)
        click.echo(save)
        return 0
    text = user_data_path("memagent", appauthor=False) / FILE_NAME
    text.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(text, town_archive().encode())
    chosen = engine or _usable_engine(console)
    arguments = [FILE_NAME, "--engine", chosen, "--show-memory"]
    arguments += [f"--question={question}" for question in QUESTIONS]
    arguments += ["--run-dir", os.path.abspath(run_dir)] if run_dir else []
    with chdir(text.parent), ask.make_context("ask", arguments, parent=context.parent) as asked:
        exit_code: int = ask.invoke(asked)
    for fact in FACTS:
        console.report(f"the text says: {fact}")
    if chosen == EMBEDDED:
        console.report(
            "the embedded model is very small and often wrong; larger ones answer better"
        )
    console.report(f"ask more: memagent ask {shlex.quote(str(text))} -q QUESTION")
    return exit_code


def _save(path: Path) -> None:
    """Write the text. A file with other contents is not overwritten."""
    text = town_archive().encode()
    try:
        if path.exists() and path.read_bytes() != text:
            raise ConfigError(f"{path} exists and has other contents; name another file")
        write_atomically(path, text, mode=0o644)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror})") from None


def _usable_engine(console: CommandConsole) -> str:
    """The embedded model; a keyword rule where it is not installed and cannot be downloaded."""
    try:
        opener_of("local")
        pull_known(store.EMBEDDED, console)
    except MemagentError as error:
        console.print(with_options(str(error), ask))
        console.print("no model can be used here: a keyword rule reads instead (--engine scripted)")
        return "scripted"
    return EMBEDDED

"""`memagent data sources`: the published files that datasets are made from."""

from __future__ import annotations

import click

from memagent.data.sources.cache import cached_path, open_source, sha256_of
from memagent.data.sources.catalogue import SOURCES, Source, find_source
from memagent.errors import ConfigError

HEADINGS = ("NAME", "SIZE", "LICENCE", "WHERE")


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def command(ctx: click.Context) -> None:
    """Files that datasets are made from; without a command, lists them.

    They are fetched when a dataset is built that needs them, or with `pull`, to the user's cache
    folder. A file or folder of your own can stand in for each: `--source NAME=PATH` of `data build`.
    """
    if ctx.invoked_subcommand is None:
        list_sources()


@command.command("list")
def list_command() -> None:
    """Show the sources, their licences, and which are here."""
    list_sources()


@command.command("pull")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def pull_sources(names: tuple[str, ...]) -> None:
    """Fetch sources, or go on where a fetch stopped, and print their paths."""
    for name in names:
        find_source(name)
    for name in names:
        click.echo(open_source(name))


@command.command("path")
@click.argument("name")
def path_of_source(name: str) -> None:
    """Print where a source is, and check that it is whole."""
    if find_source(name).kind != "texts" and not cached_path(name).exists():
        raise ConfigError(f"{name} is not on this machine; run `memagent data sources pull {name}`")
    click.echo(open_source(name))


@command.command("check")
@click.argument("name")
@click.argument("path", type=click.Path())
def check_source(name: str, path: str) -> None:
    """Say whether a file of yours is the published one.

    Any file of the right form can be used; this one tells whether results can be compared.
    """
    source = find_source(name)
    found = sha256_of(open_source(name, path))
    if source.sha256 is None:
        click.echo(f"{found}  (no checksum of {name} is published)")
    elif found == source.sha256:
        click.echo(f"{found}  as published")
    else:
        click.echo(f"{found}  not as published ({source.sha256})")


def list_sources() -> None:
    """One row per source, then what they are."""
    rows = [HEADINGS, *(_row(name, source) for name, source in SOURCES.items())]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())
    click.echo()
    for name, source in SOURCES.items():
        click.echo(f"{name}: {source.what}" + (f"\n  {source.url}" if source.url else ""))


def _row(name: str, source: Source) -> tuple[str, str, str, str]:
    return (
        name,
        f"{source.num_bytes / 1e6:,.0f} MB" if source.num_bytes else "",
        source.licence or "yours",
        str(cached_path(name)) if _is_here(name) else _where(source),
    )


def _where(source: Source) -> str:
    if source.kind == "texts":
        return "a folder of yours"
    return "not fetched" if source.url else "not derived"


def _is_here(name: str) -> bool:
    return SOURCES[name].kind != "texts" and cached_path(name).exists()

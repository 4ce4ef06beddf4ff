"""Options that `memagent train run` and `memagent train sft` share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from memagent.cli.shared.messages import TABLE_METAVAR
from memagent.cli.shared.options import all_options, panel_option
from memagent.cli.shared.run_options import RunOptions
from memagent.data.choices import named_sources

CONFIG = "Config"
RUN = "Run"
"""Headings of the help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What the shared options were given."""

    config: Path | None
    run: RunOptions
    model: str | None
    sources: tuple[str, ...]
    changes: tuple[str, ...]
    cluster: str | None
    max_minutes: float | None
    dry_run: bool
    quiet: bool

    @property
    def named(self) -> Mapping[str, str | None]:
        """Settings that have an option of their own, and their values."""
        return {"model.source": self.model}

    @property
    def all_changes(self) -> list[str]:
        """Everything that changes the config; `--set` comes last and takes precedence."""
        paths = {f"sources.{name}": path for name, path in named_sources(self.sources).items()}
        values = {**self.named, "cluster.address": self.cluster, **paths}
        given = [f"{name}={json.dumps(text)}" for name, text in values.items() if text is not None]
        return [*given, *self.changes]


config_argument = click.argument(
    "config", required=False, type=click.Path(path_type=Path), metavar="[CONFIG]"
)
change_options = all_options(
    panel_option("--model", panel=CONFIG, help="Model in place of the config's."),
    panel_option(
        "--source",
        "sources",
        multiple=True,
        metavar=TABLE_METAVAR,
        panel=CONFIG,
        help="A file or folder of yours in place of a download; may be given several times.",
    ),
    panel_option(
        "--set",
        "changes",
        multiple=True,
        metavar="NAME=VALUE",
        panel=CONFIG,
        help="Any setting of the config, such as optim.lr=2e-6; may be given several times.",
    ),
)
mode_options = all_options(
    panel_option(
        "--cluster",
        metavar="ADDRESS",
        panel=RUN,
        help="Train on a Ray cluster: HOST:PORT of its head node; auto: one on this machine that ends with "
        "the run; none: without the cluster of the config.",
    ),
    panel_option(
        "--max-minutes",
        type=click.FloatRange(min=0, min_open=True),
        panel=RUN,
        help="Start no step after this many minutes; then validate, save and export as after the last one.",
    ),
    panel_option(
        "--dry-run",
        is_flag=True,
        panel=RUN,
        help="Load and check everything, draw a task of every source, print the plan, stop.",
    ),
    panel_option("--quiet", is_flag=True, panel=RUN, help="Show no progress."),
)

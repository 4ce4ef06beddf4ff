"""`memagent train sft CONFIG.toml`: the warm start of a config, and nothing after it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from memagent.cli.shared.options import PanelCommand, panel_option, taking
from memagent.cli.shared.run_options import run_options
from memagent.cli.train.options import (
    CONFIG,
    TrainOptions,
    change_options,
    config_argument,
    mode_options,
)
from memagent.cli.train.run import run_training
from memagent.rl.settings import TrainConfig, read_warm_start


@dataclass(frozen=True, slots=True, kw_only=True)
class SftOptions(TrainOptions):
    """What the options were given."""

    files: tuple[Path, ...]


@click.command("sft", cls=PanelCommand)
@config_argument
@panel_option(
    "--file",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    panel=CONFIG,
    help="Conversations to train on, as `memagent data traces` writes them; in place of the config's.",
)
@change_options
@run_options("checkpoints and metrics")
@mode_options
@taking(SftOptions)
def command(options: SftOptions) -> int:
    """Train on given replies: conversations in files, or replies written by rule for tasks.

    \b
      memagent train sft my_run.toml --run-dir runs/warm
      memagent train sft my_run.toml --file traces.jsonl --set warm_start.steps=200
      memagent train --resume runs/warm

    This is the warm start of a training config alone, [warm_start], with the same packing. The result
    is in the run's folder as `final`; set it as model.adapter in the config that continues from it.
    """

    def read(path: Path) -> TrainConfig:
        return read_warm_start(path, changes=options.all_changes, files=options.files)

    return run_training(options, read)

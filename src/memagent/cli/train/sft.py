"""`memagent train sft CONFIG.toml`: the warm start of a config, and nothing after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from memagent.cli.shared.options import PanelCommand, panel_option
from memagent.cli.shared.run_options import run_options
from memagent.cli.train.run import Training, change_options, manner_options
from memagent.errors import ConfigError
from memagent.rl.settings import TrainConfig, read_config


@click.command("sft", cls=PanelCommand)
@click.argument("config", required=False, type=click.Path(path_type=Path), metavar="[CONFIG.toml]")
@panel_option(
    "--file",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    panel="What is trained",
    help="Conversations to learn from, as `memagent data traces` writes them; in place of the config's.",
)
@panel_option("--model", panel="What is trained", help="Model in place of the config's.")
@change_options
@run_options("checkpoints and metrics")
@manner_options
def command(**options: Any) -> int:
    """Learn from given replies: conversations in files, or replies written by rule for tasks.

    \b
      memagent train sft my_run.toml --run-dir runs/warm
      memagent train sft my_run.toml --file traces.jsonl --set warm_start.steps=200
      memagent train --resume runs/warm

    This is the warm start of a training config alone, [warm_start], with the same packing. The result
    is in the run's folder as `final`; name an adapter as model.adapter in the config that goes on from it.
    """
    return WarmStart(options).run()


class WarmStart(Training):
    """One call of the command."""

    def _config(self, path: Path) -> TrainConfig:
        files = [str(file) for file in self._options["files"]]
        changes = [*self._changes(), "steps=0"]
        if files:
            changes += [f"warm_start.files={files!r}", "warm_start.tasks=[]"]
        config = read_config(path, changes=changes)
        if config.warm_start is None:
            raise ConfigError(
                f"{path} has no [warm_start]; say there what is learnt, and for how long"
            )
        return config

"""`memagent train CONFIG.toml`: rollouts, updates, validation, checkpoints."""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape

from memagent.cli.models import pull_if_known
from memagent.cli.shared.interrupt import stop_like_ctrl_c
from memagent.cli.shared.options import PanelCommand, panel_option
from memagent.cli.shared.run_options import all_options, run_options
from memagent.data.choices import named_sources
from memagent.engines.base import check_engine
from memagent.errors import ConfigError, EngineError, MemagentError, RunError
from memagent.rl.settings import TrainConfig, parse_config, read_config
from memagent.runs import Run
from memagent.tracking import METRICS

if TYPE_CHECKING:
    from memagent.rl.setup import Setup

KIND = "train"
INTERRUPTED = 130
MAY_CHANGE = ("steps", "sources", "checkpoint", "logging", "validation", "update.max_tokens",
              "update.checkpointing", "update.compiled", "rollout.concurrency", "rollout.seconds",
              "rollout.engine_settings")  # fmt: skip
"""Settings of a run that may be set anew when it goes on."""

change_options = all_options(
    panel_option(
        "--source",
        "sources",
        multiple=True,
        metavar="[NAME=]PATH",
        panel="What is trained",
        help="A file or folder of yours in place of a download; may be given several times.",
    ),
    panel_option(
        "--set",
        "changes",
        multiple=True,
        metavar="NAME=VALUE",
        panel="What is trained",
        help="Anything in the config, such as optim.lr=2e-6; may be given several times.",
    ),
)
manner_options = all_options(
    panel_option(
        "--dry-run",
        is_flag=True,
        panel="Run",
        help="Load and check everything, tell the plan, stop.",
    ),
    panel_option("--quiet", is_flag=True, panel="Run", help="Show no progress."),
)


@click.command("run", cls=PanelCommand)
@click.argument("config", required=False, type=click.Path(path_type=Path), metavar="[CONFIG.toml]")
@panel_option(
    "--agent",
    panel="What is trained",
    help="Agent in place of the config's: memory, calculator, single, or path.py:function.",
)
@panel_option(
    "--reward",
    panel="What is trained",
    help="Reward in place of the config's: a grader such as strict, or path.py:function.",
)
@panel_option("--model", panel="What is trained", help="Model in place of the config's.")
@change_options
@run_options("checkpoints, metrics and rollouts")
@manner_options
def command(**options: Any) -> int:
    """Train by reinforcement learning, after a warm start if the config has one.

    \b
      memagent train configs/train/tiny_cpu.toml --run-dir runs/tiny
      memagent train my_run.toml --agent my_agent.py:agent --set optim.lr=2e-6
      memagent train --resume runs/tiny
      memagent train --resume runs/tiny --set steps=200

    The run's folder gets metrics.jsonl, checkpoints, a few rollouts of each step to read, the answers
    of each validation, and at the end the trained model or adapter as `final`. A run may be killed
    at any time: --resume goes on from the newest checkpoint and takes over finished rollouts.

    Exit codes: 0 done, 2 something to correct in the input, 3 the engine failed again and again, 130
    interrupted. After 3 and 130 everything finished is kept and the command to go on is printed.
    """
    return Training(options).run()


class Training:
    """One call of the command."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._console = Console(stderr=True)

    def run(self) -> int:
        """The whole command; its exit code."""
        check_engine("local")  # torch and transformers train, too
        resume: Path | None = self._options["resume"]
        if (resume is None) == (self._options["config"] is None):
            raise ConfigError("name a config, or a run to go on with as --resume RUN")
        if resume is not None:
            return self._resume(resume)
        config = self._config(self._options["config"])
        if config.model.source is not None:
            pull_if_known(config.model.source, is_quiet=self._options["quiet"])
        if self._options["dry_run"]:
            return asyncio.run(self._dry_run(config))
        manifest = {"kind": KIND, "config": config.model_dump(mode="json")}
        with Run.create(self._options["run_dir"], manifest) as run:
            try:
                return asyncio.run(self._train(config, run.path))
            except MemagentError:
                if not (run.path / METRICS).exists():
                    run.discard_if_empty()  # nothing has begun
                raise

    # --- configs -------------------------------------------------------------------------------

    def _config(self, path: Path) -> TrainConfig:
        return read_config(path, changes=self._changes())

    def _changes(self) -> list[str]:
        """What the command line sets, as changes of the config."""
        named = {"agent.name": "agent", "agent.reward": "reward", "model.source": "model"}
        changes = [
            f"{name}={json.dumps(self._options[option])}"
            for name, option in named.items()
            if self._options.get(option) is not None
        ]
        sources = named_sources(self._options["sources"])
        changes += [f"sources.{name}={json.dumps(path)}" for name, path in sources.items()]
        return [*changes, *self._options["changes"]]

    def _resume(self, path: Path) -> int:
        with Run.open(path) as run:
            if run.manifest.get("kind") != KIND:
                raise RunError(f"{path} holds no training run; it was made by another command")
            changes = self._changes()
            for change in changes:
                name = change.partition("=")[0].strip()
                if not any(name == one or name.startswith(f"{one}.") for one in MAY_CHANGE):
                    raise ConfigError(
                        f"{name} cannot change while a run goes on; begin a new one with it (may change: "
                        f"{', '.join(MAY_CHANGE)})"
                    )
            config = parse_config(run.manifest["config"], changes=changes)
            return asyncio.run(self._train(config, run.path))

    # --- the run -------------------------------------------------------------------------------

    async def _train(self, config: TrainConfig, run: Path) -> int:
        from memagent.cli.train.progress import TrainProgress
        from memagent.rl.trainer import open_trainer
        from memagent.rl.weights.checkpoint import export, latest_checkpoint

        stop_like_ctrl_c()
        with TrainProgress(self._console, is_quiet=self._options["quiet"]) as progress:
            try:
                async with open_trainer(config, run, watch=progress) as trainer:
                    self._tell(_plan(trainer.setup))
                    await trainer.train()
            except asyncio.CancelledError:
                self._tell_kept(run, "interrupted")
                return INTERRUPTED
            except EngineError as error:
                self._tell_kept(run, str(error))
                return error.exit_code
        checkpoint = latest_checkpoint(run)
        if checkpoint is None:
            raise RunError(f"{run} holds no checkpoint, which should be there after the last step")
        final, part = run / "final", run / "final.part"
        for folder in (part, final):  # of a shorter run, or of one that was killed here
            shutil.rmtree(folder, ignore_errors=True)
        export(checkpoint, part)
        part.replace(final)
        self._tell(f"trained: {final}")
        self._tell(f"run: {run}")
        return 0

    async def _dry_run(self, config: TrainConfig) -> int:
        from memagent.rl.setup import set_up

        with TemporaryDirectory() as folder:
            async with AsyncExitStack() as stack:
                setup = await set_up(config, Path(folder), stack)
                self._tell(_plan(setup))
        self._tell("dry run: everything can be opened; nothing was trained")
        return 0

    def _tell_kept(self, run: Path, reason: str) -> None:
        self._tell(f"stopped: {reason}")
        self._tell(
            f"what is finished is kept; go on with: memagent train --resume {shlex.quote(str(run))}"
        )

    def _tell(self, text: str) -> None:
        if not self._options["quiet"]:
            self._console.print(escape(text), soft_wrap=True, highlight=False)


def _plan(setup: Setup) -> str:
    """What will be done, in a few lines."""
    config, trained = setup.config, setup.trained
    kind = "adapter" if trained.has_adapter else "all weights"
    lines = [
        f"model: {config.model.source or 'from random weights'}, {trained.num_parameters / 1e6:,.1f}M "
        f"parameters; trained: {kind}, {trained.num_trained / 1e6:,.2f}M, on {trained.model.device}",
        f"agent: {config.agent.name}, reward {config.agent.reward}; tasks: "
        + ", ".join(dict.fromkeys(source.name for source in setup.sources)),
    ]
    if config.warm_start is not None:
        lines.append(
            f"warm start: {config.warm_start.steps} steps of {config.warm_start.batch} examples"
        )
    if config.steps:
        rollout = config.rollout
        lines.append(
            f"training: {config.steps} steps of {rollout.prompts} x {rollout.group_size} rollouts, "
            f"{config.update.updates} updates each, driver {rollout.driver}"
        )
    if setup.validation is not None:
        lines.append(f"validation: {len(setup.validation.examples)} questions")
    return "\n".join(lines)

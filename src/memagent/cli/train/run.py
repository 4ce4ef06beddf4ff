"""`memagent train CONFIG.toml`: rollouts, updates, validation, checkpoints."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from memagent.cli.models import pull_if_known
from memagent.cli.shared.interrupt import stop_like_ctrl_c
from memagent.cli.shared.options import PanelCommand, panel_option
from memagent.cli.shared.run_options import run_options
from memagent.cli.train.options import (
    CONFIG,
    TrainOptions,
    change_options,
    config_argument,
    mode_options,
)
from memagent.engines.base import check_engine
from memagent.errors import ConfigError, EngineError
from memagent.rl.settings import TrainConfig, read_config

if TYPE_CHECKING:
    from memagent.rl.setup import Setup
    from memagent.rl.trainer import Trainer

INTERRUPTED = 130


@click.command("run", cls=PanelCommand)
@config_argument
@panel_option(
    "--agent",
    panel=CONFIG,
    help="Agent in place of the config's: memory, calculator, single, or path.py:function.",
)
@panel_option(
    "--reward",
    panel=CONFIG,
    help="Reward in place of the config's: a grader such as strict, or path.py:function.",
)
@change_options
@run_options("checkpoints, metrics and rollouts")
@mode_options
def command(**options: Any) -> int:
    """Train by reinforcement learning, after a warm start if the config has one.

    \b
      memagent train configs/train/tiny_cpu.toml --run-dir runs/tiny
      memagent train my_run.toml --agent my_agent.py:agent --set optim.lr=2e-6
      memagent train --resume runs/tiny
      memagent train --resume runs/tiny --set steps=200

    The run's folder gets metrics.jsonl, checkpoints, a few rollouts of each step to read, the answers
    of each validation, and at the end the trained model or adapter as `final`. A run may be killed
    at any time: --resume continues from the newest checkpoint and reuses finished rollouts.

    Exit codes: 0 done, 2 an error in the input, 3 the engine keeps failing, 130 interrupted. After 3
    and 130 all finished steps are saved, and the command that resumes the run is printed.
    """
    parsed = TrainOptions(**options)
    return run_training(parsed, lambda path: read_config(path, changes=parsed.all_changes))


def run_training(options: TrainOptions, read: Callable[[Path], TrainConfig]) -> int:
    """Start or resume a run; the exit code. `read` reads the config of a new one."""
    check_engine("local")  # training needs torch and transformers, too
    if (options.resume is None) == (options.config is None):
        raise ConfigError("name a config, or a run to resume as --resume RUN")
    from memagent.cli.train.progress import TrainConsole
    from memagent.rl.trainer import open_training, resume_training

    with TrainConsole(Console(stderr=True), is_quiet=options.quiet) as console:
        if options.resume is not None:
            opened = resume_training(options.resume, changes=options.all_changes, callbacks=console)
            return asyncio.run(_train(opened, console.report))
        assert options.config is not None
        config = read(options.config)
        if config.model.source is not None:
            pull_if_known(config.model.source, is_quiet=options.quiet)
        if options.dry_run:
            return asyncio.run(_dry_run(config, console.report))
        opened = open_training(config, options.run_dir, callbacks=console)
        return asyncio.run(_train(opened, console.report))


async def _train(
    opened: AbstractAsyncContextManager[Trainer], report: Callable[[str], None]
) -> int:
    stop_like_ctrl_c()
    async with opened as trainer:
        report(_plan(trainer.setup))
        try:
            final = await trainer.train()
        except asyncio.CancelledError:
            reason, exit_code = "interrupted", INTERRUPTED
        except EngineError as error:
            reason, exit_code = str(error), error.exit_code
        else:
            report(f"trained: {final}")
            report(f"run: {trainer.run_dir}")
            return 0
    report(f"stopped: {reason}")
    path = shlex.quote(str(trainer.run_dir))
    report(f"all finished steps are saved; resume with: memagent train --resume {path}")
    return exit_code


async def _dry_run(config: TrainConfig, report: Callable[[str], None]) -> int:
    from memagent.rl.setup import open_setup

    with TemporaryDirectory() as folder:
        async with open_setup(config, Path(folder)) as setup:
            report(_plan(setup))
    report("dry run: everything can be opened; nothing was trained")
    return 0


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

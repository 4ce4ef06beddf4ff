"""`memagent train CONFIG.toml`: rollouts, updates, validation, checkpoints."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memagent.cli.shared.console import TABLE_METAVAR, CommandConsole, resumable, stop_like_ctrl_c
from memagent.cli.shared.options import PanelCommand, all_options, panel_option, taking
from memagent.cli.shared.run_options import RunOptions, pull_known, run_options
from memagent.config import find_config
from memagent.data.choices import named_sources
from memagent.errors import ConfigError
from memagent.plugins import require
from memagent.rl.settings import TrainConfig, read_config, read_warm_start

if TYPE_CHECKING:
    from memagent.rl.setup import Setup
    from memagent.rl.trainer import Trainer, TrainProgress
    from memagent.rl.weights.gguf_export import GgufKind


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


LIBRARIES = ("numpy", "torch", "transformers", "peft", "safetensors")
"""What training needs of the extra `train`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTrainOptions(TrainOptions):
    """What the options were given."""

    agent: str | None
    reward: str | None

    @property
    def named(self) -> Mapping[str, str | None]:
        """Settings that have an option of their own, and their values."""
        return {"model.source": self.model, "agent.name": self.agent, "agent.reward": self.reward}


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
@taking(RunTrainOptions)
def command(options: RunTrainOptions) -> int:
    """Train by reinforcement learning, after a warm start if the config has one.

    \b
      memagent train tiny_cpu --run-dir runs/tiny
      memagent train my_run.toml --agent my_agent.py:agent --set optim.lr=2e-6
      memagent train --resume runs/tiny
      memagent train --resume runs/tiny --set steps=200

    CONFIG is a TOML file, or the name of a config that comes with memagent; a wrong name lists them. A config
    can name code, which is run, and addresses, which get the texts: read one of a stranger before you run it.

    The run's folder gets metrics.jsonl, checkpoints, a few rollouts of each step to read, the answers
    of each validation, and at the end the trained model or adapter as `final`. A run may be killed
    at any time: --resume continues from the newest checkpoint and reuses finished rollouts.

    Exit codes: 0 done, 2 an error in the input, 3 the engine keeps failing, 130 interrupted. After 3
    and 130 all finished steps are saved, and the command that resumes the run is printed.
    """
    return run_training(options, lambda path: read_config(path, changes=options.all_changes))


def check_libraries() -> None:
    """Raise ConfigError when a library that training needs is not installed."""
    for library in LIBRARIES:
        require(library, f'training needs {library}; pip install "memagent[train]"')


def run_training(options: TrainOptions, read: Callable[[Path], TrainConfig]) -> int:
    """Start or resume a run; the exit code. `read` reads the config of a new one."""
    check_libraries()
    if (options.run.resume is None) == (options.config is None):
        raise ConfigError("name a config, or a run to resume as --resume RUN")
    console = CommandConsole(is_quiet=options.quiet)
    config = None
    if options.config is not None:  # before anything slow is loaded
        path = find_config("train", options.config)
        if path != options.config:
            console.report(f"config: {path}")
        config = read(path)
    with console.notice("loading the libraries of training"):
        from memagent.cli.train.progress import TrainConsole
        from memagent.rl.trainer import config_of_run, open_training, resume_training

    with TrainConsole(console) as callbacks:
        if options.run.resume is not None:
            if options.dry_run:
                config = config_of_run(options.run.resume, changes=options.all_changes)
                return asyncio.run(_dry_run(config, console, options.run.resume))
            opened = resume_training(
                options.run.resume,
                changes=options.all_changes,
                callbacks=callbacks,
                max_minutes=options.max_minutes,
            )
            return asyncio.run(_train(opened, console))
        assert config is not None
        if config.model.source is not None:
            pull_known(config.model.source, console)
        if options.dry_run:
            return asyncio.run(_dry_run(config, console))
        opened = open_training(
            config, options.run.run_dir, callbacks=callbacks, max_minutes=options.max_minutes
        )
        return asyncio.run(_train(opened, console))


async def _train(opened: AbstractAsyncContextManager[Trainer], console: CommandConsole) -> int:
    stop_like_ctrl_c()
    async with opened as trainer:
        console.report(_plan(trainer.setup))
        run = _TrainingRun(trainer.run_dir)
        kept = "checkpoints and finished rollouts are kept"
        with resumable(run, console, kept=kept, command="memagent train"):
            final = await trainer.train()
    if not trainer.is_finished:
        path = shlex.quote(str(trainer.run_dir))
        console.report(f"the time is over; resume with: memagent train --resume {path}")
    console.report(f"trained: {final}")
    console.report(f"run: {trainer.run_dir}")
    return 0


@dataclass(frozen=True, slots=True)
class _TrainingRun:
    """A run that has started: it is never empty."""

    path: Path

    def discard_if_empty(self) -> bool:
        return False


async def _dry_run(
    config: TrainConfig, console: CommandConsole, run_dir: Path | None = None
) -> int:
    from memagent.rl.trainer import try_setup

    async with try_setup(config, run_dir) as (setup, progress):
        console.report(_plan(setup))
        if run_dir is not None:
            console.report(_resumed(config, progress))
    if config.cluster is not None:
        console.report(
            f"cluster: there is room for {config.cluster.trainer_ranks} trainer ranks and {config.cluster.engine_replicas} "
            "engine replicas; one of each was started"
        )
    console.report("dry run: everything can be opened; nothing was trained")
    return 0


def _resumed(config: TrainConfig, progress: TrainProgress) -> str:
    if config.warm_start is not None and progress.warm_step < config.warm_start.steps:
        done = f"step {progress.warm_step} of {config.warm_start.steps} of the warm start"
    else:
        done = f"step {progress.step} of {config.steps}"
    return f"resumes after {done}"


def _plan(setup: Setup) -> str:
    """What will be done, in a few lines."""
    config, trained = setup.config, setup.backend.facts
    kind = "adapter" if trained.has_adapter else "all weights"
    lines = [
        f"model: {config.model.source or 'from random weights'}, {trained.num_parameters / 1e6:,.1f}M "
        f"parameters; trained: {kind}, {trained.num_trained / 1e6:,.2f}M, on {trained.device}",
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


# --- the warm start alone -------------------------------------------------------------------------


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
def sft(options: SftOptions) -> int:
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


# --- export ---------------------------------------------------------------------------------------


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--step", type=click.IntRange(min=1), help="Checkpoint to take. [default: the newest]"
)
@click.option(
    "--best", is_flag=True, help="Take the checkpoint with the highest validation reward."
)
@click.option(
    "--merge", is_flag=True, help="Merge an adapter into its model, and write the whole model."
)
@click.option(
    "--gguf",
    type=click.Choice(["f16", "q8_0"]),
    help="Merge an adapter into its model, a GGUF file, and write the whole as one, for llama.cpp.",
)
@click.option(
    "--gguf-adapter",
    is_flag=True,
    help="Write an adapter of a GGUF file as a GGUF file of its own, for llama.cpp.",
)
@click.option(
    "--model",
    help="Model that the adapter is for: a pulled one or a path. [default: the one it names]",
)
def export_run(
    run: Path,
    out: Path,
    step: int | None,
    best: bool,
    merge: bool,
    gguf: GgufKind | None,
    gguf_adapter: bool,
    model: str | None,
) -> int:
    """Write the model or adapter of a run as a folder that transformers, peft and vLLM load, or as a GGUF file.

    \b
      memagent train export runs/tiny my-adapter
      memagent train export runs/tiny my-model --merge
      memagent train export runs/tiny my-best-model --best
      memagent train export adapters/memagent-1.5b reader.gguf --gguf q8_0 --model qwen2.5-coder-1.5b
      memagent train export adapters/memagent-1.5b reader.gguf --gguf-adapter --model qwen2.5-coder-1.5b
      memagent ask report.pdf -q "..." --engine local:smollm2-135m --set adapter=my-adapter

    RUN may also be the folder of an adapter.
    """
    check_libraries()
    if best and step is not None:
        raise ConfigError("give either --step or --best")
    from memagent.rl.weights.checkpoint import export, export_gguf, find_checkpoint

    checkpoint = find_checkpoint(run, step, best=best)
    if gguf is not None and gguf_adapter:
        raise ConfigError("give either --gguf or --gguf-adapter")
    if gguf is not None or gguf_adapter:
        export_gguf(checkpoint, out, kind=gguf, model=model)
    else:
        export(checkpoint, out, merge=merge, model=model)
    click.echo(f"{out}: from {checkpoint.name}")
    return 0

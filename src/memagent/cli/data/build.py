"""`memagent data build`: make datasets from a recipe, or from one task."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Self, get_args

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from memagent.cli.shared.progress import duration
from memagent.config import with_override
from memagent.data.build import (
    BuildJob,
    BuildProgress,
    Storing,
    build,
    is_built,
    refuse_to_overwrite,
)
from memagent.data.choices import named_sources, source_settings
from memagent.data.manifest import Manifest, figure_path
from memagent.data.recipes import read_recipe
from memagent.data.tasks.registry import TASKS
from memagent.errors import ConfigError

SECONDS_BETWEEN_LINES = 10.0
TASK_OPTIONS = ("docs", "tokens", "split", "seed", "tokenizer")


@click.command()
@click.argument("what")
@click.option("--out", type=Path, help="File for a task, folder for a recipe (default: here).")
@click.option("--num", type=int, help="Examples to make; for a recipe, in each file.")
@click.option("--tokens", type=int, help="Length of the text in tokens (task only).")
@click.option("--docs", type=int, help="Length of the text in documents (task only).")
@click.option("--split", help="Questions to train on or to measure with: train, dev (task only).")
@click.option("--seed", type=int, help="Every example depends on it and on its index.")
@click.option(
    "--tokenizer", help="Counts lengths: a pulled model, a hub id, a path, tiktoken:NAME."
)
@click.option(
    "--source",
    "sources",
    multiple=True,
    metavar="[NAME=]PATH",
    help="A file or folder of yours in place of a download; a folder is searched for all names.",
)
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="NAME=VALUE",
    help="Any other setting of the task, or of the recipe, such as datasets.0.num=16.",
)
@click.option(
    "--store",
    type=click.Choice(get_args(Storing)),
    help="Write texts (text), or only what they are made again from (origin); auto: up to 64K tokens.",
)
@click.option(
    "--processes", type=int, help="Processes that make examples (default: one for each core)."
)
@click.option("--force", is_flag=True, help="Replace files that are there.")
@click.option("--figure/--no-figure", default=True, help="Draw where the evidence stands.")
@click.option("--dry-run", is_flag=True, help="Say what would be built, and stop.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
def command(**options: Any) -> None:
    """Make datasets from a recipe (a TOML file), or from one task.

    \b
    memagent data build configs/data/hotpotqa_series.toml --out data
    memagent data build hotpotqa --docs 200 --num 128 --split dev --seed 7 --out dev.jsonl

    The same settings give the same bytes, whatever the number of processes. Beside each file there is
    a manifest: settings, fingerprints, lengths, and how deep in the text the evidence stands. A build
    that was stopped goes on when the same command is given again.
    """
    is_recipe = options["what"].endswith(".toml")
    jobs = _recipe_jobs(options) if is_recipe else [_task_job(options)]
    if options["dry_run"]:
        for job in jobs:
            click.echo(f"{job.out}: {job.num} x {job.task}, {_told(job.settings)}")
        return
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for job in jobs:
        if is_recipe and not options["force"] and is_built(job):
            console.print(f"{job.out} exists and is complete", markup=False)
            continue
        if not options["force"]:
            refuse_to_overwrite(job.out)
        with BuildBar(job, console=console, is_quiet=options["quiet"]) as progress:
            manifest = build(
                job,
                processes=options["processes"] or os.cpu_count() or 1,
                force=options["force"],
                figure=options["figure"],
                on_progress=progress,
            )
        click.echo(job.out)
        if not options["quiet"]:
            console.print(_summary(manifest), markup=False)
            if options["figure"] and manifest.depth and not figure_path(job.out).exists():
                console.print(
                    'no figure of depths: it needs matplotlib, pip install "memagent[eval]"',
                    markup=False,
                )


def _recipe_jobs(options: dict[str, Any]) -> list[BuildJob]:
    given = [name for name in ("tokens", "docs", "split") if options[name] is not None]
    if given:
        raise ConfigError(f"--{given[0]} is for a single task; change a recipe with --set")
    changes = [
        f"{name}={options[name]}"
        for name in ("seed", "tokenizer", "store")
        if options[name] is not None
    ]
    recipe = read_recipe(Path(options["what"]), changes=[*changes, *options["changes"]])
    jobs = recipe.jobs(options["out"] or Path(), sources=options["sources"])
    if options["num"] is None:
        return jobs
    return [
        BuildJob(
            task=job.task, settings=job.settings, num=options["num"], out=job.out, store=job.store
        )
        for job in jobs
    ]


def _task_job(options: dict[str, Any]) -> BuildJob:
    task = options["what"]
    if task not in TASKS and Path(task).exists():
        raise ConfigError(f"{task} is no task; a recipe is a file that ends in .toml")
    for name in ("num", "out"):
        if options[name] is None:
            raise ConfigError(f"give --{name}: " + _NEEDED[name])
    settings: dict[str, Any] = source_settings(task, named_sources(options["sources"]))
    settings |= {name: options[name] for name in TASK_OPTIONS if options[name] is not None}
    for change in options["changes"]:
        settings = with_override(settings, change)
    return BuildJob(
        task=task,
        settings=settings,
        num=options["num"],
        out=options["out"],
        store=options["store"] or "auto",
    )


_NEEDED = {"num": "how many examples to make", "out": "the file to write, such as dev.jsonl"}


def _told(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def _summary(manifest: Manifest) -> str:
    parts = [f"{manifest.num_examples:,} examples", f"{manifest.num_bytes / 1e6:,.1f} MB"]
    if manifest.tokens is not None:
        parts.append(f"{manifest.tokens.min:,} to {manifest.tokens.max:,} tokens")
    if manifest.num_with_text < manifest.num_examples:
        parts.append(f"{manifest.num_examples - manifest.num_with_text:,} without their text")
    if manifest.depth is not None and manifest.depth.p_value is not None:
        parts.append(f"evidence evenly spread: p = {manifest.depth.p_value:.3f}")
    return "  " + ", ".join(parts)


class BuildBar:
    """A bar with the time left on a terminal, now and then a line elsewhere."""

    def __init__(self, job: BuildJob, *, console: Console, is_quiet: bool) -> None:
        self._name = job.out.name
        self._console = console
        self._is_quiet = is_quiet
        self._started = self._last_line = time.monotonic()
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=is_quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task(self._name, total=job.num)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def __call__(self, progress: BuildProgress) -> None:
        num_new = progress.num_done - progress.num_resumed
        if num_new == 0 and progress.num_resumed and not self._is_quiet:
            self._print(f"{self._name}: going on after {progress.num_resumed} examples")
        self._bar.update(self._task, completed=progress.num_done)
        now = time.monotonic()
        if self._console.is_terminal or self._is_quiet or not num_new:
            return
        if now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            left = (progress.num_total - progress.num_done) * (now - self._started) / num_new
            done = f"{progress.num_done} of {progress.num_total}"
            self._print(f"{self._name}: {done}, {duration(left)} left")

    def _print(self, text: str) -> None:
        self._bar.console.print(text, markup=False)

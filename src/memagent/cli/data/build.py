"""`memagent data build`: build datasets from a recipe, or from one task."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import click

from memagent.cli.shared.console import TABLE_METAVAR, CommandConsole
from memagent.cli.shared.options import taking
from memagent.cli.shared.progress import ProgressFrame, duration, size_text
from memagent.cli.shared.run_options import cluster_option, joined
from memagent.cluster_workers import ClusterExecutor
from memagent.data.build import BuildJob, BuildProgress, Storing
from memagent.data.inspection import Manifest, figure_path
from memagent.data.recipes import BuildRequest, build_datasets


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """The options of the command."""

    request: BuildRequest
    processes: int | None
    cluster: str | None
    force: bool
    figure: bool
    dry_run: bool
    quiet: bool


@click.command()
@click.argument("what")
@click.option("--out", type=Path, help="File for a task, folder for a recipe (default: here).")
@click.option("--num", type=int, help="Examples to build; for a recipe, in each file.")
@click.option("--tokens", type=int, help="Length of the text in tokens (task only).")
@click.option("--docs", type=int, help="Length of the text in documents (task only).")
@click.option("--split", help="Questions to train on or to evaluate with: train, dev (task only).")
@click.option("--seed", type=int, help="Every example depends on it and on its index.")
@click.option(
    "--tokenizer", help="Counts lengths: a pulled model, a hub id, a path, tiktoken:NAME."
)
@click.option(
    "--source",
    "sources",
    multiple=True,
    metavar=TABLE_METAVAR,
    help="A file or folder of yours in place of a download; a folder stands for all it holds.",
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
    help="Write texts (text), or only their origin (origin); auto: texts up to 64K tokens.",
)
@click.option(
    "--processes", type=click.IntRange(min=1), help="Worker processes (default: one for each core)."
)
@cluster_option
@click.option("--force", is_flag=True, help="Replace files that exist.")
@click.option("--figure/--no-figure", default=True, help="Plot the depth of the evidence.")
@click.option("--dry-run", is_flag=True, help="Print what would be built, and stop.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@taking(BuildOptions)
def command(options: BuildOptions) -> int:
    """Build datasets from a recipe (a TOML file, or the name of one that comes with memagent), or from
    one task.

    \b
    memagent data build smoke --out data
    memagent data build hotpotqa --docs 200 --num 128 --split dev --seed 7 --out dev.jsonl

    The same settings give the same bytes, whatever the number of processes, and on a cluster. Beside each file there is
    a manifest: settings, fingerprints, lengths, and the depth of the evidence. A build
    that was stopped is resumed by the same command.
    """
    if options.dry_run:
        for job in options.request.jobs():
            settings = ", ".join(f"{name}={value}" for name, value in job.settings.items())
            click.echo(f"{job.out}: {job.num} x {job.task}, {settings}")
        return 0
    console = CommandConsole(is_quiet=options.quiet)
    with (
        joined(options.cluster, console) as cluster,
        ProgressFrame(console, is_transient=True) as frame,
    ):
        processes, open_pool = options.processes, None
        if cluster is not None:  # as many workers as it has CPUs, if their number is not given
            processes = processes or max(1, int(cluster.total("CPU")))
            open_pool = partial(ClusterExecutor, cluster)
        built = build_datasets(
            options.request,
            processes=processes,
            open_pool=open_pool,
            force=options.force,
            figure=options.figure,
            on_progress=BuildBar(frame),
        )
        for job, manifest in built:
            frame.hide()
            if manifest is None:
                console.print(f"{job.out} exists and is complete")
                continue
            click.echo(job.out)
            frame.print(_summary(manifest))
            if options.figure and manifest.depth and not figure_path(job.out).exists():
                frame.print(
                    'no figure of depths: it needs matplotlib, pip install "memagent[eval]"'
                )
    return 0


def _summary(manifest: Manifest) -> str:
    parts = [f"{manifest.num_examples:,} examples", size_text(manifest.num_bytes)]
    if manifest.tokens is not None:
        parts.append(f"{manifest.tokens.min:,} to {manifest.tokens.max:,} tokens")
    if manifest.num_with_text < manifest.num_examples:
        parts.append(f"{manifest.num_examples - manifest.num_with_text:,} without their text")
    if manifest.depth is not None and manifest.depth.p_value is not None:
        parts.append(f"evenness of evidence: p = {manifest.depth.p_value:.3f}")
    return "  " + ", ".join(parts)


class BuildBar:
    """Shows how far the dataset that is being built has come."""

    def __init__(self, frame: ProgressFrame) -> None:
        self._frame = frame
        self._job: BuildJob | None = None
        self._first: tuple[int, float] | None = None
        """Number and time of the first examples: until then workers start, which takes seconds."""

    def __call__(self, job: BuildJob, progress: BuildProgress) -> None:
        if job is not self._job:
            self._job, self._first = job, None
            if progress.num_resumed:
                self._frame.print(f"{job.out.name}: resuming after {progress.num_resumed} examples")
        if self._first is None and progress.num_done > progress.num_resumed:
            self._first = progress.num_done, self._frame.seconds
        self._frame.show(
            f"{job.out.name}: {progress.num_done} of {progress.num_total}",
            completed=progress.num_done,
            total=progress.num_total,
            detail=self._time_left(progress),
        )

    def _time_left(self, progress: BuildProgress) -> str:
        """From the time since the first examples; empty where there are no others yet."""
        num_first, started = self._first or (progress.num_done, 0.0)
        if progress.num_done == num_first:
            return ""
        seconds = (self._frame.seconds - started) / (progress.num_done - num_first)
        return f"{duration((progress.num_total - progress.num_done) * seconds)} left"

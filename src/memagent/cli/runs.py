"""`memagent runs`: the runs on this machine."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from memagent.agent.trace import Trace
from memagent.cli.ask_output import answer_text
from memagent.cli.shared.console import aligned, print_json
from memagent.cli.shared.lazy import HintingGroup
from memagent.cli.shared.progress import size_text
from memagent.errors import plain
from memagent.runs import (
    StoredRun,
    describe_run,
    find_run,
    newest_run,
    remove_run,
    stored_runs,
)

HEADINGS = ("NAME", "KIND", "CREATED", "SIZE", "STATE", "WHAT")
MAX_CHARS = 60
"""What is shown of a question or a title in the list."""
MAX_VALUE_CHARS = 1000


@click.group(cls=HintingGroup, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Runs on this machine: readings, evaluations and training.

    RUN is a name that `list` shows, the beginning of one, or the path of a run directory.
    """


@command.command("list")
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the runs as JSON.")
def list_runs(folder: Path | None, as_json: bool) -> None:
    """List the runs in your state folder, or in FOLDER; the newest first."""
    runs = stored_runs(folder)
    if as_json:
        print_json([_as_json(run) for run in runs])
        return
    rows = [HEADINGS, *map(_row, runs)]
    click.echo("\n".join(aligned(rows)))


@command.command("show")
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the run as JSON, with its traces.")
def show_run(run: str | None, as_json: bool) -> None:
    """Show what a run is, by default the newest, and how far it came; of a reading, the answers."""
    path = newest_run() if run is None else find_run(run)
    found = describe_run(path)
    traces = Trace.load(path) if found.kind == "ask" else []
    if as_json:
        print_json({**_as_json(found), "traces": [trace.to_dict() for trace in traces]})
        return
    for name, value in (
        ("run", str(path)),
        ("kind", found.kind),
        ("created", found.created),
        ("size", size_text(found.num_bytes)),
        ("state", found.state),
        ("what", found.what),
    ):
        click.echo(f"{name:<9}{plain(value, MAX_VALUE_CHARS)}".rstrip())
    for trace in traces:
        is_answered = trace.answer is not None
        unanswered = f"no answer yet; {trace.num_chunks} sections are read"
        click.echo(f"\n{trace.question}\n{answer_text(trace) if is_answered else unanswered}")
    if found.kind == "eval":
        click.echo(f"\nreport it with: memagent report {shlex.quote(str(path))}")
    if found.can_resume:
        click.echo(f"\nresume with: memagent {plain(found.kind)} --resume {shlex.quote(str(path))}")


@command.command("rm")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--yes", is_flag=True, help="Ask no confirmation.")
def remove_runs(runs: tuple[str, ...], yes: bool) -> None:
    """Delete runs of your state folder. Runs in use and runs elsewhere are refused."""
    paths = [find_run(run) for run in runs]
    for path in paths:
        if not yes:
            run = describe_run(path)
            shown = f"{run.name} ({_short(run.what)}, {size_text(run.num_bytes)})"
            click.confirm(f"delete {shown}?", abort=True, err=True)
        remove_run(path)


def _row(run: StoredRun) -> tuple[str, ...]:
    created = run.created.replace("T", " ")[:16]
    cells = (run.name, run.kind, created, size_text(run.num_bytes), run.state, _short(run.what))
    return tuple(map(plain, cells))


def _short(text: str) -> str:
    return plain(text) if len(text) <= MAX_CHARS else f"{plain(text[: MAX_CHARS - 3])}..."


def _as_json(run: StoredRun) -> dict[str, Any]:
    return {**asdict(run), "path": str(run.path), "name": run.name}

"""`memagent data filter`: drop the questions that a model answers without the text."""

from __future__ import annotations

import asyncio
import shlex
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import click

from memagent.agent.model_call import LimitSettings
from memagent.cli.eval.output import EvalProgress
from memagent.cli.shared.console import CommandConsole, print_json, resumable
from memagent.cli.shared.options import PanelCommand, panel_option, set_option, taking
from memagent.cli.shared.run_options import (
    ENGINES,
    PRICES,
    ClusterOptions,
    EngineOptions,
    RunOptions,
    engine_opener,
    engine_options,
    joined,
    limit_options,
    run_options,
)
from memagent.engines.base import EngineChoice
from memagent.errors import ConfigError
from memagent.eval.select import SAMPLES, check_paths, closed_book_suite, file_of, filter_with
from memagent.eval.setup import EvalRequest, make_request, open_evaluation, stored_request
from memagent.eval.suites import KNOWN_BY, Suite
from memagent.rewards.verifiers import GRADERS
from memagent.runs import default_path


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterOptions:
    """The options of the command."""

    file: Path | None
    out: Path
    num: int | None
    samples: int | None
    graders: tuple[str, ...]
    changes: tuple[str, ...]
    force: bool
    as_json: bool
    quiet: bool
    run: RunOptions
    limits: LimitSettings
    engine: EngineOptions
    cluster: ClusterOptions


@click.command("filter", cls=PanelCommand)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@panel_option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    panel="Options",
    help="File for the examples that are kept: .jsonl, .jsonl.gz or .parquet.",
)
@panel_option(
    "--num", type=click.IntRange(min=1), panel="Options", help="Stop when so many are kept."
)
@panel_option("--force", is_flag=True, panel="Options", help="Replace a file that exists.")
@panel_option("--json", "as_json", is_flag=True, panel="Options", help="Print the report as JSON.")
@panel_option("--quiet", is_flag=True, panel="Options", help="Show no progress.")
@panel_option(
    "--samples",
    type=click.IntRange(min=1),
    panel="Screening",
    help=f"Replies requested to each question. [default: {SAMPLES}]",
)
@panel_option(
    "--grader",
    "graders",
    multiple=True,
    type=click.Choice(tuple(GRADERS)),
    panel="Screening",
    help="Drop a question if this grader takes a reply for right; repeatable. "
    f"[default: {' and '.join(KNOWN_BY)}]",
)
@set_option(
    *ENGINES,
    panel="Screening",
    passes_on=True,
    help="Any value of the suite that is asked, such as agent.temperature=0.5, or a setting of the engine; repeatable.",
    further={"cluster": str, "replicas": click.IntRange(min=1), **PRICES},
)
@run_options("the replies")
@limit_options
@engine_options
@taking(FilterOptions)
def command(options: FilterOptions) -> int:
    """Drop the questions of FILE that a model answers right without the text.

    \b
      memagent data filter train.jsonl --out train.filtered.jsonl --engine local:smollm2-135m
      memagent data filter train.parquet --out hard.parquet --num 8192 \\
        --base-url http://localhost:8000/v1 --model base
      memagent data filter --out train.filtered.jsonl --resume RUN

    The run is an evaluation by the method closed_book; `memagent report RUN` shows it. To drop what one of
    several models knows, filter once with each: the output of one is the input of the next.
    """
    return asyncio.run(_filter(options))


async def _filter(options: FilterOptions) -> int:
    console = CommandConsole(is_quiet=options.quiet)
    request, file = _request_of(options)
    assert isinstance(request.engine, EngineChoice)
    again = f"memagent data filter --out {shlex.quote(str(options.out))}"
    again += f" --num {options.num}" if options.num else ""
    async with AsyncExitStack() as stack:
        cluster = stack.enter_context(joined(options.cluster.cluster, console))
        opening = open_evaluation(
            request,
            run_dir=options.run.resume or options.run.run_dir or default_path(),
            resume=options.run.resume is not None,
            open_engine=engine_opener(cluster, options.cluster.replicas, console),
        )
        with console.notice(f"opening {request.engine.title}"):
            evaluation = await stack.enter_async_context(opening)
        run = evaluation.run
        assert run is not None
        progress = EvalProgress(evaluation, console)
        with resumable(run, console, kept="all replies are kept", command=again), progress:
            report = await filter_with(
                evaluation,
                file,
                options.out,
                num=options.num,
                on_record=progress.record,
                on_retry=progress.frame.retry,
                on_call=progress.call,
            )
        if options.as_json:
            print_json(report.to_dict())
        else:
            print(report.to_text(), end="")
        run.check_kept()
        console.report(f"kept examples: {options.out}; run: {run.path}")
    return 0


def _request_of(options: FilterOptions) -> tuple[EvalRequest, Path]:
    """What is asked with these options, and the file that is filtered; on resuming, the rest is as it was."""
    run, file = options.run.resume, options.file
    resumed = stored_request(run, named=["tasks"] if file else []) if run else None
    if resumed is not None and run is not None:
        stored_file = file_of(resumed, run)
        file = file or stored_file
        suite = resumed.suite
    elif file is None:
        raise ConfigError("name the file with the questions to screen")
    else:
        suite = closed_book_suite(file)
    check_paths(file, options.out, force=options.force)
    values = suite.model_dump(mode="json") | {"tasks": [{"files": [str(file)]}]}
    values["samples"] = options.samples or suite.samples
    if options.graders:
        values["grader"], *values["graders"] = options.graders
    request = make_request(
        Suite.parse(values, changes=options.changes),
        options.engine.engine,
        engine_settings=options.engine.settings,
        resumed=resumed,
        limits=options.limits,
    )
    return request, file

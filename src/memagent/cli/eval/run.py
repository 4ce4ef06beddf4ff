"""`memagent eval run`, or `memagent eval` for short: ask many questions by one or more methods, and score the answers."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import click

from memagent.agent import work
from memagent.cli.eval.options import EvalOptions, request_of
from memagent.cli.eval.output import EvalProgress, print_forecast, print_results
from memagent.cli.shared.cluster import check_replicas, cluster_option, engine_opener, joined
from memagent.cli.shared.engine import ENGINES, engine_options, pull_known
from memagent.cli.shared.messages import TABLE_METAVAR
from memagent.cli.shared.options import (
    PanelCommand,
    panel_option,
    set_option,
    settings_options,
    taking,
)
from memagent.cli.shared.run_command import CommandConsole, resumable
from memagent.cli.shared.run_options import PRICES, limit_options, run_options
from memagent.config import AgentConfig, EngineConfig
from memagent.engines.base import EngineChoice
from memagent.engines.embedding import DEFAULT_EMBEDDER
from memagent.eval.records import ItemRecord
from memagent.eval.runner import Evaluation
from memagent.eval.setup import open_evaluation, open_forecast
from memagent.rewards.verifiers import GRADERS
from memagent.runs import default_path


@click.command("run", cls=PanelCommand)
@click.argument("suite", required=False, type=click.Path(path_type=Path), metavar="[SUITE]")
@panel_option(
    "--task",
    "tasks",
    multiple=True,
    panel="Items",
    help="Task to generate examples of; repeatable.",
)
@panel_option(
    "--file",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    panel="Items",
    help="File of examples, or of LongBench, HELMET or LOFT; repeatable.",
)
@panel_option(
    "--lengths", panel="Items", help="Lengths of the texts in tokens, such as 8k,32k,128k."
)
@panel_option(
    "--docs", panel="Items", help="Lengths of the texts in documents, such as 50,100,200."
)
@panel_option(
    "--num", type=click.IntRange(min=1), panel="Items", help="Examples of each task and length."
)
@panel_option(
    "--samples",
    type=click.IntRange(min=1),
    panel="Items",
    help="Answers to each question by each method; scores are averaged over them first. [default: 1]",
)
@panel_option("--seed", type=int, panel="Items", help="Seed of the examples and of sampling.")
@panel_option(
    "--source",
    "sources",
    multiple=True,
    metavar=TABLE_METAVAR,
    panel="Items",
    help="File or folder to use instead of a download; repeatable.",
)
@panel_option(
    "--method",
    "methods",
    multiple=True,
    panel="Methods",
    help="reader, reader:PROMPTS, direct, yarn, bm25, dense, refine, map_reduce, closed_book, or FILE.py:FUNCTION; repeatable. [default: reader]",
)
@panel_option(
    "--grader",
    "graders",
    multiple=True,
    type=click.Choice(tuple(GRADERS)),
    panel="Methods",
    help="Override the grader that each example names; repeatable: the others are recorded and shown beside.",
)
@set_option(
    AgentConfig,
    *ENGINES,
    panel="Methods",
    passes_on=True,
    help="Any value of the suite, such as tasks.0.num=16 or memory_tokens=512, or a setting of the engine; repeatable.",
    further={"length_tokenizer": str, "replicas": click.IntRange(min=1), **PRICES},
)
@run_options("the records")
@limit_options
@panel_option(
    "--processes",
    type=click.IntRange(min=0),
    panel="Run",
    help="Processes that generate examples; 0 uses a thread of this one.",
)
@panel_option(
    "--dry-run",
    is_flag=True,
    panel="Run",
    help="Print items, calls, tokens, cost and time, and stop: sources are opened, endpoints are not called.",
)
@panel_option("--json", "as_json", is_flag=True, panel="Run", help="Print the results as JSON.")
@panel_option("--quiet", is_flag=True, panel="Run", help="Show no progress.")
@engine_options
@settings_options(EngineConfig, panel="Engine", only=("concurrency",))
@cluster_option
@taking(EvalOptions)
def command(options: EvalOptions) -> int:
    """Ask many questions by one or more methods, and score the answers.

    \b
      memagent eval smoke
      memagent eval --task ruler/niah_multikey_2 --lengths 8k,32k,128k --num 500 \\
        --method reader --method direct --base-url http://localhost:8000/v1
      memagent eval --file dev.jsonl --method my_method.py:ask_twice
      memagent eval paper_hqa --engine vllm:MODEL --cluster 10.0.0.1:6379
      memagent eval --resume RUN

    SUITE is a TOML file, or the name of a suite that comes with memagent; a wrong name lists them. A suite
    can name code, which is run, and addresses, which get the texts: read one of a stranger before you run it.
    Each finished item is a record in the run directory, with its full trace. A failed item counts as
    wrong and is reported. At the end a table is printed, with 95 % intervals.

    Exit codes: 0 done, 2 something to correct in the input, 3 the engine failed repeatedly, 4 a
    limit was reached, 130 interrupted. After 3, 4 and 130 all answers are kept and the command that
    resumes the run is printed.
    """
    return asyncio.run(_run(options))


async def _run(options: EvalOptions) -> int:
    console = CommandConsole(is_quiet=options.quiet)
    request = request_of(options)
    assert isinstance(request.engine, EngineChoice)
    if request.engine.is_embedded and not options.dry_run:
        console.report(f"no endpoint given: asking the embedded model {request.engine.spec}")
    check_replicas(options.cluster)
    async with AsyncExitStack() as stack:
        cluster = stack.enter_context(joined(options.cluster.cluster, console))
        if options.dry_run:
            opening = open_forecast(request, on_note=console.report)
            with console.notice("opening sources and counting"):
                opened = await stack.enter_async_context(opening)
            print_forecast(opened, request.suite, request.prices, as_json=options.as_json)
            return 0
        for method in request.suite.methods:
            if method.name == "dense":
                pull_known(method.settings.get("embedder") or DEFAULT_EMBEDDER, console)
        opening_run = open_evaluation(
            request,
            run_dir=options.run.resume or options.run.run_dir or default_path(),
            resume=options.run.resume is not None,
            processes=options.processes,
            open_engine=engine_opener(cluster, options.cluster.replicas, console),
            on_note=console.report,
        )
        with console.notice(f"opening {request.engine.title} and the tasks"):
            evaluation = await stack.enter_async_context(opening_run)
        records = await _evaluate(evaluation, console)
        assert evaluation.run is not None
        try:
            print_results(records, as_json=options.as_json)
            sys.stdout.flush()
        finally:  # also where the output is full: it says where the records are kept
            evaluation.run.check_kept()
            console.report(f"run: {evaluation.run.path}")
    return 0


async def _evaluate(evaluation: Evaluation, console: CommandConsole) -> list[ItemRecord]:
    assert evaluation.run is not None
    progress = EvalProgress(evaluation, console)
    kept = "all answers are kept"
    with resumable(evaluation.run, console, kept=kept, command="memagent eval"), progress:
        try:
            return await evaluation.evaluate(
                on_record=progress.record, on_retry=progress.frame.retry, on_call=progress.call
            )
        finally:
            engines = {id(one.gate.engine): one.gate.engine for one in evaluation.methods}
            if len(engines) == 1:
                work.remember(
                    *engines.values(),
                    prompt_tokens=progress.remaining.prompt_tokens,
                    call_seconds=progress.remaining.call_seconds,
                    seconds=progress.frame.seconds,
                )
    raise AssertionError("`resumable` ends the command after an error")

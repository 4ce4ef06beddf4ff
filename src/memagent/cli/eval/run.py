"""`memagent eval run`, or `memagent eval` for short: ask many questions by one or more methods, and score the answers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import click

from memagent.agent import work
from memagent.agent.model_call import LimitSettings
from memagent.cli.eval.output import EvalProgress, print_forecast, print_results
from memagent.cli.shared.console import TABLE_METAVAR, CommandConsole, resumable
from memagent.cli.shared.options import (
    PanelCommand,
    panel_option,
    set_option,
    settings_options,
    taking,
)
from memagent.cli.shared.run_options import (
    ENGINES,
    PRICES,
    ClusterOptions,
    EngineOptions,
    RunOptions,
    cluster_option,
    engine_opener,
    engine_options,
    joined,
    limit_options,
    pull_known,
    run_options,
)
from memagent.config import AgentConfig, EngineConfig
from memagent.data.choices import named_sources
from memagent.data.tasks.lengths import parse_length
from memagent.engines.base import EngineChoice
from memagent.engines.local.embedding import DEFAULT_EMBEDDER
from memagent.errors import ConfigError
from memagent.eval.records import ItemRecord, regrade
from memagent.eval.runner import Evaluation
from memagent.eval.setup import (
    EvalRequest,
    make_request,
    open_evaluation,
    stored_request,
)
from memagent.eval.suites import Suite, read_suite
from memagent.plugins import code_file, is_file_spec
from memagent.rewards.verifiers import GRADERS
from memagent.runs import default_path


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteOptions:
    """What is asked, and how."""

    suite: Path | None
    tasks: tuple[str, ...]
    files: tuple[Path, ...]
    lengths: str | None
    docs: str | None
    num: int | None
    samples: int | None
    seed: int | None
    sources: tuple[str, ...]
    length_tokenizer: str | None
    methods: tuple[str, ...]
    graders: tuple[str, ...]
    changes: tuple[str, ...]
    tokenizer: str | None
    agent: Annotated[dict[str, Any], AgentConfig]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """All options of the command."""

    asked: SuiteOptions
    engine: EngineOptions
    run: RunOptions
    limits: LimitSettings
    cluster: ClusterOptions
    processes: int | None
    dry_run: bool
    as_json: bool
    quiet: bool


def request_of(options: EvalOptions) -> EvalRequest:
    """The evaluation that is asked for; options that are not given are those of a resumed run."""
    resume, asked = options.run.resume, options.asked
    named = [change.partition("=")[0].strip() for change in asked.changes]
    named += [f"sources.{name}" for name in named_sources(asked.sources)]
    named += ["tasks"] * bool(asked.tasks or asked.files)
    resumed = stored_request(resume, methods=asked.methods, named=named) if resume else None
    path = asked.suite
    return make_request(
        _suite(options.asked, resumed),
        options.engine.engine,
        engine_settings=options.engine.settings,
        resumed=resumed,
        suite_name=path.stem if path else None,
        limits=options.limits,
    )


def _suite(options: SuiteOptions, resumed: EvalRequest | None) -> Suite:
    if resumed is not None:
        if options.suite is not None:
            raise ConfigError("a run that is resumed has its suite; leave the file out")
        stored = resumed.suite.model_dump(mode="json")
        if {_absolute(name) for name in options.methods} <= {
            _absolute(m.name) for m in resumed.suite.methods
        }:
            options = replace(options, methods=())  # named again: they keep labels and settings
        return _with_options(Suite.parse(stored, changes=options.changes), options)
    if options.suite is not None:
        return _with_options(read_suite(options.suite, changes=options.changes), options)
    if not options.tasks and not options.files:
        raise ConfigError(
            "name what to evaluate: a suite such as smoke, --task NAME, or --file FILE"
        )
    suite = Suite.parse({"tasks": _task_values(options)}, changes=options.changes)
    return _with_options(suite, options, has_tasks=True)


def _with_options(suite: Suite, options: SuiteOptions, *, has_tasks: bool = False) -> Suite:
    """The suite, overridden by the options."""
    values = suite.model_dump()
    if (options.tasks or options.files) and not has_tasks:
        values["tasks"] = _task_values(options)
    elif options.lengths or options.docs:
        values["tasks"] = _with_lengths(values["tasks"], options)
    if options.methods:
        values["methods"] = [{"name": name} for name in options.methods]
    if options.num is not None:
        values["num"] = options.num
        for task in values["tasks"]:
            task["num"] = options.num
    if options.graders:
        values["grader"], *values["graders"] = options.graders
    for name in ("samples", "seed", "tokenizer", "length_tokenizer"):
        value = getattr(options, name)
        if value is not None:
            values[name] = value
    values["agent"] |= {name: value for name, value in options.agent.items() if name != "seed"}
    values["sources"] |= named_sources(options.sources)
    return Suite.parse(values)


def _absolute(method: str) -> str:
    file, colon, function = method.partition(":")
    return f"{code_file(file)}{colon}{function}" if is_file_spec(method) else method


def _task_values(options: SuiteOptions) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if options.tasks:
        found += _with_lengths([{"tasks": list(options.tasks)}], options)
    if options.files:
        found.append({"files": [str(file) for file in options.files]})
    return found


def _with_lengths(tasks: Sequence[dict[str, Any]], options: SuiteOptions) -> list[dict[str, Any]]:
    """Tasks with the lengths of the options alone, if there are any; files keep theirs.

    A length stays with the entries of a task that list it; one that none of them lists goes to the first.
    """
    wanted = {
        "tokens": [_tokens(part) for part in options.lengths.split(",")] if options.lengths else [],
        "docs": [_number(part) for part in options.docs.split(",")] if options.docs else [],
    }
    if not any(wanted.values()):
        return [*tasks]
    listed: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for task in tasks:
        listed[_variant(task)] |= _lengths_of(task)
    seen, found = set(), []
    for task in tasks:
        variant, own = _variant(task), _lengths_of(task)
        kept = {
            name: [
                length
                for length in lengths
                if (place := (name, length)) in own
                or (place not in listed[variant] and variant not in seen)
            ]
            for name, lengths in wanted.items()
        }
        seen.add(variant)
        if task.get("files"):
            found.append(task)
        elif any(kept.values()):
            found.append({**task, **{name: lengths or None for name, lengths in kept.items()}})
    return found


def _variant(task: dict[str, Any]) -> str:
    """What is the same for the entries of a suite that differ by length and number alone."""
    return json.dumps([task.get("tasks"), task.get("settings")], sort_keys=True, default=str)


def _lengths_of(task: dict[str, Any]) -> set[tuple[str, int]]:
    return {
        (name, parse_length(length))
        for name in ("tokens", "docs")
        for length in task.get(name) or ()
    }


def _tokens(text: str) -> int:
    try:
        return parse_length(text)
    except ValueError as error:
        raise ConfigError(f"--lengths: {error}") from None


def _number(text: str) -> int:
    if not text.strip().isdigit():
        raise ConfigError(f"--docs {text}: numbers of documents, separated by commas")
    return int(text)


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
    async with AsyncExitStack() as stack:
        cluster = stack.enter_context(joined(options.cluster.cluster, console))
        if options.dry_run:
            opening = open_evaluation(request, on_note=console.report, is_dry=True)
            with console.notice("opening sources and counting"):
                dry = await stack.enter_async_context(opening)
            print_forecast(dry, request.suite, request.limits.prices, as_json=options.as_json)
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


# --- grading again --------------------------------------------------------------------------------


@click.command("regrade", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--grader",
    "graders",
    multiple=True,
    required=True,
    type=click.Choice(tuple(GRADERS)),
    help="Grader to grade by; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def regrade_run(run: Path, graders: tuple[str, ...], as_json: bool) -> None:
    """Grade the answers of the evaluation in RUN by other graders. No question is asked again.

    \b
      memagent eval regrade runs/first --grader f1 --grader exact
      memagent report runs/first --grader f1

    The scores are kept in RUN, beside those of its own grader, and shown as further columns. Failed
    items count as wrong for every grader.
    """
    print_results(regrade(run, graders), as_json=as_json)

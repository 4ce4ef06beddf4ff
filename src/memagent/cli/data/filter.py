"""`memagent data filter`: drop the questions that a model answers without the text."""

from __future__ import annotations

import asyncio
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, get_args

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from memagent.cli.ask_request import SECRET_SETTINGS, SETTINGS_OF
from memagent.cli.models import pull_if_known
from memagent.cli.shared.interrupt import stop_like_ctrl_c
from memagent.cli.shared.messages import with_options
from memagent.cli.shared.options import PanelCommand, given, panel_option, settings_options
from memagent.cli.shared.progress import SECONDS_BETWEEN_LINES, duration
from memagent.cli.shared.run_options import price_options, run_options
from memagent.config import EngineConfig, LocalConfig, VllmConfig
from memagent.data.build import refuse_to_overwrite
from memagent.data.filtering.run import KIND, FilterRun, check_paths
from memagent.data.filtering.screening import (
    BareQuestion,
    FilterSettings,
    OnFailure,
    ScreeningRule,
    Verdict,
    read_questions,
)
from memagent.engines.base import BaseEngine, check_engine, open_engine, split_spec
from memagent.engines.openai import EndpointEngine
from memagent.errors import ConfigError, EngineRefused, MemagentError
from memagent.runs import read_manifest
from memagent.types import Prices

INTERRUPTED = 130


@click.command("filter", cls=PanelCommand)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@panel_option(
    "--out",
    type=click.Path(path_type=Path),
    panel="Options",
    help="File for the examples that are kept: .jsonl, .jsonl.gz or .parquet.",
)
@panel_option(
    "--num", type=click.IntRange(min=1), panel="Options", help="Stop when so many are kept."
)
@panel_option("--force", is_flag=True, panel="Options", help="Replace a file that is there.")
@panel_option("--json", "as_json", is_flag=True, panel="Options", help="Print the report as JSON.")
@panel_option("--quiet", is_flag=True, panel="Options", help="Show no progress.")
@panel_option(
    "--rule",
    type=click.Choice(get_args(ScreeningRule)),
    panel="Screening",
    help=f"{FilterSettings.help('rule')} [default: either]",
)
@panel_option(
    "--on-failure",
    type=click.Choice(get_args(OnFailure)),
    panel="Screening",
    help=f"{FilterSettings.help('on_failure')} [default: drop]",
)
@settings_options(FilterSettings, panel="Screening", skip=("rule", "on_failure"))
@run_options("the replies")
@price_options
@panel_option(
    "--engine",
    "engines",
    multiple=True,
    panel="Engine",
    help="Engine as KIND:MODEL, or KIND:MODEL@URL for one at an address of its own; may be given "
    "several times.",
)
@settings_options(EngineConfig, panel="Engine")
@settings_options(LocalConfig, panel="Local model")
@settings_options(VllmConfig, panel="vLLM", skip=tuple(LocalConfig.model_fields))
def command(**options: Any) -> int:
    """Drop the questions of FILE that a model answers right without the text.

    \b
      memagent data filter train.jsonl --out train.filtered.jsonl --engine local:smollm2-135m
      memagent data filter train.parquet --out hard.parquet --num 8192 \\
        --engine openai:base@http://localhost:8000/v1 --engine openai:instruct@http://localhost:8001/v1
      memagent data filter --resume RUN

    Each engine is asked the bare question, --samples times; a question that any reply answers is
    dropped. What is kept is written in the order of FILE and unchanged; a report is printed and lies
    beside it. A question whose calls fail is counted and, unless --on-failure keep, dropped too.

    Exit codes: 0 done, 2 something to correct in the input, 3 the engine failed again and again, 130
    interrupted. After 3 and 130 all replies are kept and the command to go on is printed.
    """
    return Filter(options).run()


class EngineChoice(NamedTuple):
    """One engine to ask."""

    spec: str
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterRequest:
    """Everything that one call of the command needs to know."""

    file: Path
    out: Path
    num: int | None
    engines: tuple[EngineChoice, ...]
    settings: FilterSettings
    prices: Prices | None

    def kept(self, opened: list[BaseEngine]) -> dict[str, Any]:
        """What a manifest keeps, to resume by: no key, no credentials in an address."""
        return {
            "file": str(self.file),
            "out": str(self.out),
            "num": self.num,
            "settings": self.settings.model_dump(mode="json"),
            "engines": [
                _kept_engine(choice, engine)
                for choice, engine in zip(self.engines, opened, strict=True)
            ],
            "price_in": self.prices.prompt if self.prices else None,
            "price_out": self.prices.completion if self.prices else None,
        }


class Filter:
    """One call of the command."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._console = Console(stderr=True)
        self._resume: Path | None = options["resume"]

    def run(self) -> int:
        """The whole command; its exit code."""
        request = make_request(self._options)
        if not self._options["force"] and self._resume is None:
            refuse_to_overwrite(request.out)
        questions = read_questions(request.file)
        engines = [_opened(choice, is_quiet=self._options["quiet"]) for choice in request.engines]
        return asyncio.run(self._run(request, questions, engines))

    async def _run(
        self, request: FilterRequest, questions: list[BareQuestion], engines: list[BaseEngine]
    ) -> int:
        try:
            for engine in engines:
                if isinstance(engine, EndpointEngine):
                    await engine.inspect()
            with FilterRun.open(
                request.file,
                request.out,
                engines,
                request.settings,
                run_dir=self._options["run_dir"],
                resume=self._resume,
                force=self._options["force"],
                questions=questions,
                command=request.kept(engines),
            ) as run:
                return await self._screen(request, engines, run)
        finally:
            for engine in engines:
                await engine.aclose()

    async def _screen(
        self, request: FilterRequest, engines: list[BaseEngine], run: FilterRun
    ) -> int:
        stop_like_ctrl_c()
        progress = FilterProgress(
            run.num_questions, request, console=self._console, is_quiet=self._options["quiet"]
        )
        for engine in engines:
            if isinstance(engine, EndpointEngine):
                engine.on_retry = lambda failure, delay: progress.retry(failure.reason, delay)
        try:
            with progress:
                report = await run.screen(
                    num=request.num,
                    concurrency=max(_concurrency(choice) for choice in request.engines),
                    prices=request.prices,
                    on_verdict=progress.verdict,
                )
        except asyncio.CancelledError:
            self._tell_kept(run, "interrupted")
            return INTERRUPTED
        except MemagentError as error:
            if isinstance(error, EngineRefused) and run.discard_if_empty():
                raise
            self._tell_kept(run, str(error))
            return error.exit_code
        print(report.to_json() if self._options["as_json"] else report.to_text(), end="")
        self._tell(f"kept examples: {request.out}; run: {run.path}")
        if report.num_failed:
            self._tell("failed questions are asked again with --resume")
        return 0

    def _tell_kept(self, run: FilterRun, reason: str) -> None:
        path = shlex.quote(str(run.path))
        self._print(f"memagent: {with_options(reason)}")
        self._print(f"all replies are kept; go on with: memagent data filter --resume {path}")

    def _tell(self, text: str) -> None:
        if not self._options["quiet"]:
            self._print(text, style="dim")

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True, style=style)


# --- what is asked --------------------------------------------------------------------------------


def make_request(options: dict[str, Any]) -> FilterRequest:
    """What is asked with these options, checked; on resuming, the rest is as it was."""
    resume: Path | None = options["resume"]
    if resume is not None and options["run_dir"] is not None:
        raise ConfigError("give --resume to go on with a run or --run-dir to begin one, not both")
    stored = _stored_command(resume) if resume else {}
    file = options["file"] or stored.get("file")
    out = options["out"] or stored.get("out")
    if file is None:
        raise ConfigError("name the file with the questions to screen")
    if out is None:
        raise ConfigError("give --out: the file for the examples that are kept")
    prices = [
        stored.get(name) if options[name] is None else options[name]
        for name in ("price_in", "price_out")
    ]
    settings = {**stored.get("settings", {}), **given(FilterSettings, options)}
    request = FilterRequest(
        file=Path(file).expanduser().resolve(),
        out=Path(out).expanduser().resolve(),
        num=options["num"] or stored.get("num"),
        engines=_engines(options, stored),
        settings=FilterSettings.parse(settings),
        prices=None
        if prices == [None, None]
        else Prices(prompt=prices[0] or 0.0, completion=prices[1] or 0.0),
    )
    check_paths(request.file, request.out)
    return request


def _stored_command(run: Path) -> dict[str, Any]:
    manifest = read_manifest(run)
    if manifest.get("kind") != KIND or "command" not in manifest:
        raise ConfigError(f"{run} is not a run of `memagent data filter`")
    stored: dict[str, Any] = manifest["command"]
    for engine, model in zip(stored["engines"], manifest["models"], strict=True):
        if engine["spec"] == "openai:":  # the model that the endpoint named then
            engine["spec"] += model
    return stored


def _engines(options: dict[str, Any], stored: dict[str, Any]) -> tuple[EngineChoice, ...]:
    """The engines with their settings; settings that go with none of them are refused."""
    model = options["model"] or ""
    values = {**options, "model": None}
    if options["engines"] and model:
        raise ConfigError("give either --engine KIND:MODEL or --model, not both")
    is_stored = not options["engines"] and not model and stored
    choices = (
        [EngineChoice(engine["spec"], engine["settings"]) for engine in stored["engines"]]
        if is_stored
        else [_choice(name) for name in options["engines"] or [f"openai:{model}"]]
    )
    kinds = {split_spec(choice.spec)[0] for choice in choices}
    general = {
        kind: {n: value for one in SETTINGS_OF[kind] for n, value in given(one, values).items()}
        for kind in kinds
    }
    for settings in (EngineConfig, LocalConfig, VllmConfig):
        known = {name for of_kind in general.values() for name in of_kind}
        if foreign := [name for name in given(settings, values) if name not in known]:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in foreign)
            raise ConfigError(f"{names} does not go with the engines that were chosen")
    engines = []
    for spec, own in choices:
        new = general[split_spec(spec)[0]]
        # an address in the spec is meant for this engine alone; a stored one may be out of date
        engines.append(EngineChoice(spec, {**own, **new} if is_stored else {**new, **own}))
    return tuple(engines)


def _choice(name: str) -> EngineChoice:
    """`KIND:MODEL@URL`: an engine at an address of its own."""
    spec, at, url = name.partition("@http")
    return EngineChoice(spec, {"base_url": f"http{url}"} if at else {})


def _opened(choice: EngineChoice, *, is_quiet: bool) -> BaseEngine:
    kind, model = split_spec(choice.spec)
    if kind == "local":
        check_engine(kind)  # before a download that would be for nothing
        pull_if_known(model, is_quiet=is_quiet)
    return open_engine(choice.spec, **choice.settings)


def _kept_engine(choice: EngineChoice, engine: BaseEngine) -> dict[str, Any]:
    settings = {n: value for n, value in choice.settings.items() if n not in SECRET_SETTINGS}
    if isinstance(engine, EndpointEngine) and engine.kept_address:
        settings["base_url"] = engine.kept_address
    return {"spec": choice.spec, "settings": settings}


DEFAULT_LOCAL_CONCURRENCY = 64
"""Questions at once for a local model; what it cannot work on at once waits inside."""


def _concurrency(choice: EngineChoice) -> int:
    """Questions that an engine can work on at once."""
    if split_spec(choice.spec)[0] == "local":
        return int(choice.settings.get("max_running") or DEFAULT_LOCAL_CONCURRENCY)
    return int(choice.settings.get("concurrency", EngineConfig().concurrency))


# --- what is shown --------------------------------------------------------------------------------


class FilterProgress:
    """Shows how far a screening has come: a bar on a terminal, now and then a line elsewhere."""

    def __init__(
        self, num_questions: int, request: FilterRequest, *, console: Console, is_quiet: bool
    ) -> None:
        self._num_questions = num_questions
        self._request = request
        self._console = console
        self._is_quiet = is_quiet
        self._num_kept = self._num_done = 0
        self._note = ""
        self._started = self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("[yellow]{task.fields[note]}[/yellow]"),
            console=console,
            disable=is_quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task("asking", total=request.num or num_questions, note="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def verdict(self, question: BareQuestion, verdict: Verdict) -> None:
        """Take in what became of a question."""
        self._num_done += 1
        self._num_kept += verdict.is_kept(self._request.settings.on_failure)
        self._note = ""
        self._refresh()

    def retry(self, reason: str, delay: float) -> None:
        """Tell that a call failed and will be tried again."""
        self._note = f"{reason}; again in {delay:.0f} s"
        if not self._console.is_terminal and not self._is_quiet and delay >= 1:
            self._print(f"the endpoint failed ({self._note})")
        self._refresh()

    def _refresh(self) -> None:
        done = self._num_kept if self._request.num else self._num_done
        if self._console.is_terminal:
            self._bar.update(
                self._task, description=self._headline(), completed=done, note=escape(self._note)
            )
        elif not self._is_quiet and time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self._print(f"{self._headline()} in {duration(self._last_line - self._started)}")

    def _headline(self) -> str:
        return f"{self._num_done:,} of {self._num_questions:,} asked, {self._num_kept:,} kept"

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

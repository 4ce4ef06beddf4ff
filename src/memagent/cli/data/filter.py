"""`memagent data filter`: drop the questions that a model answers without the text."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click

from memagent import trust
from memagent.cli.shared.cluster import (
    ClusterOptions,
    OpenOnCluster,
    check_replicas,
    cluster_options,
    engine_opener,
    joined,
)
from memagent.cli.shared.engine import EngineSettings, engine_settings_options, open_chosen
from memagent.cli.shared.options import PanelCommand, panel_option, settings_options, taking
from memagent.cli.shared.progress import ProgressFrame
from memagent.cli.shared.run_command import CommandConsole, resumable
from memagent.cli.shared.run_options import (
    PriceOptions,
    RunOptions,
    price_options,
    prices_of,
    run_options,
)
from memagent.config import EngineConfig
from memagent.data.build import refuse_to_overwrite
from memagent.data.filtering.run import KIND, FilterRun, ScreeningShape, check_paths
from memagent.data.filtering.screening import (
    BareQuestion,
    FilterSettings,
    Verdict,
    read_questions,
)
from memagent.engines.base import (
    ANY_ENDPOINT,
    SETTINGS,
    BaseEngine,
    EngineChoice,
    check_stored,
    split_spec,
)
from memagent.errors import ConfigError
from memagent.runs import check_manifest, read_manifest

DEFAULT_LOCAL_CONCURRENCY = 64
"""Questions at once for a local model; what it cannot work on at once waits inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterOptions:
    """The options of the command."""

    file: Path | None
    out: Path | None
    num: int | None
    force: bool
    as_json: bool
    quiet: bool
    settings: Annotated[dict[str, Any], FilterSettings]
    run: RunOptions
    prices: PriceOptions
    engines: tuple[str, ...]
    engine_settings: EngineSettings
    cluster: ClusterOptions


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
@panel_option("--force", is_flag=True, panel="Options", help="Replace a file that exists.")
@panel_option("--json", "as_json", is_flag=True, panel="Options", help="Print the report as JSON.")
@panel_option("--quiet", is_flag=True, panel="Options", help="Show no progress.")
@settings_options(FilterSettings, panel="Screening")
@run_options("the replies")
@price_options
@panel_option(
    "--engine",
    "engines",
    multiple=True,
    panel="Engine",
    help="Engine as KIND:MODEL, or KIND:MODEL@URL for one with its own address; may be given "
    "several times.",
)
@engine_settings_options
@cluster_options
@taking(FilterOptions)
def command(options: FilterOptions) -> int:
    """Drop the questions of FILE that a model answers right without the text.

    \b
      memagent data filter train.jsonl --out train.filtered.jsonl --engine local:smollm2-135m
      memagent data filter train.parquet --out hard.parquet --num 8192 \\
        --engine openai:base@http://localhost:8000/v1 --engine openai:instruct@http://localhost:8001/v1
      memagent data filter --resume RUN

    Each engine is asked the bare question, --samples times; a question that any reply answers is
    dropped. What is kept is written unchanged and in the order of FILE; a report is printed and written
    beside it. A question whose calls fail is counted and dropped too, unless --on-failure keep.

    Exit codes: 0 done, 2 something to correct in the input, 3 the engine failed repeatedly, 130
    interrupted. After 3 and 130 all replies are kept and the command to resume is printed.
    """
    request = make_request(options)
    questions = read_questions(request.file)  # before an engine is opened in vain
    check_replicas(options.cluster)
    console = CommandConsole(is_quiet=options.quiet)
    with joined(options.cluster.cluster, console) as cluster:
        opener = engine_opener(cluster, options.cluster.replicas, console)
        return asyncio.run(_filter(options, request, questions, opener, console))


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterRequest:
    """A filtering to do: what is asked of which engines."""

    file: Path
    out: Path
    num: int | None
    engines: tuple[EngineChoice, ...]
    settings: FilterSettings
    prices: dict[str, Any]

    @property
    def concurrency(self) -> int:
        """Questions under way at once."""
        return max(_concurrency(choice) for choice in self.engines)

    def kept(self, opened: Sequence[BaseEngine]) -> dict[str, Any]:
        """What a manifest keeps, to resume by: no key, no credentials in an address."""
        choices = [choice.kept(engine) for choice, engine in zip(self.engines, opened, strict=True)]
        return {
            "file": str(self.file),
            "out": str(self.out),
            "num": self.num,
            "settings": self.settings.model_dump(mode="json"),
            "engines": [{"spec": one.spec, "settings": dict(one.settings)} for one in choices],
            "price_in": self.prices.get("price_in"),
            "price_out": self.prices.get("price_out"),
        }


async def _filter(
    options: FilterOptions,
    request: FilterRequest,
    questions: list[BareQuestion],
    opener: OpenOnCluster | None,
    console: CommandConsole,
) -> int:
    async with AsyncExitStack() as stack:
        engines: list[BaseEngine] = []
        for choice in request.engines:
            engine = await opener(choice) if opener else open_chosen(choice, console)
            engines.append(await stack.enter_async_context(engine))
        run = stack.enter_context(
            FilterRun.open(
                request.file,
                request.out,
                engines,
                request.settings,
                run_dir=options.run.run_dir,
                resume=options.run.resume,
                force=options.force,
                questions=questions,
                command=request.kept(engines),
            )
        )
        with (
            resumable(run, console, kept="all replies are kept"),
            ProgressFrame(console) as frame,
        ):
            for engine in engines:
                engine.on_retry = frame.retry
            report = await run.screen(
                num=request.num,
                concurrency=request.concurrency * max(one.num_replicas for one in engines),
                prices=prices_of(request.prices),
                on_verdict=FilterProgress(run.num_questions, request, frame),
            )
        print(report.to_json() if options.as_json else report.to_text(), end="")
        run.check_kept()
        console.report(f"kept examples: {request.out}; run: {run.path}")
        if report.num_failed:
            console.report("failed questions are asked again with `resume`")
    return 0


# --- what is asked --------------------------------------------------------------------------------


def make_request(options: FilterOptions) -> FilterRequest:
    """What is asked with these options, checked; on resuming, the rest is as it was."""
    stored = _stored_command(options.run.resume) if options.run.resume else {}
    file = options.file or stored.get("file")
    out = options.out or stored.get("out")
    if file is None:
        raise ConfigError("name the file with the questions to screen")
    if out is None:
        raise ConfigError("give `out`: the file for the examples that are kept")
    prices = {name: stored.get(name) for name in ("price_in", "price_out")}
    request = FilterRequest(
        file=Path(file).expanduser().resolve(),
        out=Path(out).expanduser().resolve(),
        num=options.num or stored.get("num"),
        engines=_chosen(options, stored),
        settings=FilterSettings.parse({**stored.get("settings", {}), **options.settings}),
        prices={
            name: price
            for name, price in {**prices, **options.prices.given}.items()
            if price is not None
        },
    )
    prices_of(request.prices)  # raises before an engine is opened in vain
    check_paths(request.file, request.out)
    files = [str(request.file), str(request.out)]
    given = (options.file, options.out)
    stored_files = [path for path, now in zip(files, given, strict=True) if stored and now is None]
    again = f"memagent data filter {shlex.join(files[:1])} --out {shlex.join(files[1:])}"
    again += f" --resume {shlex.quote(str(options.run.resume))}"
    what, may = f"the files {' and '.join(files)}", "one may be read and the other written"
    trust.require("file", *stored_files, what=what, may=may, again=again)
    trust.remember("file", *files)
    if options.run.resume is None and not options.force:
        refuse_to_overwrite(request.out)
    return request


def _stored_command(run: Path) -> dict[str, Any]:
    manifest = read_manifest(run)
    if manifest.get("kind") != KIND or manifest.get("command") is None:
        raise ConfigError(f"{run} is not a run of `memagent data filter`")
    check_manifest(manifest, ScreeningShape, run)
    stored: dict[str, Any] = manifest["command"]
    return stored


def _chosen(options: FilterOptions, stored: Mapping[str, Any]) -> tuple[EngineChoice, ...]:
    """The engines, each with the settings that fit it; settings that fit none are refused."""
    settings = options.engine_settings.all
    model = settings.pop("model", "")
    if options.engines and model:
        raise ConfigError("give either `engine=KIND:MODEL` or `model`, not both")
    is_stored = bool(stored) and not options.engines and not model
    choices = (
        [EngineChoice(**engine) for engine in stored["engines"]]
        if is_stored
        else [_choice(name) for name in options.engines or [f"{ANY_ENDPOINT}{model}"]]
    )
    fitting = [_fitting(choice, settings) for choice in choices]
    if is_stored:
        for choice, fit in zip(choices, fitting, strict=True):
            check_stored(choice.settings, fit)
    if foreign := [name for name in settings if not any(name in fit for fit in fitting)]:
        names = ", ".join(f"`{name}`" for name in foreign)
        raise ConfigError(f"{names} does not go with the engines that were chosen")
    # an address in the spec is for this engine alone; a stored one may be out of date
    return tuple(
        EngineChoice(
            spec=choice.spec,
            settings={**choice.settings, **fit} if is_stored else {**fit, **choice.settings},
        )
        for choice, fit in zip(choices, fitting, strict=True)
    )


def _choice(name: str) -> EngineChoice:
    """`KIND:MODEL@URL`: an engine with its own address."""
    spec, at, url = name.partition("@http")
    split_spec(spec)
    return EngineChoice(spec=spec, settings={"base_url": f"http{url}"} if at else {})


def _fitting(choice: EngineChoice, settings: Mapping[str, Any]) -> dict[str, Any]:
    own = {name for group in SETTINGS[choice.kind] for name in group.model_fields}
    return {name: value for name, value in settings.items() if name in own}


def _concurrency(choice: EngineChoice) -> int:
    """Questions that an engine can work on at once."""
    if choice.kind == "local":
        return int(choice.settings.get("max_running") or DEFAULT_LOCAL_CONCURRENCY)
    return int(choice.settings.get("concurrency", EngineConfig().concurrency))


# --- what is shown --------------------------------------------------------------------------------


class FilterProgress:
    """Shows how many questions were asked and kept."""

    def __init__(self, num_questions: int, request: FilterRequest, frame: ProgressFrame) -> None:
        self._num_questions = num_questions
        self._request = request
        self._frame = frame
        self._num_kept = self._num_done = 0

    def __call__(self, question: BareQuestion, verdict: Verdict) -> None:
        self._num_done += 1
        self._num_kept += verdict.is_kept(self._request.settings.on_failure)
        self._frame.show(
            f"{self._num_done:,} of {self._num_questions:,} asked, {self._num_kept:,} kept",
            completed=self._num_kept if self._request.num else self._num_done,
            total=self._request.num or self._num_questions,
        )

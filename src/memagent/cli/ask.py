"""`memagent ask`: questions in, answers out, everything in between on disk."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import chdir, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from memagent.agent.journal import Journal, check_same
from memagent.agent.limits import Limits
from memagent.agent.plan import Plan, plan_reading
from memagent.agent.reader import Reader, checked_question
from memagent.agent.trace import Step, Trace, total_usage
from memagent.cli.options import PanelCommand, given, panel_option, settings_options
from memagent.cli.progress import ReadingProgress, duration
from memagent.config import AgentConfig, EngineConfig
from memagent.documents.chunking import Chunks
from memagent.documents.document import Document
from memagent.documents.loaders import load_with_report
from memagent.engines.base import open_engine
from memagent.engines.openai import EndpointEngine, public_url
from memagent.errors import (
    ConfigError,
    DocumentError,
    EngineRefused,
    LimitReached,
    MemagentError,
    RunError,
)
from memagent.runs import Run, read_manifest
from memagent.types import Engine, Prices

INTERRUPTED = 130
STDIN_COPY = "stdin"
"""File in a run directory that keeps what came in on standard input, for resuming."""
STORED_ENGINE_SETTINGS = ("api_version", "timeout", "patience", "concurrency", "extra_body")


@click.command("ask", cls=PanelCommand)
@click.argument("files", nargs=-1)
@panel_option(
    "-q",
    "--question",
    "questions",
    multiple=True,
    panel="Options",
    help="What you want to know; may be given several times.",
)
@panel_option(
    "--json",
    "as_json",
    is_flag=True,
    panel="Options",
    help="Print answers as JSON, with their traces.",
)
@panel_option(
    "--dry-run",
    is_flag=True,
    panel="Options",
    help="Print the number of calls and tokens, and the cost if prices are given; call nothing.",
)
@panel_option("--show-memory", is_flag=True, panel="Options", help="Show the memory as it changes.")
@panel_option("--quiet", is_flag=True, panel="Options", help="Show no progress.")
@panel_option("--encoding", panel="Options", help="Encoding of the files; detected when not given.")
@panel_option(
    "--run-dir",
    type=click.Path(path_type=Path),
    panel="Run",
    help="Folder to keep the run in. [default: a new one in your state folder]",
)
@panel_option(
    "--resume",
    type=click.Path(path_type=Path),
    panel="Run",
    help="Go on with the run in this folder; nothing that was finished is done again.",
)
@panel_option(
    "--max-calls",
    type=click.IntRange(min=1),
    panel="Run",
    help="Stop before more calls than this are made, over all resumptions.",
)
@panel_option(
    "--max-cost",
    type=click.FloatRange(min=0),
    panel="Run",
    help="Stop before the run can cost more than this, over all resumptions.",
)
@panel_option(
    "--price-in",
    type=click.FloatRange(min=0),
    panel="Run",
    help="Price of a million prompt tokens.",
)
@panel_option(
    "--price-out",
    type=click.FloatRange(min=0),
    panel="Run",
    help="Price of a million completion tokens.",
)
@panel_option(
    "--engine",
    panel="Engine",
    help="Engine as KIND:MODEL: openai:MODEL for an endpoint, scripted for none at all.",
)
@settings_options(EngineConfig, panel="Engine")
@panel_option(
    "--tokenizer",
    panel="Reading",
    help="Folder, hub id, tiktoken:NAME, bytes or estimate. [default: the model's own]",
)
@settings_options(AgentConfig, panel="Reading")
def command(**options: Any) -> int:
    """Ask questions of FILES: text, Markdown, HTML, PDF, DOCX, EPUB, notebooks, chat logs (JSONL),
    folders of sources, any of these gzipped, or - for standard input. However long they are together,
    they are read section by section through a window of fixed size.

    \b
      memagent ask book.pdf -q "Who inherits the house?" --base-url http://localhost:8000/v1 --model NAME
      memagent ask src/ README.md -q "Where are retries handled?" --model NAME --show-memory
      memagent ask --resume RUN

    Address and key may be set as MEMAGENT_BASE_URL and MEMAGENT_API_KEY (or OPENAI_BASE_URL and
    OPENAI_API_KEY, or URL and API_KEY).

    Exit codes: 0 answered, 2 something to correct in the input, 3 the endpoint failed for longer than
    --patience, 4 stopped at --max-calls or --max-cost, 130 interrupted. After 3, 4 and 130 what was
    read is kept and the command to go on is printed.
    """
    return Ask(options).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked, from the command line and, on resuming, from the run's manifest."""

    paths: tuple[str, ...]
    folder: str
    """Where relative paths start."""
    questions: tuple[str, ...]
    encoding: str | None
    engine: str
    engine_settings: dict[str, Any]
    agent_settings: dict[str, Any]
    tokenizer: str | None
    limits: dict[str, Any]


class Ask:
    """One call of the command."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._console = Console(stderr=True)
        self._is_quiet: bool = options["quiet"]
        self._stdin_bytes = b""

    def run(self) -> int:
        """The whole command; its exit code."""
        request = self._request()
        document = self._load(request)
        engine = open_engine(request.engine, **request.engine_settings)
        return asyncio.run(self._run(request, document, engine))

    async def _run(self, request: Request, document: Document, engine: Engine) -> int:
        try:
            reader = await self._reader(request, engine)
            chunks = reader.chunks(document)
            for question in request.questions:
                reader.check(question)
            if self._options["dry_run"]:
                with self._console.status("counting"):
                    plan = plan_reading(reader, request.questions, chunks)
                self._print_plan(request, plan)
                return 0
            return await self._read(request, reader, chunks)
        finally:
            await engine.aclose()

    # --- what is asked -------------------------------------------------------------------------

    def _request(self) -> Request:
        options = self._options
        if options["resume"] is None:
            return _checked(_new_request(options))
        if options["run_dir"] is not None:
            raise ConfigError(
                "give --resume to go on with a run or --run-dir to begin one, not both"
            )
        return _checked(_resumed_request(options, read_manifest(options["resume"])))

    def _load(self, request: Request) -> Document:
        if not os.path.isdir(request.folder):
            raise DocumentError(
                f"the folder {request.folder}, where the run was begun, is gone; name its files anew"
            )
        with chdir(request.folder):
            loaded = load_with_report(
                request.paths, encoding=request.encoding, stdin=self._stdin(request)
            )
        for skipped in loaded.skipped:
            self._tell(f"skipped {skipped.source}: {skipped.reason}")
        return loaded.document

    def _stdin(self, request: Request) -> io.BytesIO | None:
        """What came in on standard input, from the run when it is resumed."""
        if "-" not in request.paths:
            return None
        if self._options["resume"]:
            return _kept_stdin(self._options["resume"] / STDIN_COPY)
        if sys.stdin.isatty():
            return None  # the loader says what to do instead
        self._stdin_bytes = sys.stdin.buffer.read()
        return io.BytesIO(self._stdin_bytes)

    async def _reader(self, request: Request, engine: Engine) -> Reader:
        config = AgentConfig.parse(request.agent_settings)
        if isinstance(engine, EndpointEngine):
            await engine.inspect()
            _check_served_window(engine, config)
        reader = Reader(engine, tokenizer=request.tokenizer, config=config, limits=_limits(request))
        if reader.tokenizer_note:
            self._tell(
                f"token counts are estimated with a margin: {reader.tokenizer_note}; "
                "--tokenizer names one"
            )
        return reader

    # --- reading -------------------------------------------------------------------------------

    async def _read(self, request: Request, reader: Reader, chunks: Chunks) -> int:
        journal = self._journal(request, reader, chunks.document)
        finished = [journal.finished(number) for number in range(len(request.questions))]
        for steps in finished:
            reader.limits.count(total_usage(steps))
        progress = ReadingProgress(
            chunks,
            [len(steps) for steps in finished],
            console=self._console,
            is_quiet=self._is_quiet,
            show_memory=self._options["show_memory"],
        )
        if isinstance(reader.engine, EndpointEngine):
            reader.engine.on_retry = lambda failure, delay: progress.retry(failure.reason, delay)
        news = [f"reading {chunks.document.source}; the run is kept in {journal.path}"]

        def on_step(question_number: int, step: Step) -> None:
            while news:  # not before the first step: a run that is refused at once is not kept
                self._tell(news.pop())
            progress.step(question_number, step)

        _stop_like_ctrl_c(signal.SIGTERM)
        try:
            with progress:
                traces = await reader.read(request.questions, chunks, journal, on_step)
        except asyncio.CancelledError:
            self._tell_kept(journal, "interrupted")
            return INTERRUPTED
        except LimitReached as error:
            self._tell_kept(journal, str(error), "raise the limit and ")
            return error.exit_code
        except EngineRefused as error:
            if journal.discard_if_empty():
                raise
            self._tell_kept(journal, str(error))
            return error.exit_code
        except MemagentError as error:
            self._tell_kept(journal, str(error))
            return error.exit_code
        finally:
            journal.close()
        self._print_answers(traces)
        self._print_summary(traces, journal, reader)
        return 0

    def _journal(self, request: Request, reader: Reader, document: Document) -> Journal:
        wanted = reader.identity(request.questions, document)
        if path := self._options["resume"]:
            check_same(read_manifest(path), wanted, path)
            return Journal(Run.open(path))
        files = {STDIN_COPY: self._stdin_bytes} if "-" in request.paths else {}
        manifest = {**wanted, "command": _stored(request)}
        return Journal(Run.create(self._options["run_dir"], manifest, files=files))

    # --- output --------------------------------------------------------------------------------

    def _print_answers(self, traces: Sequence[Trace]) -> None:
        if self._options["as_json"]:
            results = [_result(trace) for trace in traces]
            print(json.dumps(results[0] if len(results) == 1 else results, ensure_ascii=False))
            return
        for trace in traces:
            if len(traces) > 1:
                print(f"{trace.question}")
            print(trace.answer)
            if len(traces) > 1:
                print()

    def _print_summary(self, traces: Sequence[Trace], journal: Journal, reader: Reader) -> None:
        steps = [step for trace in traces for step in trace.steps]
        usage = total_usage(steps)
        cost = f", cost {reader.limits.cost:.4f}" if reader.limits.has_prices else ""
        self._tell(
            f"{usage.calls} calls, {usage.prompt_tokens:,} prompt and {usage.completion_tokens:,} "
            f"completion tokens in {duration(sum(step.seconds for step in steps))} of calls{cost}"
        )
        cut = [step for step in steps if "reply_cut" in step.flags or "memory_cut" in step.flags]
        if cut:
            self._tell(
                f"{len(cut)} of {len(steps)} replies were cut by their limit (flagged in the trace); "
                "raise --memory-tokens or --answer-tokens"
            )
        self._tell(f"run: {journal.path}")

    def _print_plan(self, request: Request, plan: Plan) -> None:
        prices = _prices(request.limits)
        if self._options["as_json"]:
            values = asdict(plan)
            if prices:
                values["min_cost"], values["max_cost"] = plan.cost(prices)
            print(json.dumps(values))
            return
        about = "" if plan.is_exact else " (estimated)"
        print(f"sections            {plan.num_chunks:>14,}")
        print(f"calls               {plan.num_calls:>14,}")
        print(f"prompt tokens       {plan.prompt_tokens:>14,}{about}")
        print(f"  with memory up to {plan.prompt_tokens + plan.max_memory_tokens:>14,}{about}")
        print(f"completion up to    {plan.max_completion_tokens:>14,}")
        if prices:
            low, high = plan.cost(prices)
            print(f"cost between        {low:>14,.4f} and {high:,.4f}")

    def _tell_kept(self, journal: Journal, reason: str, advice: str = "") -> None:
        path = shlex.quote(str(journal.path))
        self._console.print(
            f"memagent: {reason}\nwhat was read is kept; {advice}go on with: "
            f"memagent ask --resume {path}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )

    def _tell(self, text: str) -> None:
        if not self._is_quiet:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True, style="dim")


def _new_request(options: dict[str, Any]) -> Request:
    engine_settings = given(EngineConfig, options)
    model = engine_settings.pop("model", None)
    engine = options["engine"] or (f"openai:{model}" if model else "openai:")
    if options["engine"] and model:
        raise ConfigError("give either --engine KIND:MODEL or --model, not both")
    return Request(
        paths=tuple(options["files"]),
        folder=os.getcwd(),
        questions=tuple(checked_question(question) for question in options["questions"]),
        encoding=options["encoding"],
        engine=engine,
        engine_settings=engine_settings,
        agent_settings=_with_absolute_prompts(given(AgentConfig, options)),
        tokenizer=_with_absolute_path(options["tokenizer"]),
        limits=_given_limits(options),
    )


def _resumed_request(options: dict[str, Any], manifest: Mapping[str, Any]) -> Request:
    """The stored request, with what was given anew; the run refuses what would change its trace."""
    stored = manifest.get("command")
    if stored is None:
        raise ConfigError("this run was begun from Python; continue it there with run_dir")
    new = _new_request(options)
    files = {"paths": new.paths, "folder": new.folder} if new.paths else {}
    return Request(
        paths=tuple(files.get("paths", stored["paths"])),
        folder=str(files.get("folder", stored["folder"])),
        questions=new.questions or tuple(manifest["questions"]),
        encoding=new.encoding or stored["encoding"],
        engine=_stored_engine(manifest) if new.engine == "openai:" else new.engine,
        engine_settings={**stored["engine_settings"], **new.engine_settings},
        agent_settings={**manifest["agent"], **new.agent_settings},
        tokenizer=new.tokenizer or str(manifest["tokenizer"]),
        limits={**stored["limits"], **new.limits},
    )


def _stored_engine(manifest: Mapping[str, Any]) -> str:
    """The engine of a run, with the model it found when none was named."""
    engine = str(manifest["command"]["engine"])
    return f"{engine}{manifest['model']}" if engine == "openai:" else engine


def _stored(request: Request) -> dict[str, Any]:
    """What a manifest keeps of a request: no key, no credentials in the address."""
    settings = request.engine_settings
    kept = {name: settings[name] for name in STORED_ENGINE_SETTINGS if name in settings}
    if base_url := settings.get("base_url"):
        kept["base_url"] = public_url(base_url)
    return {
        "paths": list(request.paths),
        "folder": request.folder,
        "encoding": request.encoding,
        "engine": request.engine,
        "engine_settings": kept,
        "limits": request.limits,
    }


def _checked(request: Request) -> Request:
    if not request.paths:
        raise ConfigError("name at least one file or folder to read, or - for standard input")
    if not request.questions:
        raise ConfigError("ask something: -q QUESTION")
    return request


def _with_absolute_prompts(settings: dict[str, Any]) -> dict[str, Any]:
    """A template file is found again on resuming, wherever that happens."""
    prompts = settings.get("prompts")
    if prompts and Path(prompts).is_file():
        settings["prompts"] = str(Path(prompts).resolve())
    return settings


def _with_absolute_path(tokenizer: str | None) -> str | None:
    """A tokenizer's folder is found again on resuming, wherever that happens."""
    if tokenizer in (None, "bytes", "estimate") or not Path(tokenizer).expanduser().exists():
        return tokenizer
    return str(Path(tokenizer).expanduser().resolve())


def _kept_stdin(path: Path) -> io.BytesIO:
    try:
        return io.BytesIO(path.read_bytes())
    except OSError as error:
        raise RunError(
            f"{path}, the text that came in on standard input, cannot be read ({error.strerror}); "
            "start a new run"
        ) from None


def _check_served_window(engine: EndpointEngine, config: AgentConfig) -> None:
    served = engine.served_window
    if served is not None and served < config.window:
        raise ConfigError(
            f"{engine.model} is served with a window of {served} tokens, less than window "
            f"{config.window}; give --window {served} and, if needed, a lower --chunk-tokens"
        )


def _given_limits(options: dict[str, Any]) -> dict[str, Any]:
    names = ("max_calls", "max_cost", "price_in", "price_out")
    return {name: options[name] for name in names if options[name] is not None}


def _limits(request: Request) -> Limits:
    return Limits(
        max_calls=request.limits.get("max_calls"),
        max_cost=request.limits.get("max_cost"),
        prices=_prices(request.limits),
    )


def _prices(limits: Mapping[str, Any]) -> Prices | None:
    if "price_in" not in limits and "price_out" not in limits:
        return None
    return Prices(prompt=limits.get("price_in", 0.0), completion=limits.get("price_out", 0.0))


def _result(trace: Trace) -> dict[str, Any]:
    return {
        "answer": trace.answer,
        "question": trace.question,
        "num_chunks": trace.num_chunks,
        "usage": asdict(trace.usage),
        "trace": trace.to_dict(),
    }


def _stop_like_ctrl_c(number: int) -> None:
    """Treat a polite request to end like Ctrl-C: stop between steps and say how to go on."""
    task = asyncio.current_task()
    assert task is not None
    with suppress(NotImplementedError):  # Windows has no signal handlers in its event loop
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)

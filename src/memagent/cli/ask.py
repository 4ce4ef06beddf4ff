"""`memagent ask`: questions in, answers out, everything in between on disk."""

from __future__ import annotations

import asyncio
import io
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from memagent.agent.journal import Journal, check_same
from memagent.agent.plan import plan_reading
from memagent.agent.reader import Reader
from memagent.agent.trace import Step, Trace, total_usage
from memagent.cli.ask_request import Request, make_request
from memagent.cli.models import pull_if_known
from memagent.cli.shared.interrupt import stop_like_ctrl_c
from memagent.cli.shared.messages import with_options
from memagent.cli.shared.options import PanelCommand, panel_option, settings_options
from memagent.cli.shared.output import print_answers, print_plan
from memagent.cli.shared.progress import ReadingProgress, duration
from memagent.cli.shared.run_options import limit_options, price_options, run_options
from memagent.config import AgentConfig, EngineConfig, LocalConfig, VllmConfig
from memagent.documents.chunking import Chunks
from memagent.documents.document import Document
from memagent.documents.loaders import load_with_report
from memagent.engines import store
from memagent.engines.base import BaseEngine, check_engine, open_engine, split_spec
from memagent.engines.openai import EndpointEngine
from memagent.errors import (
    ConfigError,
    DocumentError,
    EngineRefused,
    LimitReached,
    MemagentError,
    RunError,
)
from memagent.runs import Run, read_manifest

INTERRUPTED = 130
STDIN_COPY = "stdin"
"""File in a run directory that keeps what came in on standard input, for resuming."""


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
@run_options("the run")
@limit_options
@price_options
@panel_option(
    "--engine",
    panel="Engine",
    help="Engine as KIND:MODEL: openai:MODEL for an endpoint, local:MODEL for a model in this "
    "process, vllm:MODEL for vLLM started on the GPUs here, scripted for none at all.",
)
@settings_options(EngineConfig, panel="Engine")
@settings_options(LocalConfig, panel="Local model")
@settings_options(VllmConfig, panel="vLLM", skip=tuple(LocalConfig.model_fields))
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
      memagent ask book.pdf -q "Who inherits the house?"
      memagent ask book.pdf -q "Who inherits the house?" --base-url http://localhost:8000/v1 --model NAME
      memagent ask src/ README.md -q "Where are retries handled?" --model NAME --show-memory
      memagent ask --resume RUN

    Address and key of an endpoint may be set as MEMAGENT_BASE_URL and MEMAGENT_API_KEY (or
    OPENAI_BASE_URL and OPENAI_API_KEY, or URL and API_KEY). Where neither --engine, --model nor an
    endpoint is given, a small model reads in this process: local:smollm2-135m, fetched on its first
    use (98 to 269 MB).

    Exit codes: 0 answered, 2 something to correct in the input, 3 the endpoint failed for longer than
    --patience, 4 stopped at --max-calls or --max-cost, 130 interrupted. After 3, 4 and 130 what was
    read is kept and the command to go on is printed.
    """
    return Ask(options).run()


class Ask:
    """One call of the command."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._console = Console(stderr=True)
        self._is_quiet: bool = options["quiet"]
        self._resume: Path | None = options["resume"]
        self._stdin_bytes = b""

    def run(self) -> int:
        """The whole command; its exit code."""
        request = make_request(self._options)
        document = self._load(request)
        engine = self._open(request)
        return asyncio.run(self._run(request, document, engine))

    async def _run(self, request: Request, document: Document, engine: BaseEngine) -> int:
        try:
            reader = await self._reader(request, engine)
            chunks = reader.chunks(document)
            for question in request.questions:
                reader.check(question)
            if self._options["dry_run"]:
                with self._console.status("counting"):
                    plan = plan_reading(reader, request.questions, chunks)
                print_plan(plan, request.prices, as_json=self._options["as_json"])
                return 0
            return await self._read(request, reader, chunks)
        finally:
            await engine.aclose()

    # --- the text, the reader, the run ---------------------------------------------------------

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
        if self._resume:
            return _kept_stdin(self._resume / STDIN_COPY)
        if sys.stdin.isatty():
            return None  # the loader says what to do instead
        self._stdin_bytes = sys.stdin.buffer.read()
        return io.BytesIO(self._stdin_bytes)

    def _open(self, request: Request) -> BaseEngine:
        """The engine; a local model with a short name is pulled when it is first used."""
        kind, model = split_spec(request.engine)
        if kind == "local":
            check_engine(kind)  # before a download that would be for nothing
            self._tell_model(request, model)
            try:
                pull_if_known(model, is_quiet=self._is_quiet)
            except ConfigError as error:
                raise ConfigError(f"{error}; or give an endpoint: --base-url URL") from None
        if kind == "vllm":
            self._tell("starting vLLM; it is ended with this command")
        return open_engine(request.engine, **request.engine_settings)

    async def _reader(self, request: Request, engine: BaseEngine) -> Reader:
        config = AgentConfig.parse({**engine.reading_defaults, **request.agent_settings})
        if isinstance(engine, EndpointEngine):
            await engine.inspect()
        _check_served_window(engine, config)
        reader = Reader(engine, tokenizer=request.tokenizer, config=config, limits=request.limits())
        if reader.tokenizer_note:
            self._tell(
                f"token counts are estimated with a margin: {reader.tokenizer_note}; "
                "--tokenizer names one"
            )
        return reader

    def _journal(self, request: Request, reader: Reader, document: Document) -> Journal:
        wanted = reader.identity(request.questions, document)
        if self._resume:
            check_same(read_manifest(self._resume), wanted, self._resume)
            return Journal(Run.open(self._resume))
        files = {STDIN_COPY: self._stdin_bytes} if "-" in request.paths else {}
        manifest = {**wanted, "command": request.kept(reader.engine)}
        return Journal(Run.create(self._options["run_dir"], manifest, files=files))

    # --- reading -------------------------------------------------------------------------------

    async def _read(self, request: Request, reader: Reader, chunks: Chunks) -> int:
        journal = self._journal(request, reader, chunks.document)
        stop_like_ctrl_c()
        try:
            traces = await self._watched(request, reader, chunks, journal)
        except asyncio.CancelledError:
            self._tell_kept(journal, "interrupted")
            return INTERRUPTED
        except MemagentError as error:
            if isinstance(error, EngineRefused) and journal.discard_if_empty():
                raise
            advice = "raise the limit and " if isinstance(error, LimitReached) else ""
            self._tell_kept(journal, str(error), advice)
            return error.exit_code
        finally:
            journal.close()
        print_answers(traces, as_json=self._options["as_json"])
        self._tell_summary(traces, journal, reader)
        return 0

    async def _watched(
        self, request: Request, reader: Reader, chunks: Chunks, journal: Journal
    ) -> list[Trace]:
        """Read with the progress shown, what was finished before counted in."""
        finished = [journal.finished(number) for number in range(len(request.questions))]
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

        with progress:
            return await reader.read(request.questions, chunks, journal, on_step)

    # --- what is told on the side --------------------------------------------------------------

    def _tell_model(self, request: Request, model: str) -> None:
        """Which model reads if none was named, and its own settings of reading that are used."""
        settings = ", ".join(
            f"{name} {value}"
            for name, value in store.reading_defaults(model).items()
            if name not in request.agent_settings
        )
        if request.is_embedded:
            with_own = f" ({settings})" if settings else ""
            self._tell(
                f"no endpoint given: reading with the embedded model {request.engine}{with_own}"
            )
        elif settings:
            self._tell(f"reading as suits {model}: {settings}")

    def _tell_summary(self, traces: Sequence[Trace], journal: Journal, reader: Reader) -> None:
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

    def _tell_kept(self, journal: Journal, reason: str, advice: str = "") -> None:
        path = shlex.quote(str(journal.path))
        self._print(f"memagent: {with_options(reason)}")
        self._print(f"what was read is kept; {advice}go on with: memagent ask --resume {path}")

    def _tell(self, text: str) -> None:
        if not self._is_quiet:
            self._print(text, style="dim")

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True, style=style)


def _kept_stdin(path: Path) -> io.BytesIO:
    try:
        return io.BytesIO(path.read_bytes())
    except OSError as error:
        raise RunError(
            f"{path}, the text that came in on standard input, cannot be read ({error.strerror}); "
            "start a new run"
        ) from None


def _check_served_window(engine: BaseEngine, config: AgentConfig) -> None:
    served = engine.served_window
    if served is not None and served < config.window:
        raise ConfigError(
            f"{engine.model} has a window of {served} tokens, less than window {config.window}; "
            f"give --window {served} and, if needed, a lower --chunk-tokens"
        )

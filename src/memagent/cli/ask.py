"""`memagent ask`: questions in, answers out, everything in between on disk."""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from memagent import trust
from memagent.agent import work
from memagent.agent.journal import Journal, read_reading
from memagent.agent.model_call import LimitSettings
from memagent.agent.reader import Reader, checked_question, read_questions
from memagent.agent.trace import Step, Trace, call_seconds, model_changes
from memagent.agent.work import MOST_COUNTED, done_before, plan_reading
from memagent.cli.ask_output import ReadingProgress, print_answers, print_plan
from memagent.cli.shared.console import INTERRUPTED, CommandConsole, resumable
from memagent.cli.shared.options import PanelCommand, panel_option, taking
from memagent.cli.shared.progress import duration
from memagent.cli.shared.run_options import (
    ReaderOptions,
    RunOptions,
    open_chosen,
    open_reader,
    reader_options,
    run_options,
)
from memagent.config import AgentConfig
from memagent.documents.chunking import Chunks
from memagent.documents.document import Document
from memagent.documents.loaders import MAX_PIPE_BYTES, lines_of_skipped, load_with_report, read_pipe
from memagent.documents.tree import FileState, state_of, wait_for_change
from memagent.engines import store
from memagent.engines.addresses import OPENAI_URL, endpoint_from
from memagent.engines.base import ANY_ENDPOINT, BaseEngine, EngineChoice, check_installed, opener_of
from memagent.errors import ConfigError, DocumentError, RunError
from memagent.names import absolute_path
from memagent.run_files import read_file
from memagent.runs import MANIFEST

# --- what is asked --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AskOptions:
    """The options of the command."""

    files: tuple[str, ...]
    questions: tuple[str, ...]
    questions_file: str | None
    as_json: bool
    dry_run: bool
    show_memory: bool
    quiet: bool
    continues: Path | None
    watch: bool
    watch_seconds: float | None
    encoding: str | None
    run: RunOptions
    reader: ReaderOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class AskRequest:
    """A reading to do: what is read with what."""

    paths: tuple[str, ...]
    folder: str
    """Where relative paths start."""
    questions: tuple[str, ...]
    encoding: str | None
    engine: EngineChoice
    agent_settings: dict[str, Any]
    tokenizer: str | None
    limits: LimitSettings
    is_stored: bool = False
    """Whether it is that of an earlier run, which has all settings."""

    @property
    def files(self) -> list[str]:
        """The absolute paths of what is read, but for standard input."""
        names = [os.path.expanduser(path) for path in self.paths if path != "-"]
        return [os.path.abspath(os.path.join(self.folder, name)) for name in names]

    def kept(self, engine: BaseEngine) -> dict[str, Any]:
        """What a manifest keeps, to resume by: no key, no credentials in the address."""
        choice = self.engine.kept(engine)
        return {
            "paths": list(self.paths),
            "folder": self.folder,
            "encoding": self.encoding,
            "engine": choice.spec,
            "engine_settings": dict(choice.settings),
            "limits": self.limits.given,
        }


def make_request(options: AskOptions) -> AskRequest:
    """The request that these options mean, checked; of a run, with what is given now.

    The run refuses what would change its trace.
    """
    resume, continues = options.run.resume, options.continues
    if continues is not None and resume is not None:
        raise ConfigError(
            "give --resume for the same text or --continue for one that has changed, not both"
        )
    earlier = resume or continues
    manifest = read_reading(earlier) if earlier else {}
    stored: Mapping[str, Any] | None = manifest.get("command")
    if earlier and stored is None:
        raise ConfigError("this run was begun from Python; resume it there with run_dir")
    stored = stored or {"paths": (), "folder": "", "encoding": None, "limits": {}}
    reader = options.reader
    files = options.questions_file
    given = [checked_question(question) for question in options.questions]
    questions = (*given, *(read_questions(files) if files else ()))
    settings = {**reader.agent}
    if prompts := settings.get("prompts"):
        settings["prompts"] = absolute_path(prompts)
    engine = None
    if earlier:  # with the model it found when none was named
        spec = stored["engine"]
        spec = f"{spec}{manifest['model']}" if spec == ANY_ENDPOINT else spec
        engine = EngineChoice(spec=spec, settings=stored["engine_settings"])
    tokenizer = absolute_path(reader.tokenizer) if reader.tokenizer else None
    request = AskRequest(
        paths=options.files or tuple(stored["paths"]),
        folder=_current_folder() if options.files or not earlier else stored["folder"],
        questions=questions or tuple(manifest.get("questions", ())),
        encoding=options.encoding or stored["encoding"],
        engine=reader.engine.choose(stored=engine),
        agent_settings={**manifest.get("agent", {}), **settings},
        tokenizer=tokenizer or manifest.get("tokenizer"),
        limits=reader.limits.over(LimitSettings(**stored["limits"])),
        is_stored=earlier is not None,
    )
    _check(request, options, earlier)
    return request


def _check(request: AskRequest, options: AskOptions, earlier: Path | None) -> None:
    """Raise ConfigError for a request that cannot be meant, or that reads files which only a run directory names."""
    if earlier and not options.files:
        how = "resume" if options.run.resume else "continue"
        again = shlex.join(["memagent", "ask", *request.files, f"--{how}", str(earlier)])
        what, may = f"the text {', '.join(request.files)}", "the model may read it"
        trust.require("file", *request.files, what=what, may=may, again=again)
    trust.remember("file", *request.files)
    if not request.paths:
        raise ConfigError("name at least one file or folder to read, or - for standard input")
    if options.watch and ("-" in request.paths or options.dry_run):
        raise ConfigError(
            "--watch follows files on disk; name files, and leave out --dry-run and -"
        )
    if not request.questions:
        last = request.paths[-1]
        if len(last.split()) > 1 and not Path(request.folder, last).exists():
            raise ConfigError(f"{last!r} is no file; ask it as a question with -q")
        raise ConfigError("ask something: -q QUESTION, or --questions FILE")
    request.limits.open()  # raises before an engine is opened in vain


def _current_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current folder no longer exists; change to another one") from None


WATCH_SECONDS = 2.0
"""How often --watch looks at the files; they are read when they have not changed for so long."""
MAX_PLACES = 5
"""Places that a message names."""
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
    help="Question about the text; repeatable.",
)
@panel_option(
    "--questions",
    "questions_file",
    metavar="FILE",
    panel="Options",
    help="File of questions, after those of -q: on each line a JSON string, or an object with question.",
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
    help="Print the number of calls and tokens, the cost if prices are given, and the time as far as calls were "
    "measured; send no calls to an endpoint.",
)
@panel_option("--show-memory", is_flag=True, panel="Options", help="Show the memory as it changes.")
@panel_option("--quiet", is_flag=True, panel="Options", help="Show no progress.")
@run_options("the run")
@panel_option(
    "--continue",
    "continues",
    type=click.Path(path_type=Path),
    panel="Run",
    help="Read on after the text of the run in this folder has grown or changed: a new run, which takes over the "
    "sections before the first change. FILES are those of the run when not given.",
)
@panel_option(
    "--watch",
    is_flag=True,
    panel="Run",
    help="Wait for the files to change and read on, until interrupted; every change is a run that continues the "
    "one before.",
)
@reader_options(encoding=str, watch_seconds=click.FloatRange(min=0.05))
@taking(AskOptions)
def command(options: AskOptions) -> int:
    """Ask questions of FILES: text, Markdown, HTML, PDF, DOCX, EPUB, notebooks, chat logs (JSONL),
    folders of sources, any of these gzipped, or - for standard input. Texts of any length are read
    section by section through a window of fixed size.

    \b
      memagent ask book.pdf -q "Who inherits the house?"
      memagent ask book.pdf -q "Who inherits the house?" --base-url http://localhost:8000/v1 --model NAME
      memagent ask src/ README.md -q "Where are retries handled?" --model NAME --show-memory
      memagent ask report.pdf -q "Who inherits the house?" --evidence
      memagent ask --resume RUN
      memagent ask --continue RUN log.txt

    Address and key of an endpoint may be set as MEMAGENT_BASE_URL and MEMAGENT_API_KEY (or
    OPENAI_BASE_URL and OPENAI_API_KEY); a key is sent only to the host it was set for. Where neither
    --engine, --model nor the address of an endpoint is given, a small model reads in this process
    and no text leaves it: local:memagent-135m, downloaded on its first use (98 MB).

    Exit codes: 0 answered, 2 an error in the input, 3 the endpoint failed for longer than
    the setting patience, 4 stopped at --max-calls or --max-cost, 130 interrupted. After 3, 4 and 130 what was
    read is kept and the command to resume is printed.
    """
    return Ask(options).run()


class Ask:
    """One call of the command."""

    def __init__(self, options: AskOptions) -> None:
        self._options = options
        self._console = CommandConsole(is_quiet=options.quiet)
        self._stdin_bytes = b""
        self._continues = options.continues
        """The run that the next one continues."""
        self._request = make_request(options)
        self._paths = [
            Path(self._request.folder, path).expanduser() for path in self._request.paths
        ]
        self._seen: FileState = state_of(self._paths) if options.watch else ()
        """The files as they were when they were read."""
        self._engine: BaseEngine
        self._reader: Reader

    def run(self) -> int:
        """The whole command; its exit code."""
        request = self._request
        with self._console.notice(f"loading {', '.join(request.paths[:3])}"):
            document = self._load()
        check_installed(request.engine.kind)
        self._report_model()
        with self._console.notice(f"opening {request.engine.title}"):
            opener_of(request.engine.kind)
            self._engine = open_chosen(request.engine, self._console)
        self._report_endpoint()
        return asyncio.run(self._run(document))

    async def _run(self, document: Document) -> int:
        request, options = self._request, self._options
        try:
            settings: dict[str, Any] = request.agent_settings
            if request.is_stored:  # with all settings, whatever suits the model now
                settings = {"config": AgentConfig.parse(settings)}
            self._reader = reader = open_reader(
                self._engine,
                self._console,
                options.reader.agent,
                tokenizer=request.tokenizer,
                limits=request.limits.open(),
                **settings,
            )
            chunks = reader.chunks(document)
            longest = sorted(request.questions, key=len, reverse=True)
            for question in longest[: MOST_COUNTED if options.dry_run else None]:
                reader.check(question)
            if options.dry_run:
                await self._count(chunks)
                return 0
            await self._read(chunks)
            while options.watch:
                await self._read_on()
            return 0
        finally:
            await self._engine.aclose()

    async def _count(self, chunks: Chunks) -> None:
        """Print what a reading will take."""
        request, resume = self._request, self._options.run.resume
        with self._console.busy("counting"):
            done = await done_before(
                self._reader, request.questions, chunks, resumes=resume, continues=self._continues
            )
            plan = plan_reading(self._reader, request.questions, chunks, done=done)
        speed = work.recall(self._engine)
        print_plan(plan, request.limits.prices, speed, self._engine, as_json=self._options.as_json)

    async def _read_on(self) -> None:
        """Read again when the files have changed; ends when it is interrupted."""
        self._console.report(f"watching {', '.join(self._request.paths[:3])}; Ctrl-C ends")
        seconds = self._options.watch_seconds or WATCH_SECONDS
        try:
            self._seen = await wait_for_change(self._paths, self._seen, seconds=seconds)
        except asyncio.CancelledError:
            raise click.exceptions.Exit(INTERRUPTED) from None
        try:
            document = await asyncio.to_thread(self._load)
        except DocumentError as error:  # a log that was emptied grows again
            self._console.report(f"not read: {error}")
            return
        await self._read(self._reader.chunks(document))

    # --- the text and the run ------------------------------------------------------------------

    def _load(self) -> Document:
        request = self._request
        if not os.path.isdir(request.folder):
            raise DocumentError(
                f"the folder {request.folder}, where the run was begun, is gone; name its files again"
            )
        stdin = None  # before the folder changes, as `--resume` is of this one
        if "-" in request.paths and (self._options.run.resume or not sys.stdin.isatty()):
            stdin = self._stdin()  # of a terminal the loader says what to do instead
        with chdir(request.folder):
            loaded = load_with_report(request.paths, encoding=request.encoding, stdin=stdin)
        for line in lines_of_skipped(loaded.skipped):
            self._console.report(line)
        return loaded.document

    def _stdin(self) -> io.BytesIO:
        """What came in on standard input, from the run when it is resumed."""
        if self._options.run.resume is None:
            self._stdin_bytes = read_pipe(sys.stdin.buffer, "standard input")
            return io.BytesIO(self._stdin_bytes)
        path = self._options.run.resume / STDIN_COPY
        try:
            return io.BytesIO(read_file(path, max_bytes=MAX_PIPE_BYTES))
        except OSError as error:
            raise RunError(
                f"{path}, the text that came in on standard input, cannot be read ({error.strerror}); "
                "start a new run"
            ) from None

    def _journal(self, document: Document) -> Journal:
        request, reader = self._request, self._reader
        identity = reader.identity(request.questions, document)
        resume = self._options.run.resume if self._continues is None else None
        if resume:
            return Journal.open(resume, identity)
        also = reader.continued(self._continues, request.questions, document)
        path = self._options.run.run_dir
        if also:
            self._console.report(f"continuing {self._continues}")
            if path is not None and (path / MANIFEST).exists():  # of --watch, after the first
                named = (path.with_name(f"{path.name}-{n}") for n in itertools.count(2))
                path = next(each for each in named if not each.exists())
        files = {STDIN_COPY: self._stdin_bytes} if "-" in request.paths else {}
        manifest = {**identity, "command": request.kept(self._engine)}
        return Journal.create(path, manifest, files=files, also=also)

    async def _read(self, chunks: Chunks) -> None:
        journal = self._journal(chunks.document)
        try:
            with resumable(journal, self._console, kept="what was read is kept"):
                traces = await self._with_progress(chunks, journal)
            try:
                print_answers(traces, as_json=self._options.as_json)
                sys.stdout.flush()  # whoever watches through a pipe sees it now
            finally:  # also where the output is full: it says where the answers are kept
                self._report_summary(traces, journal, chunks.document)
        finally:
            journal.close()
        self._continues = journal.path

    async def _with_progress(self, chunks: Chunks, journal: Journal) -> list[Trace]:
        """Read with the progress shown."""
        questions = self._request.questions
        progress = ReadingProgress(
            chunks,
            len(questions),
            console=self._console,
            show_memory=self._options.show_memory,
            config=self._reader.config,
        )
        self._engine.on_retry = progress.retry
        news = [f"reading {chunks.document.source}; the run is kept in {journal.path}"]

        def on_step(question_number: int, step: Step) -> None:
            while news:  # not before the first step: a run that is refused at once is not kept
                self._console.report(news.pop())
            progress.on_step(question_number, step)

        with progress:
            try:
                return await self._reader.read(questions, chunks, journal, on_step)
            finally:
                work.remember(
                    self._engine,
                    prompt_tokens=progress.prompt_tokens,
                    call_seconds=progress.call_seconds,
                    seconds=progress.seconds,
                )

    # --- messages ------------------------------------------------------------------------------

    def _report_model(self) -> None:
        """Which model reads if none was named, and which reading defaults of the model apply."""
        choice = self._request.engine
        defaults = store.reading_defaults(choice.model) if choice.kind == "local" else {}
        settings = self._applied(defaults)
        if choice.is_embedded:
            with_defaults = f" ({settings})" if settings else ""
            self._console.report(
                f"no endpoint given: reading with the embedded model {choice.spec}{with_defaults}"
            )
            if os.environ.get("OPENAI_API_KEY"):
                self._console.report(
                    "OPENAI_API_KEY is set and not used: no text is sent; `model` names a model of OpenAI"
                )
        elif settings:
            self._console.report(f"reading as suits {choice.model}: {settings}")

    def _report_endpoint(self) -> None:
        """Where the text goes if no address was given, and which reading defaults of a served model apply."""
        choice, engine = self._request.engine, self._engine
        if choice.kind == "openai" and not endpoint_from(os.environ, choice.address).base_url:
            self._console.report(f"no address given: the text is sent to {OPENAI_URL}")
        settings = self._applied(engine.reading_defaults)
        if choice.kind != "local" and settings:
            self._console.report(f"reading as suits {engine.model}: {settings}")

    def _applied(self, defaults: Mapping[str, Any]) -> str:
        """The reading defaults of a model that no option overrides."""
        given = self._request.agent_settings
        return ", ".join(f"{name} {value}" for name, value in defaults.items() if name not in given)

    def _report_summary(
        self, traces: Sequence[Trace], journal: Journal, document: Document
    ) -> None:
        steps = [step for trace in traces for step in trace.steps]
        usage = journal.replies.usage
        limits = self._reader.limits
        cost = f", cost {limits.cost:.4f}" if limits.has_prices else ""
        reused = f" ({usage.cached_tokens:,} not computed again)" if usage.cached_tokens else ""
        self._console.report(
            f"{usage.calls} calls, {usage.prompt_tokens:,} prompt{reused} and {usage.completion_tokens:,} "
            f"completion tokens in {_call_time(steps)}{cost}"
        )
        cut = [step for step in steps if "reply_cut" in step.flags or "memory_cut" in step.flags]
        if cut:
            self._console.report(
                f"{len(cut)} of {len(steps)} replies were cut by their limit (flagged in the trace); "
                "raise `memory_tokens` or `answer_tokens`"
            )
        for line in _notes_on(traces, document):
            self._console.report(line)
        journal.check_kept()
        self._console.report(f"run: {journal.path}")


def _call_time(steps: Sequence[Step]) -> str:
    """How long calls took; where many were in flight at once, how long that was as well."""
    total, passed = sum(step.seconds for step in steps), call_seconds(steps)
    together = duration(total)
    return (
        f"{together} of calls"
        if duration(passed) == together
        else (f"{duration(passed)}, {together} of calls at once")
    )


def _notes_on(traces: Sequence[Trace], document: Document) -> Iterator[str]:
    """What went otherwise than asked: the format of replies, quotes, parts that were not read."""
    reads = [step for trace in traces for step in trace.steps if step.section is not None]
    others = [step for trace in traces for step in trace.steps if step.section is None]
    if changed := model_changes(trace.served for trace in traces):
        yield changed
    for flag, who in (
        ("withheld", "withheld by the server's content filter"),
        ("refused", "refused by the model"),
    ):
        if num := sum(flag in step.flags for step in reads):
            yield f"{num} of {len(reads)} sections were {who} (flagged in the trace)"
        if any(flag in step.flags for step in others):
            yield f"an answer or a merge was {who}, a part of it at least"
    if num_malformed := sum("malformed" in step.flags for step in reads):
        yield f"{num_malformed} of {len(reads)} replies did not keep the format; they were used as far as possible"
    if num_rejected := sum(len(trace.rejected_quotes) for trace in traces):
        yield f"{num_rejected} quotes are not in the text and were left out (flagged in the trace)"
    for trace in traces:
        if trace.unread:
            num_chars = sum(end - start for start, end in trace.unread)
            yield f"stopped early: {num_chars:,} characters were not read: {_unread(trace, document)}"
        if trace.has_quotes and not trace.citations:
            kept = f"cites none of the {len(trace.ledger)} quotes that were kept"
            yield f"the answer {kept if trace.ledger else 'cites no quotes: none were found'}"


def _unread(trace: Trace, document: Document) -> str:
    """Where the parts are that were not read; of many, the first ones."""
    places = [str(place) for span in trace.unread for place in document.places(*span)]
    more = f" and {len(places) - MAX_PLACES} more" if len(places) > MAX_PLACES else ""
    return ", ".join(places[:MAX_PLACES]) + more

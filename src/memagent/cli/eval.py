"""`memagent eval`: ask many questions by one or more methods, and score the answers."""

from __future__ import annotations

import asyncio
import json
import math
import shlex
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from memagent.cli.eval_request import EvalRequest, make_request
from memagent.cli.models import pull_if_known
from memagent.cli.shared.interrupt import stop_like_ctrl_c
from memagent.cli.shared.messages import with_options
from memagent.cli.shared.options import PanelCommand, panel_option, settings_options
from memagent.cli.shared.progress import SECONDS_BETWEEN_LINES, duration
from memagent.cli.shared.run_options import limit_options, price_options, run_options
from memagent.config import AgentConfig, EngineConfig, LocalConfig, VllmConfig
from memagent.data.tasks.lengths import length_tokenizer
from memagent.documents.tokenizers import Tokenizer, open_tokenizer, tokenizer_for_model
from memagent.engines import store
from memagent.engines.base import BaseEngine, check_engine, open_engine, split_spec
from memagent.engines.openai import EndpointEngine
from memagent.errors import EngineRefused, LimitReached, MemagentError
from memagent.eval.calls import Gate
from memagent.eval.items import Item, Maker, Plan, make_plan
from memagent.eval.methods import method_sha256, open_method, settings_for
from memagent.eval.records import KIND, ItemRecord
from memagent.eval.report.tables import Entry, ResultRow, result_rows
from memagent.eval.runner import Evaluation, OpenMethod, open_run
from memagent.eval.suites import MethodChoice
from memagent.rewards.verifiers import GRADERS
from memagent.runs import Run

INTERRUPTED = 130
SHOWN_FAILURES = 3
PROBE = (
    "The 3 clerks didn't mention Bergström's ledger; 12,480 barrels of salt were sold in 1871.\n\n"
)
"""Tokenizers that count these words alike are taken for the same."""
ONE_CALL = ("direct", "yarn", "bm25")


@click.command("eval", cls=PanelCommand)
@click.argument("suite", required=False, type=click.Path(path_type=Path), metavar="[SUITE.toml]")
@panel_option(
    "--task",
    "tasks",
    multiple=True,
    panel="What is asked",
    help="Task to make examples of; may be given several times.",
)
@panel_option(
    "--file",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    panel="What is asked",
    help="File of examples; may be given several times.",
)
@panel_option(
    "--lengths", panel="What is asked", help="Lengths of the texts in tokens, such as 8k,32k,128k."
)
@panel_option(
    "--docs", panel="What is asked", help="Lengths of the texts in documents, such as 50,100,200."
)
@panel_option(
    "--num",
    type=click.IntRange(min=1),
    panel="What is asked",
    help="Examples of each task and length.",
)
@panel_option(
    "--seed", type=int, panel="What is asked", help="Every example and every sample depends on it."
)
@panel_option(
    "--source",
    "sources",
    multiple=True,
    metavar="[NAME=]PATH",
    panel="What is asked",
    help="A file or folder of yours in place of a download.",
)
@panel_option(
    "--length-tokenizer",
    panel="What is asked",
    help="Tokenizer that counts the lengths of texts that are made. [default: the model's]",
)
@panel_option(
    "--method",
    "methods",
    multiple=True,
    panel="How",
    help="reader, reader:PROMPTS, direct, yarn, bm25, refine, map_reduce, or FILE.py:FUNCTION; may be given several times.",
)
@panel_option(
    "--grader",
    type=click.Choice(tuple(GRADERS)),
    panel="How",
    help="Grader in place of the one that each example names.",
)
@panel_option(
    "--set",
    "changes",
    multiple=True,
    metavar="NAME=VALUE",
    panel="How",
    help="Anything else in the suite, such as tasks.0.num=16.",
)
@settings_options(AgentConfig, panel="How", skip=("seed",))
@panel_option(
    "--tokenizer",
    panel="How",
    help="Tokenizer of the model: a hub id, a path, tiktoken:NAME, bytes.",
)
@run_options("the records")
@limit_options
@price_options
@panel_option(
    "--processes",
    type=click.IntRange(min=0),
    panel="Run",
    help="Processes that make examples; 0 makes them in this one.",
)
@panel_option("--dry-run", is_flag=True, panel="Run", help="Say what would be asked, and stop.")
@panel_option("--json", "as_json", is_flag=True, panel="Run", help="Print the results as JSON.")
@panel_option("--quiet", is_flag=True, panel="Run", help="Show no progress.")
@panel_option(
    "--engine",
    panel="Engine",
    help="Engine as KIND:MODEL, such as local:smollm2-135m, vllm:MODEL or scripted.",
)
@settings_options(EngineConfig, panel="Engine")
@settings_options(LocalConfig, panel="Local model")
@settings_options(VllmConfig, panel="vLLM", skip=tuple(LocalConfig.model_fields))
def command(**options: Any) -> int:
    """Ask many questions by one or more methods, and score the answers.

    \b
      memagent eval configs/eval/smoke.toml
      memagent eval --task ruler/niah_multikey_2 --lengths 8k,32k,128k --num 500 \\
        --method reader --method direct --base-url http://localhost:8000/v1
      memagent eval --file dev.jsonl --method my_method.py:ask_twice
      memagent eval --resume RUN

    Each item is a record in the run's folder as soon as it is finished, with its full trace. An item
    that fails counts as wrong, and is told. At the end a table is printed, with 95 % intervals.

    Exit codes: 0 done, 2 something to correct in the input, 3 the engine failed again and again, 4 a
    limit was reached, 130 interrupted. After 3, 4 and 130 everything answered is kept and the command
    to go on is printed.
    """
    return Eval(options).run()


class Eval:
    """One call of the command."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._console = Console(stderr=True)
        self._resume: Path | None = options["resume"]
        self._engines: dict[str, BaseEngine] = {}

    def run(self) -> int:
        """The whole command; its exit code."""
        request = make_request(self._options)
        return asyncio.run(self._run(request))

    async def _run(self, request: EvalRequest) -> int:
        try:
            if self._options["dry_run"] and request.suite.length_tokenizer:
                return self._print_plan(request, self._plan(request, None))
            engine = await self._engine(request, request.settings_of(request.suite.methods[0]))
            tokenizer = self._tokenizer(request, engine)
            plan = self._plan(request, self._length_tokenizer(request, engine, tokenizer))
            if self._options["dry_run"]:
                return self._print_plan(request, plan)
            self._note_tokenizers(plan, tokenizer)
            methods = [
                await self._method(request, choice, tokenizer) for choice in request.suite.methods
            ]
            with Maker(plan, processes=self._options["processes"]) as maker:
                sources = await maker.check(plan)
                with self._opened_run(request, engine, tokenizer, plan, methods, sources) as run:
                    return await self._evaluate(request, plan, maker, methods, run)
        finally:
            for opened in self._engines.values():
                await opened.aclose()

    # --- engines, methods, items ---------------------------------------------------------------

    async def _engine(self, request: EvalRequest, settings: dict[str, Any]) -> BaseEngine:
        """The engine with these settings; methods with the same ones share it."""
        key = json.dumps(settings, sort_keys=True, default=str)
        if key not in self._engines:
            kind, model = split_spec(request.engine)
            if kind == "local":
                check_engine(kind)  # before a download that would be for nothing
                pull_if_known(model, is_quiet=self._options["quiet"])
            if request.is_embedded:
                self._tell(f"no endpoint given: asking the embedded model {request.engine}")
            engine = open_engine(request.engine, **settings)
            self._engines[key] = engine
            if isinstance(engine, EndpointEngine):
                await engine.inspect()
        return self._engines[key]

    def _tokenizer(self, request: EvalRequest, engine: BaseEngine) -> Tokenizer:
        if request.suite.tokenizer is not None:
            return open_tokenizer(request.suite.tokenizer)
        tokenizer, note = tokenizer_for_model(engine.tokenizer)
        if note:
            self._tell(f"token counts are estimated with a margin: {note}; --tokenizer names one")
        return tokenizer

    def _length_tokenizer(
        self, request: EvalRequest, engine: BaseEngine, tokenizer: Tokenizer
    ) -> str | None:
        """What counts the lengths of made texts: as named, else the model's own, if it can be had."""
        if request.suite.length_tokenizer is not None:
            return request.suite.length_tokenizer
        kind, model = split_spec(request.engine)
        if kind == "local" and model in store.KNOWN:
            return model  # a name that is the same on every machine
        if not tokenizer.is_exact:
            return None
        return request.suite.tokenizer or engine.tokenizer

    def _plan(self, request: EvalRequest, name: str | None) -> Plan:
        return make_plan(request.suite, length_tokenizer=request.suite.length_tokenizer or name)

    async def _method(
        self, request: EvalRequest, choice: MethodChoice, tokenizer: Tokenizer
    ) -> OpenMethod:
        engine = await self._engine(request, request.settings_of(choice))
        settings = settings_for(choice.name, engine, request.suite.agent, choice.settings)
        gate = Gate(engine, concurrency=_concurrency(request, engine))
        if choice.name == "yarn" and split_spec(request.engine)[0] not in ("local", "vllm"):
            self._tell(
                f"{choice.title}: the endpoint must serve {engine.model} with YaRN settings; "
                "`--engine vllm:MODEL` starts it so"
            )
        return OpenMethod(
            title=choice.title,
            function=open_method(choice.name),
            settings=settings,
            gate=gate,
            tokenizer=tokenizer,
        )

    def _note_tokenizers(self, plan: Plan, tokenizer: Tokenizer) -> None:
        for name in plan.tokenizers if tokenizer.is_exact else ():
            with suppress(MemagentError):  # of files made elsewhere it may not be here
                if not _count_alike(length_tokenizer(name), tokenizer):
                    self._tell(
                        f"lengths are counted by the tokenizer {name}; the model's own "
                        f"({tokenizer.name}) counts otherwise"
                    )

    # --- the run -------------------------------------------------------------------------------

    def _opened_run(
        self,
        request: EvalRequest,
        engine: BaseEngine,
        tokenizer: Tokenizer,
        plan: Plan,
        methods: list[OpenMethod],
        sources: dict[str, str],
    ) -> Run:
        suite = request.suite
        wanted: dict[str, Any] = {
            "model": engine.model,
            "tokenizer": tokenizer.name,
            "length_tokenizer": ", ".join(plan.tokenizers) or None,
            "seed": suite.seed,
            "grader": suite.grader,
            "num": suite.num,
            "tasks": [task.model_dump(mode="json", exclude={"files"}) for task in suite.tasks],
            "methods": {
                method.title: {
                    "name": choice.name,
                    "settings": method.settings.model_dump(mode="json", exclude={"seed"}),
                    "sha256": method_sha256(choice.name),
                }
                for method, choice in zip(methods, suite.methods, strict=True)
            },
            "files": {Path(name).name: digest for name, digest in plan.files.items()},
            "sources": sources,
        }
        if self._resume is not None:
            return open_run(self._resume, wanted)
        manifest = {
            "kind": KIND,
            "suite": request.suite_name,
            **wanted,
            "num_items": len(plan.items) * len(methods),
            "engine": {"spec": request.engine, "settings": request.public_settings(engine)},
            "identity": wanted,
            "command": request.kept(engine),
        }
        return Run.create(self._options["run_dir"], manifest)

    async def _evaluate(
        self,
        request: EvalRequest,
        plan: Plan,
        maker: Maker,
        methods: list[OpenMethod],
        run: Run,
    ) -> int:
        stop_like_ctrl_c()
        progress = EvalProgress(
            plan, len(methods), console=self._console, is_quiet=self._options["quiet"]
        )
        evaluation = Evaluation(
            methods=methods,
            seed=request.suite.seed,
            run=run,
            limits=request.limits(),
            prices=request.prices,
            concurrency=max(_concurrency(request, engine) for engine in self._engines.values()),
            watch=progress.record,
        )
        progress.begin(evaluation.records.values())
        for engine in self._engines.values():
            if isinstance(engine, EndpointEngine):
                engine.on_retry = lambda failure, delay: progress.retry(failure.reason, delay)
        try:
            with progress:
                records = await evaluation.evaluate(plan, maker)
        except asyncio.CancelledError:
            self._tell_kept(run, "interrupted")
            return INTERRUPTED
        except MemagentError as error:
            if isinstance(error, EngineRefused) and run.discard_if_empty():
                raise
            advice = "raise the limit and " if isinstance(error, LimitReached) else ""
            self._tell_kept(run, str(error), advice)
            return error.exit_code
        self._print_results(records)
        self._tell(f"run: {run.path}")
        return 0

    # --- what is told --------------------------------------------------------------------------

    def _print_results(self, records: list[ItemRecord]) -> None:
        rows = result_rows(Entry(record.method, record) for record in records)
        if self._options["as_json"]:
            print(json.dumps([_as_json(row) for row in rows], ensure_ascii=False))
            return
        print(results_table(rows), end="")
        failed = [record for record in records if record.status == "failed"]
        if failed:
            print(f"{len(failed):,} of {len(records):,} items failed; they count as wrong:")
            reasons = Counter(record.error or "" for record in failed)
            for reason, num in reasons.most_common(SHOWN_FAILURES):
                print(f"  {num:,} x {reason}")
            if len(reasons) > SHOWN_FAILURES:
                print(f"  and {len(reasons) - SHOWN_FAILURES:,} other reasons, see the records")

    def _print_plan(self, request: EvalRequest, plan: Plan) -> int:
        cells = Counter((item.task, item.target_tokens) for item in plan.items)
        for (task, target), num in sorted(
            cells.items(), key=lambda cell: (cell[0][0], cell[0][1] or 0)
        ):
            length = "as it is" if target is None else f"{target:,} tokens"
            print(f"{task}, {length}: {num:,} items")
        for choice in request.suite.methods:
            calls = sum(_num_calls(item, choice, request) for item in plan.items)
            print(f"{choice.title}: about {calls:,} calls")
        return 0

    def _tell_kept(self, run: Run, reason: str, advice: str = "") -> None:
        path = shlex.quote(str(run.path))
        self._print(f"memagent: {with_options(reason)}")
        self._print(f"all answers are kept; {advice}go on with: memagent eval --resume {path}")

    def _tell(self, text: str) -> None:
        if not self._options["quiet"]:
            self._print(text, style="dim")

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True, style=style)


class EvalProgress:
    """Shows how far an evaluation has come: a bar on a terminal, now and then a line elsewhere."""

    def __init__(self, plan: Plan, num_methods: int, *, console: Console, is_quiet: bool) -> None:
        self._tokens = {
            _cell(item.task, item.target_tokens): item.num_tokens for item in plan.items
        }
        self._num_total = len(plan.items) * num_methods
        self._work_total = sum(item.num_tokens + 1 for item in plan.items) * num_methods
        self._work_before = self._work_done = 0
        self._num_done = self._num_failed = 0
        self._score = self._cost = 0.0
        self._has_cost = False
        self._console = console
        self._is_quiet = is_quiet
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
        self._task = self._bar.add_task("asking", total=self._num_total, note="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def begin(self, records: Iterable[ItemRecord]) -> None:
        """Take in what was finished before."""
        for record in records:
            self._count(record)
        self._work_before = self._work_done
        if self._num_done and not self._is_quiet:
            self._print(f"going on after {self._num_done:,} of {self._num_total:,} items")

    def record(self, record: ItemRecord) -> None:
        """Take in a finished item."""
        self._count(record)
        self._note = ""
        self._refresh()

    def retry(self, reason: str, delay: float) -> None:
        """Tell that a call failed and will be tried again."""
        self._note = f"{reason}; again in {delay:.0f} s"
        if not self._console.is_terminal and not self._is_quiet and delay >= 1:
            self._print(f"the endpoint failed ({self._note})")
        self._refresh()

    def _count(self, record: ItemRecord) -> None:
        self._num_done += 1
        self._num_failed += record.status == "failed"
        self._score += record.score
        self._cost += record.cost or 0.0
        self._has_cost |= record.cost is not None
        self._work_done += self._tokens.get(_cell(record.task, record.target_tokens), 0) + 1

    def _refresh(self) -> None:
        if self._console.is_terminal:
            self._bar.update(
                self._task,
                description=self._headline(),
                completed=self._num_done,
                note=escape(self._note),
            )
        elif not self._is_quiet and time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self._print(self._headline())

    def _headline(self) -> str:
        parts = [f"{self._num_done:,} of {self._num_total:,} items"]
        if self._num_done:
            parts.append(f"score {self._score / self._num_done:.3f}")
        if self._num_failed:
            parts.append(f"{self._num_failed:,} failed")
        if self._has_cost:
            parts.append(f"cost {self._cost:.4f}")
        done = self._work_done - self._work_before
        if done:
            elapsed = time.monotonic() - self._started
            left = elapsed * (self._work_total - self._work_done) / done
            parts.append(f"{duration(left)} left")
        return ", ".join(parts)

    def _print(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)


# --- the table at the end -------------------------------------------------------------------------


def results_table(rows: list[ResultRow]) -> str:
    """The results for people: a line per task, length and method."""
    head = ("task", "length", "method", "items", "failed", "score", "95 % interval", "calls", "s")
    lines = [
        (
            row.task,
            row.length.label,
            row.series,
            f"{row.num_samples:,}",
            f"{row.num_failed:,}",
            f"{100 * row.score.value:.1f}",
            f"{100 * row.score.low:.1f} to {100 * row.score.high:.1f}",
            f"{row.num_calls:,.1f}",
            f"{row.seconds:,.1f}",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in [head, *lines]) for column in range(len(head))]
    return "".join(
        "  ".join(
            cell.ljust(width) if column in (0, 2) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        + "\n"
        for line in [head, *lines]
    )


def _as_json(row: ResultRow) -> dict[str, Any]:
    return {
        "task": row.task,
        "target_tokens": row.length.tokens,
        "method": row.series,
        "num": row.num_samples,
        "num_failed": row.num_failed,
        "num_cut": row.num_cut,
        "score": row.score.value,
        "low": row.score.low,
        "high": row.score.high,
        "graders": list(row.graders),
        "num_calls": row.num_calls,
        "prompt_tokens": row.prompt_tokens,
        "completion_tokens": row.completion_tokens,
        "seconds": row.seconds,
        "cost": row.cost,
    }


def _num_calls(item: Item, choice: MethodChoice, request: EvalRequest) -> int:
    """Calls that an item will take, about; a method of one's own counts as one."""
    kind = choice.name.partition(":")[0]
    if kind in ONE_CALL or ".py" in choice.name:
        return 1
    values = {**request.suite.agent, **choice.settings}
    chunk_tokens = int(values.get("chunk_tokens") or AgentConfig().chunk_tokens)
    sections = max(1, math.ceil(item.num_tokens / chunk_tokens))
    return sections if kind == "refine" else sections + 1


def _concurrency(request: EvalRequest, engine: BaseEngine) -> int:
    """Calls that may be under way at once."""
    if isinstance(engine, EndpointEngine):
        return engine.config.concurrency
    return request.concurrency or EngineConfig().concurrency


def _cell(task: str, target_tokens: int | None) -> tuple[str, int | None]:
    return (task, target_tokens)


def _count_alike(one: Tokenizer, other: Tokenizer) -> bool:
    return one.count(PROBE) == other.count(PROBE)

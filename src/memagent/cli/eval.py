"""`memagent eval`: ask many questions by one or more methods, and score the answers."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import click

from memagent.cli.eval_options import EvalOptions, request_of
from memagent.cli.shared.engine import engine_options
from memagent.cli.shared.messages import TABLE_METAVAR
from memagent.cli.shared.options import PanelCommand, panel_option, settings_options, taking
from memagent.cli.shared.progress import ProgressFrame, PullProgress, duration
from memagent.cli.shared.run_command import CommandConsole, resumable
from memagent.cli.shared.run_options import limit_options, price_options, run_options
from memagent.config import AgentConfig
from memagent.engines.base import EngineChoice
from memagent.eval.items import EvalPlan
from memagent.eval.records import ItemRecord
from memagent.eval.report.tables import Entry, ResultRow, result_rows
from memagent.eval.runner import Evaluation
from memagent.eval.setup import EvalRequest, estimate_calls, open_evaluation, open_plan
from memagent.rewards.verifiers import GRADERS
from memagent.runs import default_path

SHOWN_FAILURES = 3


@click.command("eval", cls=PanelCommand)
@click.argument("suite", required=False, type=click.Path(path_type=Path), metavar="[SUITE.toml]")
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
    help="File of examples; repeatable.",
)
@panel_option(
    "--lengths", panel="Items", help="Lengths of the texts in tokens, such as 8k,32k,128k."
)
@panel_option(
    "--docs", panel="Items", help="Lengths of the texts in documents, such as 50,100,200."
)
@panel_option(
    "--num",
    type=click.IntRange(min=1),
    panel="Items",
    help="Examples of each task and length.",
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
    "--length-tokenizer",
    panel="Items",
    help="Tokenizer that counts the lengths of generated texts. [default: the model's]",
)
@panel_option(
    "--method",
    "methods",
    multiple=True,
    panel="Methods",
    help="reader, reader:PROMPTS, direct, yarn, bm25, refine, map_reduce, or FILE.py:FUNCTION; repeatable. [default: reader]",
)
@panel_option(
    "--grader",
    type=click.Choice(tuple(GRADERS)),
    panel="Methods",
    help="Override the grader that each example names.",
)
@panel_option(
    "--set",
    "changes",
    multiple=True,
    metavar="NAME=VALUE",
    panel="Methods",
    help="Set any value of the suite, such as tasks.0.num=16; repeatable.",
)
@settings_options(AgentConfig, panel="Methods", skip=("seed",))
@panel_option(
    "--tokenizer",
    panel="Methods",
    help="Tokenizer of the model: a hub id, a path, tiktoken:NAME, bytes.",
)
@run_options("the records")
@limit_options
@price_options
@panel_option(
    "--processes",
    type=click.IntRange(min=0),
    panel="Run",
    help="Processes that generate examples; 0 uses a thread of this one.",
)
@panel_option("--dry-run", is_flag=True, panel="Run", help="Print what would be asked, and stop.")
@panel_option("--json", "as_json", is_flag=True, panel="Run", help="Print the results as JSON.")
@panel_option("--quiet", is_flag=True, panel="Run", help="Show no progress.")
@engine_options
@taking(EvalOptions)
def command(options: EvalOptions) -> int:
    """Ask many questions by one or more methods, and score the answers.

    \b
      memagent eval configs/eval/smoke.toml
      memagent eval --task ruler/niah_multikey_2 --lengths 8k,32k,128k --num 500 \\
        --method reader --method direct --base-url http://localhost:8000/v1
      memagent eval --file dev.jsonl --method my_method.py:ask_twice
      memagent eval --resume RUN

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
        with PullProgress(request.engine.model, console) as on_pull:
            if options.dry_run:
                _print_plan(
                    request, await open_plan(request, on_note=console.report, on_pull=on_pull)
                )
                return 0
            evaluation = await stack.enter_async_context(
                open_evaluation(
                    request,
                    run_dir=options.run.resume or options.run.run_dir or default_path(),
                    resume=options.run.resume is not None,
                    processes=options.processes,
                    on_note=console.report,
                    on_pull=on_pull,
                )
            )
        records = await _evaluate(evaluation, console)
        _print_results(records, as_json=options.as_json)
        assert evaluation.run is not None
        console.report(f"run: {evaluation.run.path}")
    return 0


async def _evaluate(evaluation: Evaluation, console: CommandConsole) -> list[ItemRecord]:
    assert evaluation.run is not None
    progress = EvalProgress(evaluation, console)
    with resumable(evaluation.run, console, kept="all answers are kept"), progress:
        return await evaluation.evaluate(on_record=progress.record, on_retry=progress.frame.retry)
    raise AssertionError("`resumable` ends the command after an error")


class EvalProgress:
    """How far an evaluation has come: items, score, failures, cost, time left."""

    def __init__(self, evaluation: Evaluation, console: CommandConsole) -> None:
        plan = evaluation.plan
        num_methods = len(evaluation.methods)
        self.frame = ProgressFrame(console)
        self._tokens = {(item.task, item.target_tokens): item.num_tokens for item in plan.items}
        self._num_total = evaluation.num_items
        self._work_total = sum(item.num_tokens + 1 for item in plan.items) * num_methods
        self._work_done = 0
        self._num_done = self._num_failed = 0
        self._score = self._cost = 0.0
        self._has_cost = False
        self._count_all(evaluation.records.values())
        self._work_before = self._work_done
        if self._num_done:
            console.report(f"resuming after {self._num_done:,} of {self._num_total:,} items")

    def __enter__(self) -> Self:
        self.frame.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.frame.__exit__(*exception)

    def record(self, record: ItemRecord) -> None:
        """Count a finished item."""
        self._count_all([record])
        self.frame.show(self._headline(), completed=self._num_done, total=self._num_total)

    def _count_all(self, records: Iterable[ItemRecord]) -> None:
        for record in records:
            self._num_done += 1
            self._num_failed += record.status == "failed"
            self._score += record.score
            self._cost += record.cost or 0.0
            self._has_cost |= record.cost is not None
            self._work_done += self._tokens.get((record.task, record.target_tokens), 0) + 1

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
            left = self.frame.seconds * (self._work_total - self._work_done) / done
            parts.append(f"{duration(left)} left")
        return ", ".join(parts)


# --- output ---------------------------------------------------------------------------------------


def _print_plan(request: EvalRequest, plan: EvalPlan) -> None:
    cells = Counter((item.task, item.target_tokens) for item in plan.items)
    for (task, target), num in sorted(
        cells.items(), key=lambda cell: (cell[0][0], cell[0][1] or 0)
    ):
        length = "any length" if target is None else f"{target:,} tokens"
        print(f"{task}, {length}: {num:,} items")
    for method in request.suite.methods:
        print(f"{method.title}: about {estimate_calls(plan, request.suite, method):,} calls")


def _print_results(records: list[ItemRecord], *, as_json: bool) -> None:
    rows = result_rows(Entry(record.method, record) for record in records)
    if as_json:
        print(json.dumps([_as_json(row) for row in rows], ensure_ascii=False))
        return
    print(results_table(rows), end="")
    failed = [record for record in records if record.status == "failed"]
    lost = sum(row.lost_tokens for row in rows)
    if num_empty := sum(row.num_empty for row in rows):
        print(f"{num_empty:,} of {len(records):,} answers are empty")
    if num_long := sum(record.is_over_limit for record in records):
        print(
            f"{num_long:,} of {len(records):,} answers exceed their task's limit; the rest of them is not graded"
        )
    if failed or num_empty:
        print(f"failed and empty answers used {lost:,} tokens")
    if failed:
        print(f"{len(failed):,} of {len(records):,} items failed; they count as wrong:")
        reasons = Counter(record.error or "" for record in failed)
        for reason, num in reasons.most_common(SHOWN_FAILURES):
            print(f"  {num:,} x {reason}")
        if len(reasons) > SHOWN_FAILURES:
            print(f"  and {len(reasons) - SHOWN_FAILURES:,} other reasons, see the records")


def results_table(rows: list[ResultRow]) -> str:
    """The results as a table: a line per task, length and method."""
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
        "num_empty": row.num_empty,
        "num_cut": row.num_cut,
        "answered_score": row.answered_score,
        "lost_tokens": row.lost_tokens,
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

"""What `memagent eval` prints: plans and results on standard output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Self

from memagent.agent.trace import model_changes
from memagent.agent.work import Work
from memagent.cli.shared.console import CommandConsole, aligned, print_json
from memagent.cli.shared.progress import ProgressFrame, cost_and_time, duration, time_text
from memagent.eval.calls import CallDone
from memagent.eval.forecast import Remaining
from memagent.eval.records import ItemRecord
from memagent.eval.report.rows import EVIDENCE, Entry, ResultRow, result_rows
from memagent.eval.report.tables import EVIDENCE_TITLES, Column, Table, percent
from memagent.eval.runner import Evaluation
from memagent.eval.select import describe_selection
from memagent.eval.suites import Suite
from memagent.types import Prices

SHOWN_FAILURES = 3


def print_forecast(
    evaluation: Evaluation, suite: Suite, prices: Prices | None, *, as_json: bool
) -> None:
    """What an evaluation would take."""
    forecast, gate = evaluation.forecast, evaluation.methods[0].gate
    assert forecast is not None, "every task has an example"
    seconds = forecast.seconds(gate)
    cells = sorted(forecast.cells.items(), key=lambda cell: (cell[0][0], cell[0][1] or 0))
    if as_json:
        print_json(
            {
                "items": [
                    {"task": task, "target_tokens": target, "num": num}
                    for (task, target), num in cells
                ],
                "samples": forecast.samples,
                "methods": {name: _work_json(forecast.of_method(name)) for name in forecast.works},
                "total": _work_json(forecast.total),
                **cost_and_time(forecast.total, prices, seconds),
            }
        )
        return
    for (task, target), num in cells:
        length = "any length" if target is None else f"{target:,} tokens"
        print(f"{task}, {length}: {num:,} items")
    if line := describe_selection(suite):
        print(line)
    for name in forecast.works:
        print(f"{name}: {_work_text(forecast.of_method(name))}")
    if len(forecast.works) > 1:
        print(f"all: {_work_text(forecast.total)}")
    if prices is not None:
        low, high = forecast.total.cost(prices)
        print(f"cost: between {low:,.4f} and {high:,.4f}")
    print(f"time: {time_text(seconds, gate.engine.model)}")


def _work_text(work: Work) -> str:
    return (
        f"about {work.num_calls:,.0f} calls, {work.prompt_tokens:,.0f} prompt tokens "
        f"(with memory up to {work.prompt_tokens + work.max_memory_tokens:,.0f}), "
        f"completion up to {work.max_completion_tokens:,.0f}"
    )


def _work_json(work: Work) -> dict[str, int]:
    return {name: round(value) for name, value in asdict(work).items()}


def print_results(records: list[ItemRecord], *, as_json: bool) -> None:
    """The scores, and which items failed."""
    rows = result_rows(Entry(record.method, record) for record in records)
    if as_json:
        print_json(results_table(rows).records())
        return
    print(results_text(rows))
    failed = [record for record in records if record.status == "failed"]
    lost = sum(row.lost_tokens for row in rows)
    if num_empty := sum(row.num_empty for row in rows):
        print(f"{num_empty:,} of {len(records):,} answers are empty")
    if num_long := sum(row.num_over_limit for row in rows):
        print(
            f"{num_long:,} of {len(records):,} answers are longer than their task allows; a part of each is graded"
        )
    for method in dict.fromkeys(record.method for record in records):
        if changed := model_changes(one.served for one in records if one.method == method):
            print(f"{method}: {changed}")
    if num_withheld := sum(record.num_withheld > 0 for record in records):
        print(
            f"{num_withheld:,} of {len(records):,} items had replies that a content filter withheld or the model refused"
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


def results_text(rows: Sequence[ResultRow]) -> str:
    """The results as a table: a line per task, length and method, a column for each further grader."""
    table = results_table(rows)
    right = [number for number, column in enumerate(table.shown) if column.is_number]
    return "\n".join(aligned([table.heads, *table.lines()], right=right))


def results_table(rows: Sequence[ResultRow]) -> Table:
    """The results for people and for programs."""
    count, tenths = "{:,}".format, "{:,.1f}".format
    is_sampled = any(row.num_samples > row.score.num for row in rows)
    known = {name for name in EVIDENCE if any(getattr(row, name) is not None for row in rows)}
    columns = (
        Column("task", "task", is_number=False),
        Column("length", value="length.label"),
        Column(None, "target_tokens", "length.tokens"),
        Column("method", "method", "series", is_number=False),
        Column("items", "num_questions", "score.num", show=count),
        Column("answers" if is_sampled else None, "num", "num_samples", show=count),
        Column("failed", "num_failed", show=count),
        *map(partial(Column, None), ("num_empty", "num_over_limit", "num_cut")),
        *map(partial(Column, None), ("answered_score", "lost_tokens")),
        Column("score", "score", "score.value", show=percent),
        Column(
            "95 % interval", value="score", show=lambda s: f"{percent(s.low)} to {percent(s.high)}"
        ),
        Column(None, "low", "score.low"),
        Column(None, "high", "score.high"),
        Column("calls", "num_calls", show=tenths),
        Column("s", "seconds", show=tenths),
        *map(partial(Column, None), ("prompt_tokens", "completion_tokens", "cost")),
        *(
            Column(title if name in known else None, name, show=percent)
            for name, title in zip(EVIDENCE, EVIDENCE_TITLES, strict=True)
        ),
        *(
            Column(name, value=partial(_further_score, name), show=percent)
            for name in sorted({name for row in rows for name, _ in row.further})
        ),
        Column(None, "graders"),
        Column(None, "further", _further_scores),
    )
    return Table(name="results", caption="Results.", columns=columns, rows=tuple(rows))


def _further_score(grader: str, row: ResultRow) -> float | None:
    found = dict(row.further).get(grader)
    return None if found is None else found.value


def _further_scores(row: ResultRow) -> dict[str, dict[str, float]]:
    return {
        name: {"score": one.value, "low": one.low, "high": one.high} for name, one in row.further
    }


# --- progress of an evaluation --------------------------------------------------------------------


class EvalProgress:
    """How far an evaluation has come."""

    def __init__(self, evaluation: Evaluation, console: CommandConsole) -> None:
        self.frame = ProgressFrame(console)
        self.remaining = Remaining(evaluation.forecast)
        self._num_total = evaluation.num_items
        self._num_done = self._num_failed = 0
        self._score = self._cost = 0.0
        self._has_cost = False
        for record in evaluation.records.values():
            self.remaining.finish(record)
        self._count_all(evaluation.records.values())
        if self._num_done:
            console.report(f"resuming after {self._num_done:,} of {self._num_total:,} items")

    def __enter__(self) -> Self:
        self.frame.__enter__()
        self._show()
        return self

    def __exit__(self, *exception: object) -> None:
        self.frame.__exit__(*exception)

    def call(self, call: CallDone) -> None:
        """Count an answered call."""
        self.remaining.call(call)
        self._show()

    def record(self, record: ItemRecord) -> None:
        """Count a finished item."""
        self.remaining.finish(record)
        self._count_all([record])
        self._show()

    def _show(self) -> None:
        self.frame.show(self._headline(), completed=self._num_done, total=self._num_total)

    def _count_all(self, records: Iterable[ItemRecord]) -> None:
        for record in records:
            self._num_done += 1
            self._num_failed += record.status == "failed"
            self._score += record.score
            self._cost += record.cost or 0.0
            self._has_cost |= record.cost is not None

    def _headline(self) -> str:
        parts = [f"{self._num_done:,} of {self._num_total:,} items"]
        if self.remaining.num_calls:
            parts.append(f"{self.remaining.num_calls:,} calls")
        if self._num_done:
            parts.append(f"score {self._score / self._num_done:.3f}")
        if self._num_failed:
            parts.append(f"{self._num_failed:,} failed")
        if self._has_cost:
            parts.append(f"cost {self._cost:.4f}")
        left = self.remaining.seconds(self.frame.seconds)
        if left is not None:
            parts.append(f"{duration(left)} left")
        return ", ".join(parts)

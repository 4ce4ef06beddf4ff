"""From the records of evaluations to the rows of tables: scores, averages, comparisons.

    Entry(series, record)*  ─┬─▶ result_rows ─▶ average_rows   a row per series, task and length; means over tasks
                             └─▶ compare_rows                  two series on the same items, with p-values

A series is one line of a plot: a model with a method. Failed items are in every row with a score of 0.
Scores of an item that was sampled several times are averaged first.

    rows = result_rows(entries)
    print(rows[0].series, rows[0].task, rows[0].length.label, rows[0].score)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean
from typing import Literal, NamedTuple

from memagent.eval.records import ItemRecord
from memagent.eval.stats import Comparison, DepthBucket, Interval, by_depth, compare, mean_interval

LengthUnit = Literal["tokens", "bytes"]
"""What lengths of texts count."""

NUM_DEPTHS = 5
RULER_TEN = (
    *(f"ruler/niah_single_{number}" for number in (1, 2, 3)),
    *(f"ruler/niah_multikey_{number}" for number in (1, 2, 3)),
    *("ruler/niah_multiquery", "ruler/niah_multivalue", "ruler/vt", "ruler/fwe"),
)
"""The synthetic tasks whose average the paper reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLength:
    """Requested length of the texts of a row. Example: TextLength(tokens=8192).label == "8K" """

    tokens: int | None = None
    """None without a request."""

    @property
    def label(self) -> str:
        """For people: 8K is 8 * 1,024, 8k is 8,000; of tokens, or of bytes where those were counted."""
        return "as given" if self.tokens is None else format_tokens(self.tokens)

    @property
    def rank(self) -> tuple[bool, int]:
        """Sort key: rows without a length come last."""
        return (self.tokens is None, self.tokens or 0)


class Entry(NamedTuple):
    """A record, and the series it belongs to."""

    series: str
    record: ItemRecord


class Cell(NamedTuple):
    """What identifies a row."""

    series: str
    task: str
    length: TextLength


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """A series on a task at a length."""

    series: str
    task: str
    length: TextLength
    mean_tokens: float | None
    """Mean length of the texts; None when it is not known."""
    score: Interval
    """Failed items count as 0; `score.num` is the number of items."""
    num_samples: int
    """Answers requested: more than items where items were sampled several times."""
    num_failed: int
    num_empty: int
    """Answers that are empty; they are graded as they are."""
    num_over_limit: int
    """Answers that are longer than their task allows; a part of each is graded."""
    num_cut: int
    """Answers whose method did not read the whole text."""
    answered_score: float | None
    """Mean score of the items that neither failed nor were answered with nothing; None without such."""
    lost_tokens: int
    """Tokens of prompts and replies of all failed and empty answers together."""
    graders: tuple[str, ...]
    further: tuple[tuple[str, Interval], ...]
    """Scores by further graders that have graded every item of the row, by name."""
    prompt_tokens: float
    """Mean per answer, as are the fields below."""
    completion_tokens: float
    cached_tokens: float
    num_calls: float
    seconds: float
    cost: float | None
    """None where an answer has no cost."""
    captured: float | None = None
    """Share of the evidence that was in any memory: mean over the answers for which it is known, as below;
    None without such."""
    retained: float | None = None
    """Share of the evidence that was in the last memory."""
    quoted: float | None = None
    """Share of the evidence that was quoted."""
    citation_precision: float | None = None
    """Share of the cited quotes that are evidence."""
    citation_recall: float | None = None
    """Share of the evidence that is cited."""
    buckets: tuple[DepthBucket, ...] = ()
    """Scores by the depth of the evidence; empty where no item has evidence."""
    num_without: int = 0
    """Items without evidence, which are in no bucket."""

    @property
    def failure_rate(self) -> float:
        """Share of the answers that failed."""
        return self.num_failed / self.num_samples

    @property
    def num_tokens(self) -> float:
        """Prompt and reply together, per answer."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def x(self) -> float | None:
        """Position of the row on an axis of lengths."""
        return float(self.length.tokens) if self.length.tokens is not None else self.mean_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageRow:
    """A series over the tasks of a group at a length; every task weighs the same."""

    series: str
    group: str
    length: TextLength
    tasks: tuple[str, ...]
    score: Interval
    x: float | None

    @property
    def anchor_task(self) -> str | None:
        """Name of comparable published averages; None where those are over other tasks."""
        is_other = self.group == "ruler" and set(self.tasks) != set(RULER_TEN)
        return None if is_other else f"{self.group}/average"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRow:
    """Two series on the items that both have."""

    task: str
    length: TextLength | None
    """None for all lengths together, each item averaged over its lengths."""
    first: str
    second: str
    comparison: Comparison
    p_adjusted: float
    """After Holm's correction for the number of comparisons in the table."""


def format_tokens(num: int) -> str:
    """8192 is 8K, 3670016 is 3.5M, 7000 is 7k, 4321 is 4,321."""
    if num and num % 1000 == 0:
        return f"{num // 1000}k"
    if num and num < 1024 * 1024 and num % 1024 == 0:
        return f"{num // 1024}K"
    if num and (num * 4) % (1024 * 1024) == 0:
        return f"{num / (1024 * 1024):g}M"
    return f"{num:,}"


def item_of(record: ItemRecord) -> str:
    """Identifies the question of a record: its id, else its index in the task."""
    return record.id or f"#{record.index}"


# --- scores ---------------------------------------------------------------------------------------


def result_rows(entries: Iterable[Entry]) -> list[ResultRow]:
    """One row per series, task and length, sorted by task, length and first occurrence of the series."""
    cells = _cells(entries)
    order = {series: number for number, series in enumerate({cell.series: None for cell in cells})}
    ranked = sorted(cells, key=lambda cell: (cell.task, cell.length.rank, order[cell.series]))
    return [_result_row(cell, cells[cell]) for cell in ranked]


def _result_row(cell: Cell, records: Sequence[ItemRecord]) -> ResultRow:
    scores = _by_item(records)
    depths = {item_of(one): one.depths or (one.depth,) for one in records if one.depth is not None}
    found = sorted(depths)
    costs = [record.cost for record in records if record.cost is not None]
    lengths = [record.num_tokens for record in records if record.num_tokens is not None]
    answered = [record for record in records if record.status == "ok" and not record.is_empty]
    return ResultRow(
        series=cell.series,
        task=cell.task,
        length=cell.length,
        mean_tokens=fmean(lengths) if lengths else None,
        score=mean_interval(list(scores.values())),
        num_samples=len(records),
        num_failed=sum(record.status == "failed" for record in records),
        num_empty=sum(record.is_empty for record in records),
        num_over_limit=sum(record.is_over_limit for record in records),
        num_cut=sum(record.is_cut for record in records),
        answered_score=fmean(_by_item(answered).values()) if answered else None,
        lost_tokens=sum(
            record.prompt_tokens + record.completion_tokens
            for record in records
            if record.status == "failed" or record.is_empty
        ),
        graders=tuple(sorted({record.grader for record in records})),
        further=_further(records),
        prompt_tokens=fmean(record.prompt_tokens for record in records),
        completion_tokens=fmean(record.completion_tokens for record in records),
        cached_tokens=fmean(record.cached_tokens for record in records),
        num_calls=fmean(record.num_calls for record in records),
        seconds=fmean(record.seconds for record in records),
        cost=fmean(costs) if len(costs) == len(records) else None,
        **{name: _mean(records, name) for name in EVIDENCE},
        buckets=tuple(
            by_depth([depths[n] for n in found], [scores[n] for n in found], num_buckets=NUM_DEPTHS)
        )
        if found
        else (),
        num_without=len(scores) - len(found),
    )


EVIDENCE = ("captured", "retained", "quoted", "citation_precision", "citation_recall")
"""What became of the evidence, in records and rows."""


def _mean(records: Sequence[ItemRecord], name: str) -> float | None:
    """The mean of a measure over the records that have it."""
    known = [value for record in records if (value := getattr(record, name)) is not None]
    return fmean(known) if known else None


def _further(records: Sequence[ItemRecord]) -> tuple[tuple[str, Interval], ...]:
    found = []
    for name in sorted({name for record in records for name in record.scores}):
        graded = [record.graded_by(name) for record in records]
        whole = [record for record in graded if record is not None]
        if len(whole) == len(records):
            found.append((name, mean_interval(list(_by_item(whole).values()))))
    return tuple(found)


def _cells(entries: Iterable[Entry]) -> dict[Cell, list[ItemRecord]]:
    cells: dict[Cell, list[ItemRecord]] = defaultdict(list)
    for series, record in entries:
        cells[Cell(series, record.task, TextLength(tokens=record.target_tokens))].append(record)
    return dict(cells)


def _by_item(records: Iterable[ItemRecord]) -> dict[str, float]:
    """The score of each item: samples of one item are not independent, so they are averaged."""
    scores: dict[str, list[float]] = defaultdict(list)
    for record in records:
        scores[item_of(record)].append(record.score if record.status == "ok" else 0.0)
    return {item: fmean(values) for item, values in sorted(scores.items())}


# --- averages over tasks --------------------------------------------------------------------------


def average_rows(rows: Sequence[ResultRow]) -> list[AverageRow]:
    """Means over the tasks of each group, at the lengths where a series has all of them."""
    by_place = {(row.series, row.task, row.length): row for row in rows}
    series_names = list({row.series: None for row in rows})
    lengths = sorted({row.length for row in rows}, key=lambda length: length.rank)
    averages = []
    for group, tasks in _groups(rows).items():
        for length in lengths:
            for series in series_names:
                found = [by_place.get((series, task, length)) for task in tasks]
                parts = [row for row in found if row is not None]
                xs = [row.x for row in parts if row.x is not None]
                if len(parts) == len(tasks):
                    averages.append(
                        AverageRow(
                            series=series,
                            group=group,
                            length=length,
                            tasks=tasks,
                            score=average_interval([row.score for row in parts]),
                            x=fmean(xs) if xs else None,
                        )
                    )
    return averages


def _groups(rows: Sequence[ResultRow]) -> dict[str, tuple[str, ...]]:
    """The tasks of each group that has several; of RULER the paper's ten where all are there."""
    tasks = sorted({row.task for row in rows})
    groups: dict[str, tuple[str, ...]] = {}
    for group in sorted({task.split("/")[0] for task in tasks if "/" in task}):
        own = tuple(task for task in tasks if task.startswith(f"{group}/"))
        if group == "ruler" and set(RULER_TEN) <= set(own):
            own = RULER_TEN
        if len(own) > 1:
            groups[group] = own
    return groups


def average_interval(parts: Sequence[Interval]) -> Interval:
    """The interval of a mean of independent estimates, from their intervals.

    Distances to the limits add as variances do (Zou and Donner's method), so limits stay in range
    and those of all-right tasks keep their width.
    """
    value = fmean(part.value for part in parts)
    below = math.sqrt(math.fsum((part.value - part.low) ** 2 for part in parts)) / len(parts)
    above = math.sqrt(math.fsum((part.high - part.value) ** 2 for part in parts)) / len(parts)
    return Interval(
        value=value,
        low=max(0.0, value - below),
        high=min(1.0, value + above),
        num=sum(part.num for part in parts),
    )


# --- comparisons ----------------------------------------------------------------------------------


class _Pair(NamedTuple):
    """An item and its scores in two series."""

    question: int
    first: float
    second: float


def compare_rows(entries: Iterable[Entry]) -> list[CompareRow]:
    """Every two series, on the items both have, for each task and length and for all lengths."""
    cells = _cells(entries)
    series_names = list({cell.series: None for cell in cells})
    rows = []
    for task in sorted({cell.task for cell in cells}):
        lengths = sorted({c.length for c in cells if c.task == task}, key=lambda one: one.rank)
        for first, second in combinations(series_names, 2):
            shared = {
                length: pairs
                for length in lengths
                if (pairs := _pairs(cells, Cell(first, task, length), Cell(second, task, length)))
            }
            rows += [_compare_row(task, length, first, second, shared[length]) for length in shared]
            if len(shared) > 1:
                pairs = _over_lengths(shared.values())
                rows.append(_compare_row(task, None, first, second, pairs))
    adjusted = holm([row.comparison.p_value for row in rows])
    return [replace(row, p_adjusted=p) for row, p in zip(rows, adjusted, strict=True)]


def _pairs(cells: Mapping[Cell, Sequence[ItemRecord]], first: Cell, second: Cell) -> list[_Pair]:
    """The items that two cells share."""
    records = cells.get(first, ())
    places = {item_of(record): record.index for record in records}
    one, other = _by_item(records), _by_item(cells.get(second, ()))
    return [_Pair(places[item], one[item], other[item]) for item in one if item in other]


def _over_lengths(shared: Iterable[Sequence[_Pair]]) -> list[_Pair]:
    """Items averaged over lengths: a question has the same index at every length."""
    by_question: dict[int, list[_Pair]] = defaultdict(list)
    for pair in (pair for pairs in shared for pair in pairs):
        by_question[pair.question].append(pair)
    return [
        _Pair(number, fmean(pair.first for pair in pairs), fmean(pair.second for pair in pairs))
        for number, pairs in sorted(by_question.items())
    ]


def _compare_row(
    task: str, length: TextLength | None, first: str, second: str, pairs: Sequence[_Pair]
) -> CompareRow:
    found = compare([pair.first for pair in pairs], [pair.second for pair in pairs])
    return CompareRow(
        task=task,
        length=length,
        first=first,
        second=second,
        comparison=found,
        p_adjusted=found.p_value,
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values after Holm's correction, which bounds the chance of any false positive."""
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    ranked = sorted(range(len(p_values)), key=lambda number: p_values[number])
    for rank, number in enumerate(ranked):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[number]))
        adjusted[number] = highest
    return adjusted

"""An evaluation: a cell for each task, method and length, and the items behind it.

    steps.jsonl ─▶ ItemRecord* (without traces) ─▶ cells with intervals, depths
                                                └─▶ items of a cell, wrong ones first ─▶ one item with its trace

The head of a line ends where its trace begins, so a run is shown without parsing its traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import TypeAdapter

from memagent.eval.records import GRADES, ItemKey, ItemRecord, LaterGrade, grade_of_line
from memagent.eval.stats import Interval, by_depth, compare, mean_interval
from memagent.runs import JOURNAL
from memagent.viewer.line_index import LineIndex
from memagent.viewer.traces import MAX_SHOWN, Json, StoredTrace, embedded_trace

T = TypeVar("T")

NUM_DEPTHS = 10
PAGE_ITEMS = 100
MAX_ITEMS = 500
"""Items of one answer, at most."""
KEPT_TRACES = 8
"""Traces that are kept parsed, so that going through the steps of one does not read it each time."""
MAX_GRADERS = 50
"""Files of later graders that are looked at, at most."""
SHOWN = (
    *("id", "task", "method", "num_tokens", "index", "sample", "status", "grader", "score"),
    *("scores", "num_calls", "seconds", "depth", "is_cut"),
)
"""Fields of a record that a list shows as they are."""
TRACE_KEYS = (b',"trace":{', b', "trace": {')
"""What begins the trace of a line: quotes inside of strings are escaped, so no text can contain it."""


_records = TypeAdapter(ItemRecord)


class CellKey(NamedTuple):
    """A cell of the table."""

    task: str
    method: str
    tokens: int | None


class NumberedItem(NamedTuple):
    """An item, without its trace, and its line."""

    number: int
    head: ItemRecord

    @property
    def cell(self) -> CellKey:
        """The cell it counts in."""
        return CellKey(self.head.task, self.head.method, self.head.target_tokens)


class Items:
    """The items of one file: of an evaluation, or of a validation during training."""

    def __init__(self, path: Path, name: str = JOURNAL) -> None:
        self._index = LineIndex(path, name, head_of)
        self._grades = LaterGrades(path)
        self._parsed = lru_cache(KEPT_TRACES)(self._parse)

    def all(self, grader: str | None = None) -> list[NumberedItem]:
        """Every item that is not damaged, in the order of the file; with a grader, those that it graded."""
        self._index.refresh()
        later = self._grades.scores()
        found = (
            (number, _graded(head, later, grader))
            for number, head in enumerate(self._index.heads)
            if head is not None
        )
        return [NumberedItem(number, head) for number, head in found if head is not None]

    def graders(self) -> list[str]:
        """Graders beside those that an evaluation names, at its time or later."""
        return sorted({name for _, head in self.all() for name in head.scores})

    def cells(self, grader: str | None = None) -> list[Json]:
        """A row for each task, method and length."""
        cells = _by_cell(self.all(grader), lambda item: item.cell)
        return [_cell(key, [item.head for item in items]) for key, items in cells.items()]

    def depths(self, grader: str | None = None) -> list[Json]:
        """The score by depth of the evidence, for each task and method that has any."""
        return list(_depths(self.all(grader)))

    def page(
        self, wanted: Mapping[str, str], *, offset: int, limit: int, grader: str | None = None
    ) -> Json:
        """Some items of a cell, wrong ones first, then by their order."""
        found = sorted(
            (item for item in self.all(grader) if _is_wanted(item.head, wanted)),
            key=lambda item: (item.head.score, item.head.status == "ok", item.number),
        )
        shown = found[offset : offset + min(limit, MAX_ITEMS)]
        return {
            "num_items": len(found),
            "offset": offset,
            "items": [item_row(item) for item in shown],
        }

    def trace(self, number: int, settings_of: Mapping[str, Mapping[str, Any]]) -> StoredTrace:
        """One item with its trace; `settings_of` has the settings of reading of each method."""
        self._index.refresh()
        head = self._index.head(number)
        head = _graded(head, self._grades.scores(), None) or head
        title = {"item": {**item_row(NumberedItem(number, head)), "answers": list(head.answers)}}
        return embedded_trace(
            self._parsed(self._index.generation, number),
            settings_of.get(head.method, {}),
            title,
            question=head.id,
        )

    def _parse(self, generation: int, number: int) -> Any:
        return self._index.record(number).get("trace")


def head_of(line: bytes) -> ItemRecord:
    """The record of a line without its trace. Raises ValueError where it is damaged."""
    for key in TRACE_KEYS:
        if (place := line.find(key)) >= 0:
            line = line[:place] + b"}"
            break
    head = _records.validate_json(line)
    if not (isfinite(head.score) and isfinite(head.seconds)):
        raise ValueError("no number")
    return head


def _graded(
    head: ItemRecord, later: Mapping[ItemKey, Mapping[str, float]], grader: str | None
) -> ItemRecord | None:
    """The item with scores of later graders, and with that of one grader as its own; None where it has none."""
    if scores := later.get(head.key) if later else None:
        head = replace(head, scores={**head.scores, **scores})
    return head if grader is None else head.graded_by(grader)


def item_row(item: NumberedItem) -> Json:
    """What a list shows of an item."""
    head = item.head
    return {
        "number": item.number,
        "tokens": head.target_tokens,
        **{name: getattr(head, name) for name in SHOWN},
        "error": head.error and head.error[:MAX_SHOWN],
        "answer": head.answer[:MAX_SHOWN],
        "answers": [answer[:MAX_SHOWN] for answer in head.answers[:5]],
        "extracted": head.extracted and head.extracted[:MAX_SHOWN],
    }


def interval(values: Sequence[float]) -> Json:
    """A mean with its 95 % interval."""
    return plain_interval(mean_interval(values))


def plain_interval(found: Interval) -> Json:
    """An interval as plain values."""
    return {"value": found.value, "low": found.low, "high": found.high, "num": found.num}


def _by_cell(items: Iterable[T], cell_of: Callable[[T], CellKey]) -> dict[CellKey, list[T]]:
    cells: dict[CellKey, list[T]] = {}
    for item in items:
        cells.setdefault(cell_of(item), []).append(item)
    return dict(sorted(cells.items(), key=lambda cell: (cell[0].task, cell[0].tokens or 0)))


def _cell(key: CellKey, heads: Sequence[ItemRecord]) -> Json:
    num = len(heads)
    return {
        "task": key.task,
        "method": key.method,
        "tokens": key.tokens,
        "num_items": num,
        "score": interval(by_question(heads)),
        "num_failed": sum(head.status != "ok" for head in heads),
        "num_cut": sum(head.is_cut for head in heads),
        "mean_calls": sum(head.num_calls for head in heads) / num,
        "mean_tokens": sum(head.prompt_tokens + head.completion_tokens for head in heads) / num,
        "mean_seconds": sum(head.seconds for head in heads) / num,
    }


def by_question(heads: Iterable[ItemRecord]) -> list[float]:
    """A score for each question: several answers to one are not independent."""
    scores: dict[int, list[float]] = {}
    for head in heads:
        scores.setdefault(head.index, []).append(head.score)
    return [sum(each) / len(each) for each in scores.values()]


def _depths(items: Iterable[NumberedItem]) -> Iterable[Json]:
    series: dict[tuple[str, str], list[ItemRecord]] = {}
    for _, head in items:
        if head.depths or head.depth is not None:
            series.setdefault((head.task, head.method), []).append(head)
    for (task, method), heads in series.items():
        places = [head.depths or (head.depth or 0.0,) for head in heads]
        buckets = by_depth(places, [head.score for head in heads], num_buckets=NUM_DEPTHS)
        yield {
            "task": task,
            "method": method,
            "buckets": [
                {"start": b.start, "end": b.end, "score": b.score and plain_interval(b.score)}
                for b in buckets
            ],
        }


def _is_wanted(head: ItemRecord, wanted: Mapping[str, str]) -> bool:
    values = {
        "task": head.task,
        "method": head.method,
        "tokens": "" if head.target_tokens is None else str(head.target_tokens),
        "status": "failed" if head.status != "ok" else "right" if head.score >= 1 else "wrong",
    }
    if any(values[name] != value for name, value in wanted.items() if name in values):
        return False
    text = wanted.get("text", "").casefold()
    return not text or any(
        text in each.casefold() for each in (head.id, head.answer, *head.answers, head.error or "")
    )


# --- graders that graded later -----------------------------------------------------------------------


class LaterGrades:
    """Scores of graders that graded later, with `memagent eval regrade`: `RUN/grades/NAME.jsonl`."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._files: dict[str, LineIndex[LaterGrade]] = {}

    def scores(self) -> dict[ItemKey, dict[str, float]]:
        """The scores of each item by grader; damaged lines are passed over."""
        found: dict[ItemKey, dict[str, float]] = {}
        for file in sorted(islice((self._run / GRADES).glob("*.jsonl"), MAX_GRADERS)):
            index = self._files.setdefault(
                file.stem, LineIndex(self._run, f"{GRADES}/{file.name}", grade_of_line)
            )
            index.refresh()
            for grade in index.heads:
                if grade is not None and isfinite(grade.score):
                    found.setdefault(grade.item, {})[file.stem] = grade.score
        return found


# --- methods compared -----------------------------------------------------------------------------


Pair = tuple[NumberedItem, NumberedItem]


def comparison(first: Items, second: Items, *, offset: int, limit: int) -> Json:
    """Cells of both with their difference, and items with different scores, those that got worse first."""
    ours, theirs = ({item.head.key: item for item in each.all()} for each in (first, second))
    pairs = [(ours[key], theirs[key]) for key in ours if key in theirs]
    differing = sorted(
        (pair for pair in pairs if pair[0].head.score != pair[1].head.score),
        key=lambda pair: pair[1].head.score - pair[0].head.score,
    )
    return {
        "num_shared": len(pairs),
        "num_first": len(ours),
        "num_second": len(theirs),
        "cells": [
            _row(cell, found) for cell, found in _by_cell(pairs, lambda pair: pair[0].cell).items()
        ],
        "num_differing": len(differing),
        "offset": offset,
        "items": [
            {"first": item_row(one), "second": item_row(other)}
            for one, other in differing[offset : offset + limit]
        ],
    }


def _row(cell: CellKey, pairs: list[Pair]) -> Json:
    ours, theirs = ([pair[side].head.score for pair in pairs] for side in (0, 1))
    found = compare(theirs, ours)
    return {
        "task": cell.task,
        "method": cell.method,
        "tokens": cell.tokens,
        "first": interval(ours),
        "second": interval(theirs),
        "difference": plain_interval(found.difference),
        "num_better": found.num_better,
        "num_worse": found.num_worse,
        "p_value": found.p_value,
    }

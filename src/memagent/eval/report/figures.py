"""The paper's two main figures, redrawn from run directories, with the published lines next to yours.

hotpotqa runs   ─▶  paper-hqa             accuracy from 7K to 3.5M tokens, all baselines
ruler runs      ─▶  paper-ruler-average   average of the ten synthetic tasks by length
                    paper-ruler-tasks     every task by length, as heat maps

memagent report RUN... --figure paper
"""

from __future__ import annotations

from collections.abc import Sequence

from memagent.errors import ConfigError
from memagent.eval.report.anchors import Anchor
from memagent.eval.report.plots import Plot, heat_plot, length_plot, lines_of
from memagent.eval.report.tables import AverageRow, LengthUnit, ResultRow, TextLength
from memagent.eval.stats import Interval

QUESTIONS = "hotpotqa"
GROUP = "ruler"
BESIDE = ("RL-MemAgent-14B (v1)", "RL-MemAgent-7B (v1)")
"""Published models whose heat maps are shown too."""


def paper_figures(
    rows: Sequence[ResultRow],
    averages: Sequence[AverageRow],
    anchors: Sequence[Anchor],
    *,
    series: Sequence[str],
    unit: LengthUnit = "tokens",
) -> list[Plot]:
    """The paper's figures that the rows suffice for. Raises ConfigError if they suffice for none."""
    figures = [
        _questions(rows, anchors, series, unit),
        _average(averages, anchors, series, unit),
        _tasks(rows, anchors, series, unit),
    ]
    drawn = [figure for figure in figures if figure is not None]
    if not drawn:
        raise ConfigError(
            "the paper's figures need results of hotpotqa or of ruler tasks with known lengths; "
            "name such runs, or leave out `figure`"
        )
    return drawn


def _questions(
    rows: Sequence[ResultRow], anchors: Sequence[Anchor], series: Sequence[str], unit: LengthUnit
) -> Plot | None:
    own = [(row.series, row.x, row.score) for row in rows if row.task == QUESTIONS]
    published = [anchor for anchor in anchors if anchor.task == QUESTIONS]
    title = "RULER-HQA: accuracy by length of the text"
    return length_plot("paper-hqa", title, lines_of(own, series), published, unit)


def _average(
    averages: Sequence[AverageRow],
    anchors: Sequence[Anchor],
    series: Sequence[str],
    unit: LengthUnit,
) -> Plot | None:
    own = [row for row in averages if row.group == GROUP]
    num_tasks = len(own[0].tasks) if own else 0
    title = f"RULER: average of {num_tasks} synthetic tasks by length of the text"
    published = [anchor for anchor in anchors if anchor.task == f"{GROUP}/average"]
    if own and own[0].anchor_task is None:
        title = f"RULER: average of {num_tasks} tasks here, of ten in the paper"
    points = [(row.series, row.x, row.score) for row in own]
    return length_plot("paper-ruler-average", title, lines_of(points, series), published, unit)


def _tasks(
    rows: Sequence[ResultRow], anchors: Sequence[Anchor], series: Sequence[str], unit: LengthUnit
) -> Plot | None:
    own = [row for row in rows if row.task.startswith(f"{GROUP}/")]
    if not own:
        return None
    tasks = sorted({row.task for row in own})
    lengths = sorted({row.length for row in own}, key=lambda length: length.rank)
    by_place = {(row.series, row.task, row.length): row.score for row in own}
    panels = {
        name: [[by_place.get((name, task, length)) for length in lengths] for task in tasks]
        for name in series
        if any(row.series == name for row in own)
    }
    for label in BESIDE:
        found = {anchor.task: anchor for anchor in anchors if anchor.label == label}
        cells = [[_published(found.get(task), length) for length in lengths] for task in tasks]
        if any(score is not None for line in cells for score in line):
            panels[f"published: {label}"] = cells
    return heat_plot(
        "paper-ruler-tasks",
        "RULER: score by task and length of the text",
        panels,
        columns=[length.label for length in lengths],
        rows=[task.removeprefix(f"{GROUP}/") for task in tasks],
        row_title="",
        column_title=f"length in {unit}",
    )


def _published(anchor: Anchor | None, length: TextLength) -> Interval | None:
    """A published score as a cell, without an interval."""
    if anchor is None or length.tokens is None:
        return None
    value = anchor.at(length.tokens)
    if value is None:
        return None
    return Interval(value=value, low=value, high=value, num=anchor.num or 0)

"""Sheets: the tables of a report, defined once for every output.

    Report ─▶ Sheet* ─┬─▶ markdown(sheet)     for people, in a file
                      ├─▶ csv_text(sheet)     for programs, numbers in full
                      └─▶ terminal, page      for people

A column has a title and a format, for people; a key, for programs; or both.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from memagent.eval.report.anchors import SAME_LENGTH, Anchor
from memagent.eval.report.tables import (
    EVIDENCE,
    AverageRow,
    CompareRow,
    DepthRow,
    ResultRow,
    format_tokens,
)
from memagent.eval.stats import Interval

Show = Callable[[Any], str]

EVIDENCE_TITLES = ("captured", "retained", "quoted", "cited right", "cited of all")
"""Headings of the columns of EVIDENCE."""

NONE = "–"  # noqa: RUF001
"""Shown where there is no value."""

FORMULA_STARTS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""First characters of what spreadsheets compute, wide ones included."""
_markup = re.compile(r"<(?=[A-Za-z/!?])|(?<=\])[(\[]")
"""Where a tag or the address of a link begins; `<0.0001` is neither."""
_block = re.compile(r"^[#>+*=`~\[|:-]")
"""What a heading, a list, code or a definition begins with."""
_invisible = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_before_bar = re.compile(r"\\(?=\\*\|)")
"""Backslashes that would turn the one before a bar into text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a sheet."""

    value: Callable[[Any], Any]
    """From a row to the value."""
    title: str | None = None
    """Heading for people; None where only programs see the column."""
    show: Show = str
    key: str | None = None
    """Heading for programs; None where only people see the column."""
    is_number: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A table: rows of any kind, and columns that know how to read them."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Any, ...]

    @property
    def shown(self) -> tuple[Column, ...]:
        """The columns for people."""
        return tuple(column for column in self.columns if column.title is not None)

    @property
    def heads(self) -> list[str]:
        """Headings for people."""
        return [column.title or "" for column in self.shown]

    def lines(self) -> list[list[str]]:
        """The rows as people see them."""
        return [[_shown(column, row) for column in self.shown] for row in self.rows]

    def records(self) -> list[dict[str, Any]]:
        """The rows as programs see them."""
        columns = [(column.key, column) for column in self.columns if column.key is not None]
        return [{key: column.value(row) for key, column in columns} for row in self.rows]


def _shown(column: Column, row: Any) -> str:
    value = column.value(row)
    return NONE if value is None else column.show(value)


def markdown(sheet: Sheet) -> str:
    """The sheet as a Markdown table."""
    rule = ["---:" if column.is_number else "---" for column in sheet.shown]
    lines = [sheet.heads, rule, *sheet.lines()]
    table = "\n".join(f"| {' | '.join(_cell(text) for text in line)} |" for line in lines)
    caption = _block.sub(lambda found: f"&#{ord(found[0])};", inline(sheet.caption))
    return f"{caption}\n\n{table}\n"


def inline(text: str) -> str:
    """A text inside a line of Markdown: what would be a tag, a link or an image is shown as it is."""
    line = _invisible.sub("", " ".join(text.split()))
    return _markup.sub(lambda found: f"&#{ord(found[0])};", line)


def _cell(text: str) -> str:
    return _before_bar.sub("&#92;", inline(text)).replace("|", "\\|")


def csv_text(sheet: Sheet) -> str:
    """The sheet as CSV: keys as headings, numbers in full, empty cells where there is no value."""
    text = io.StringIO()
    names = [column.key for column in sheet.columns if column.key is not None]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for record in sheet.records():  # None is written as nothing
        writer.writerow({key: _no_formula(value) for key, value in record.items()})
    return text.getvalue()


def _no_formula(value: Any) -> Any:
    """A text that a spreadsheet would compute gets an apostrophe; numbers stay."""
    is_formula = isinstance(value, str) and value.lstrip().startswith(FORMULA_STARTS)
    return f"'{value}" if is_formula else value


# --- how values are shown -------------------------------------------------------------------------


def percent(value: float) -> str:
    """0.8 is 80.0."""
    return f"{100 * value:.1f}"


def interval(score: Interval) -> str:
    """In percent, with the limits."""
    return f"{percent(score.value)} [{percent(score.low)}, {percent(score.high)}]"


def signed(score: Interval) -> str:
    """A difference in points, with the limits."""
    return f"{100 * score.value:+.1f} [{100 * score.low:+.1f}, {100 * score.high:+.1f}]"


def amount(value: float) -> str:
    """Three significant digits, with thousands separators."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def p_value(value: float) -> str:
    """Four decimals; smaller values as a bound."""
    return "<0.0001" if value < 0.0001 else f"{value:.4f}"


def rate(counts: tuple[int, int]) -> str:
    """A share and what it is of: 2.0 % (10)."""
    part, whole = counts
    return f"{100 * part / whole:.1f} % ({part:,})" if part else "0"


# --- the sheets of a report -----------------------------------------------------------------------


def results_sheet(rows: Sequence[ResultRow], unfinished: Sequence[ResultRow]) -> Sheet:
    """Score and cost of each series, task and length. Rows of `unfinished` are marked."""
    open_rows = {(row.series, row.task, row.length) for row in unfinished}

    def num(row: ResultRow) -> str:
        mark = "*" if (row.series, row.task, row.length) in open_rows else ""
        return f"{row.score.num:,}{mark}"

    star = " * unfinished: items are missing." if open_rows else ""
    columns = (
        *_place_columns(),
        Column(title="n", value=num),
        Column(key="num_items", value=lambda row: row.score.num),
        Column(key="num_samples", value=lambda row: row.num_samples),
        *_score_columns("score in % [95 %]"),
        Column(title="failed", value=lambda row: (row.num_failed, row.num_samples), show=rate),
        Column(key="num_failed", value=lambda row: row.num_failed),
        Column(key="failure_rate", value=lambda row: row.failure_rate),
        Column(title="empty", value=lambda row: (row.num_empty, row.num_samples), show=rate),
        Column(key="num_empty", value=lambda row: row.num_empty),
        Column(title="answered", value=_answered),
        Column(key="answered_score", value=lambda row: row.answered_score),
        Column(key="lost_tokens", value=lambda row: row.lost_tokens),
        Column(title="cut", value=lambda row: (row.num_cut, row.num_samples), show=rate),
        Column(key="num_cut", value=lambda row: row.num_cut),
        Column(title="calls", key="num_calls", value=lambda row: row.num_calls, show=amount),
        Column(
            title="tokens in", key="prompt_tokens", value=lambda row: row.prompt_tokens, show=amount
        ),
        Column(key="cached_tokens", value=lambda row: row.cached_tokens),
        Column(
            title="tokens out",
            key="completion_tokens",
            value=lambda row: row.completion_tokens,
            show=amount,
        ),
        Column(title="seconds", key="seconds", value=lambda row: row.seconds, show=amount),
        Column(title="cost", key="cost", value=lambda row: row.cost, show=amount),
        *_evidence_columns(rows),
        Column(key="graders", value=lambda row: " ".join(row.graders)),
        Column(
            key="is_unfinished",
            value=lambda row: (row.series, row.task, row.length) in open_rows,
        ),
    )
    return Sheet(
        name="results",
        caption="Results. Failed items count as wrong and stay in n. Answered is the score in % "
        "without failed and empty answers. Calls, tokens, seconds and cost "
        f"are means per answer.{star}{_about_evidence(rows)}",
        columns=columns,
        rows=tuple(rows),
    )


def _evidence_columns(rows: Sequence[ResultRow]) -> tuple[Column, ...]:
    """What became of the evidence; people see those that have a value in some row."""
    return tuple(
        Column(
            title=title if any(getattr(row, name) is not None for row in rows) else None,
            key=name,
            value=attrgetter(name),
            show=percent,
        )
        for name, title in zip(EVIDENCE, EVIDENCE_TITLES, strict=True)
    )


def _about_evidence(rows: Sequence[ResultRow]) -> str:
    if all(row.captured is None for row in rows):
        return ""
    return " Captured and retained: share of the evidence, word for word, in any memory and in the last one, in %."


def _answered(row: ResultRow) -> str | None:
    """The score without failed and empty answers, where there are such."""
    if row.answered_score is None or not (row.num_failed or row.num_empty):
        return None
    return percent(row.answered_score)


def averages_sheet(rows: Sequence[AverageRow]) -> Sheet:
    """Means over the tasks of a group."""
    columns = (
        Column(title="group", key="group", value=lambda row: row.group, is_number=False),
        *_length_columns(),
        Column(title="method", key="series", value=lambda row: row.series, is_number=False),
        Column(title="tasks", key="num_tasks", value=lambda row: len(row.tasks)),
        Column(title="n", key="num_items", value=lambda row: row.score.num, show="{:,}".format),
        *_score_columns("mean score in % [95 %]"),
        Column(key="tasks", value=lambda row: " ".join(row.tasks)),
    )
    return Sheet(
        name="averages",
        caption="Averages over the tasks of a group; every task weighs the same.",
        columns=columns,
        rows=tuple(rows),
    )


def comparisons_sheet(rows: Sequence[CompareRow]) -> Sheet:
    """Two series on the same items."""
    columns = (
        Column(title="task", key="task", value=lambda row: row.task, is_number=False),
        Column(title="length", value=_compared_length),
        Column(key="tokens", value=lambda row: row.length.tokens if row.length else None),
        Column(key="is_all_lengths", value=lambda row: row.length is None),
        Column(title="first", key="first", value=lambda row: row.first, is_number=False),
        Column(title="second", key="second", value=lambda row: row.second, is_number=False),
        Column(title="n", key="num_items", value=lambda row: row.comparison.difference.num),
        Column(
            title="first - second in points [95 %]",
            value=lambda row: row.comparison.difference,
            show=signed,
        ),
        Column(key="difference", value=lambda row: row.comparison.difference.value),
        Column(key="low", value=lambda row: row.comparison.difference.low),
        Column(key="high", value=lambda row: row.comparison.difference.high),
        Column(title="better", key="num_better", value=lambda row: row.comparison.num_better),
        Column(title="worse", key="num_worse", value=lambda row: row.comparison.num_worse),
        Column(title="equal", key="num_equal", value=lambda row: row.comparison.num_equal),
        Column(title="p", key="p_value", value=lambda row: row.comparison.p_value, show=p_value),
        Column(title="p, Holm", key="p_adjusted", value=lambda row: row.p_adjusted, show=p_value),
    )
    return Sheet(
        name="comparisons",
        caption="Comparisons on the items that both have. p is the exact two-sided sign test "
        "(McNemar's where scores are 0 or 1); Holm's correction is for all rows of this table.",
        columns=columns,
        rows=tuple(rows),
    )


def _compared_length(row: CompareRow) -> str:
    return "all" if row.length is None else row.length.label


def depth_sheet(rows: Sequence[DepthRow]) -> Sheet:
    """Scores by depth of the evidence."""
    buckets = rows[0].buckets if rows else ()
    columns: list[Column] = [*_place_columns()]
    for number, bucket in enumerate(buckets):
        span = f"{100 * bucket.start:.0f}-{100 * bucket.end:.0f} %"
        key = f"{100 * bucket.start:.0f}_{100 * bucket.end:.0f}"
        columns += [
            Column(title=span, value=_bucket(number), show=_score_and_num),
            Column(key=f"score_{key}", value=_bucket(number, "value")),
            Column(key=f"low_{key}", value=_bucket(number, "low")),
            Column(key=f"high_{key}", value=_bucket(number, "high")),
            Column(key=f"num_{key}", value=_bucket(number, "num")),
        ]
    columns.append(
        Column(title="no evidence", key="num_without", value=lambda row: row.num_without)
    )
    return Sheet(
        name="depth",
        caption="Score in % (and n) by where in the text the evidence stands.",
        columns=tuple(columns),
        rows=tuple(rows),
    )


def _bucket(number: int, field: str | None = None) -> Callable[[DepthRow], Any]:
    def value(row: DepthRow) -> Any:
        score = row.buckets[number].score
        return score if field is None or score is None else getattr(score, field)

    return value


def _score_and_num(score: Interval) -> str:
    return f"{percent(score.value)} ({score.num:,})"


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideRow:
    """A measured or published line, with a cell for each length."""

    who: str
    label: str
    where: str
    cells: tuple[str | None, ...]


def beside_sheet(
    task: str, measured: Sequence[ResultRow] | Sequence[AverageRow], anchors: Sequence[Anchor]
) -> Sheet:
    """Published scores next to measured ones, a column for each length."""
    lengths = _shared_lengths(measured, anchors)
    rows = []
    for series in {row.series: None for row in measured}:
        cells = []
        for tokens in lengths:
            scores = [row.score for row in measured if row.series == series and row.x == tokens]
            cells.append(interval(scores[0]) if scores else None)
        rows.append(BesideRow(who="here", label=series, where="", cells=tuple(cells)))
    for anchor in anchors:
        values = [anchor.at(tokens) for tokens in lengths]
        mark = "≈" if anchor.is_read_off_a_plot else ""
        shown = tuple(None if value is None else mark + percent(value) for value in values)
        where = f"{anchor.where}, read off a plot" if anchor.is_read_off_a_plot else anchor.where
        rows.append(BesideRow(who="published", label=anchor.label, where=where, cells=shown))
    columns = [
        Column(title="who", value=lambda row: row.who, is_number=False),
        Column(title="line", value=lambda row: row.label, is_number=False),
        Column(title="where", value=lambda row: row.where, is_number=False),
    ]
    for number, tokens in enumerate(lengths):
        label = format_tokens(round(tokens))
        columns.append(Column(title=label, value=_beside_cell(number)))
    cited = ", ".join(sorted({anchor.citation for anchor in anchors}))
    return Sheet(
        name=f"published-{task}",
        caption=f"{task}: score in %, measured here with 95 % intervals, and as published ({cited}).",
        columns=tuple(columns),
        rows=tuple(rows),
    )


def _beside_cell(number: int) -> Callable[[BesideRow], str | None]:
    return lambda row: row.cells[number]


def _shared_lengths(
    measured: Sequence[ResultRow] | Sequence[AverageRow], anchors: Sequence[Anchor]
) -> list[float]:
    """All measured lengths, and the published ones that none of them matches."""
    own = {row.x for row in measured if row.x}
    published = {
        length
        for anchor in anchors
        for length, _ in anchor.points
        if all(abs(x - length) > SAME_LENGTH * length for x in own)
    }
    return sorted(own | published)


def published_sheet(anchors: Sequence[Anchor]) -> Sheet:
    """Published scores for programs, a row for each figure."""
    columns = (
        Column(key="task", value=lambda row: row[0].task),
        Column(key="label", value=lambda row: row[0].label),
        Column(key="tokens", value=lambda row: row[1]),
        Column(key="score", value=lambda row: row[2]),
        Column(key="num_items", value=lambda row: row[0].num),
        Column(key="citation", value=lambda row: row[0].citation),
        Column(key="where", value=lambda row: row[0].where),
        Column(key="is_read_off_a_plot", value=lambda row: row[0].is_read_off_a_plot),
    )
    rows = tuple((anchor, length, score) for anchor in anchors for length, score in anchor.points)
    return Sheet(name="published", caption="Published scores.", columns=columns, rows=rows)


def _place_columns() -> tuple[Column, ...]:
    return (
        Column(title="task", key="task", value=lambda row: row.task, is_number=False),
        *_length_columns(),
        Column(title="method", key="series", value=lambda row: row.series, is_number=False),
    )


def _length_columns() -> tuple[Column, ...]:
    return (
        Column(title="length", value=lambda row: row.length.label),
        Column(key="tokens", value=lambda row: row.length.tokens),
    )


def _score_columns(title: str) -> tuple[Column, ...]:
    return (
        Column(title=title, value=lambda row: row.score, show=interval),
        Column(key="score", value=lambda row: row.score.value),
        Column(key="low", value=lambda row: row.score.low),
        Column(key="high", value=lambda row: row.score.high),
    )

"""Tables of a report, defined once for every output.

    Report ─▶ Table* ─┬─▶ markdown(table)     for people, in a file
                      ├─▶ csv_text(table)     for programs, numbers in full
                      └─▶ terminal, page      for people

A column has a title and a format, for people; a key, for programs; or both.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

from memagent.eval.report.anchors import SAME_LENGTH, Anchor
from memagent.eval.report.rows import EVIDENCE, AverageRow, CompareRow, ResultRow, format_tokens
from memagent.eval.stats import Interval

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


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Example: Column("calls", "num_calls", show=amount)
    """

    title: str | None
    """Heading for people; None where only programs see the column."""
    key: str | None = None
    """Heading for programs; None where only people see the column."""
    value: Callable[[Any], Any] | str | None = None
    """The value of a row, or the path of the attribute that has it; by default the attribute `key`."""
    show: Callable[[Any], str] = str
    is_number: bool = True

    def of(self, row: Any) -> Any:
        """The value of a row."""
        if callable(self.value):
            return self.value(row)
        return attrgetter(self.value or self.key or "")(row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of any kind, and columns that know how to read them."""

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
        values = ([(column, column.of(row)) for column in self.shown] for row in self.rows)
        return [[NONE if v is None else column.show(v) for column, v in line] for line in values]

    def records(self) -> list[dict[str, Any]]:
        """The rows as programs see them."""
        columns = [(column.key, column) for column in self.columns if column.key is not None]
        return [{key: column.of(row) for key, column in columns} for row in self.rows]


def markdown(table: Table) -> str:
    """The table as a Markdown table."""
    rule = ["---:" if column.is_number else "---" for column in table.shown]
    lines = [table.heads, rule, *table.lines()]
    text = "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)
    caption = _block.sub(lambda found: f"&#{ord(found[0])};", inline(table.caption))
    return f"{caption}\n\n{text}\n"


def inline(text: str) -> str:
    """A text inside a line of Markdown: what would be a tag, a link or an image is shown as it is."""
    line = _invisible.sub("", " ".join(text.split()))
    return _markup.sub(lambda found: f"&#{ord(found[0])};", line)


def _cell(text: str) -> str:
    return _before_bar.sub("&#92;", inline(text)).replace("|", "\\|")


def csv_text(table: Table) -> str:
    """The table as CSV: keys as headings, numbers in full, empty cells where there is no value."""
    text = io.StringIO()
    names = [column.key for column in table.columns if column.key is not None]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for record in table.records():  # None is written as nothing
        for key, value in record.items():
            if isinstance(value, str) and value.lstrip().startswith(FORMULA_STARTS):
                record[key] = f"'{value}"  # a spreadsheet would compute it
        writer.writerow(record)
    return text.getvalue()


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


# --- the tables of a report -----------------------------------------------------------------------

PLACE = (
    Column("task", "task", is_number=False),
    Column("length", value="length.label"),
    Column(None, "tokens", "length.tokens"),
    Column("method", "series", is_number=False),
)
"""What a row is about."""


def results_table(rows: Sequence[ResultRow], unfinished: Sequence[ResultRow]) -> Table:
    """Score and cost of each series, task and length. Rows of `unfinished` are marked."""
    open_rows = {(row.series, row.task, row.length) for row in unfinished}

    def is_open(row: ResultRow) -> bool:
        return (row.series, row.task, row.length) in open_rows

    star = " * unfinished: items are missing." if open_rows else ""
    known = {name for name in EVIDENCE if any(getattr(row, name) is not None for row in rows)}
    columns = (
        *PLACE,
        Column("n", value=lambda row: f"{row.score.num:,}{'*' if is_open(row) else ''}"),
        Column(None, "num_items", "score.num"),
        Column(None, "num_samples"),
        *_score_columns("score in % [95 %]"),
        Column("failed", value=lambda row: (row.num_failed, row.num_samples), show=rate),
        Column(None, "num_failed"),
        Column(None, "failure_rate"),
        Column("empty", value=lambda row: (row.num_empty, row.num_samples), show=rate),
        Column(None, "num_empty"),
        Column("answered", value=_answered),
        Column(None, "answered_score"),
        Column(None, "lost_tokens"),
        Column("cut", value=lambda row: (row.num_cut, row.num_samples), show=rate),
        Column(None, "num_cut"),
        Column("calls", "num_calls", show=amount),
        Column("tokens in", "prompt_tokens", show=amount),
        Column(None, "cached_tokens"),
        Column("tokens out", "completion_tokens", show=amount),
        Column("seconds", "seconds", show=amount),
        Column("cost", "cost", show=amount),
        *(
            Column(title if name in known else None, name, show=percent)
            for name, title in zip(EVIDENCE, EVIDENCE_TITLES, strict=True)
        ),
        Column(None, "graders", lambda row: " ".join(row.graders)),
        Column(None, "is_unfinished", is_open),
    )
    evidence = " Captured and retained: share of the evidence, word for word, in any memory and in the last one, in %."
    return Table(
        name="results",
        caption="Results. Failed items count as wrong and stay in n. Answered is the score in % "
        "without failed and empty answers. Calls, tokens, seconds and cost "
        f"are means per answer.{star}{evidence if 'captured' in known else ''}",
        columns=columns,
        rows=tuple(rows),
    )


def _answered(row: ResultRow) -> str | None:
    """The score without failed and empty answers, where there are such."""
    if row.answered_score is None or not (row.num_failed or row.num_empty):
        return None
    return percent(row.answered_score)


def averages_table(rows: Sequence[AverageRow]) -> Table:
    """Means over the tasks of a group."""
    columns = (
        Column("group", "group", is_number=False),
        *PLACE[1:],
        Column("tasks", "num_tasks", lambda row: len(row.tasks)),
        Column("n", "num_items", "score.num", show="{:,}".format),
        *_score_columns("mean score in % [95 %]"),
        Column(None, "tasks", lambda row: " ".join(row.tasks)),
    )
    caption = "Averages over the tasks of a group; every task weighs the same."
    return Table(name="averages", caption=caption, columns=columns, rows=tuple(rows))


def comparisons_table(rows: Sequence[CompareRow]) -> Table:
    """Two series on the same items."""
    found = "comparison.difference"
    columns = (
        Column("task", "task", is_number=False),
        Column("length", value=lambda row: row.length.label if row.length else "all"),
        Column(None, "tokens", lambda row: row.length.tokens if row.length else None),
        Column(None, "is_all_lengths", lambda row: row.length is None),
        Column("first", "first", is_number=False),
        Column("second", "second", is_number=False),
        Column("n", "num_items", f"{found}.num"),
        Column("first - second in points [95 %]", value=found, show=signed),
        Column(None, "difference", f"{found}.value"),
        Column(None, "low", f"{found}.low"),
        Column(None, "high", f"{found}.high"),
        Column("better", "num_better", "comparison.num_better"),
        Column("worse", "num_worse", "comparison.num_worse"),
        Column("equal", "num_equal", "comparison.num_equal"),
        Column("p", "p_value", "comparison.p_value", show=p_value),
        Column("p, Holm", "p_adjusted", show=p_value),
    )
    return Table(
        name="comparisons",
        caption="Comparisons on the items that both have. p is the exact two-sided sign test "
        "(McNemar's where scores are 0 or 1); Holm's correction is for all rows of this table.",
        columns=columns,
        rows=tuple(rows),
    )


def depth_table(rows: Sequence[ResultRow]) -> Table:
    """Scores by depth of the evidence."""
    columns = list(PLACE)
    for number, bucket in enumerate(rows[0].buckets if rows else ()):
        start, end = round(100 * bucket.start), round(100 * bucket.end)
        columns.append(
            Column(
                f"{start}-{end} %",
                value=_bucket(number),
                show=lambda score: f"{percent(score.value)} ({score.num:,})",
            )
        )
        columns += [
            Column(None, f"{name}_{start}_{end}", _bucket(number, field))
            for name, field in (
                ("score", "value"),
                ("low", "low"),
                ("high", "high"),
                ("num", "num"),
            )
        ]
    columns.append(Column("no evidence", "num_without"))
    caption = "Score in % (and n) by where in the text the evidence stands."
    return Table(name="depth", caption=caption, columns=tuple(columns), rows=tuple(rows))


def _bucket(number: int, field: str | None = None) -> Callable[[ResultRow], Any]:
    def value(row: ResultRow) -> Any:
        score = row.buckets[number].score
        return score if field is None or score is None else getattr(score, field)

    return value


def compared_table(
    task: str, measured: Sequence[ResultRow] | Sequence[AverageRow], anchors: Sequence[Anchor]
) -> Table:
    """Published scores next to measured ones: a line for each, a column for each length."""
    own = {row.x for row in measured if row.x}
    published = {length for anchor in anchors for length, _ in anchor.points}
    further = (n for n in published if all(abs(x - n) > SAME_LENGTH * n for x in own))
    lengths = sorted(own | set(further))
    lines: list[list[str | None]] = []
    for series in {row.series: None for row in measured}:
        own_rows = [row for row in measured if row.series == series]
        scores = {row.x: interval(row.score) for row in reversed(own_rows)}
        lines.append(["here", series, "", *map(scores.get, lengths)])
    for anchor in anchors:
        values = [anchor.at(tokens) for tokens in lengths]
        mark, note = ("≈", ", read off a plot") if anchor.is_read_off_a_plot else ("", "")
        cells = (None if value is None else mark + percent(value) for value in values)
        lines.append(["published", anchor.label, anchor.where + note, *cells])
    titles = ["who", "line", "where", *(format_tokens(round(tokens)) for tokens in lengths)]
    cited = ", ".join(sorted({anchor.citation for anchor in anchors}))
    return Table(
        name=f"published-{task}",
        caption=f"{task}: score in %, measured here with 95 % intervals, and as published ({cited}).",
        columns=tuple(
            Column(title, value=itemgetter(place), is_number=place > 2)
            for place, title in enumerate(titles)
        ),
        rows=tuple(lines),
    )


def published_table(anchors: Sequence[Anchor]) -> Table:
    """Published scores for programs, a row for each figure."""
    columns = (
        Column(None, "task", lambda row: row[0].task),
        Column(None, "label", lambda row: row[0].label),
        Column(None, "tokens", lambda row: row[1]),
        Column(None, "score", lambda row: row[2]),
        Column(None, "num_items", lambda row: row[0].num),
        Column(None, "citation", lambda row: row[0].citation),
        Column(None, "where", lambda row: row[0].where),
        Column(None, "is_read_off_a_plot", lambda row: row[0].is_read_off_a_plot),
    )
    rows = tuple((anchor, length, score) for anchor in anchors for length, score in anchor.points)
    return Table(name="published", caption="Published scores.", columns=columns, rows=rows)


def _score_columns(title: str) -> tuple[Column, ...]:
    return (
        Column(title, value="score", show=interval),
        Column(None, "score", "score.value"),
        Column(None, "low", "score.low"),
        Column(None, "high", "score.high"),
    )

"""The results page and its figures, from the small records in `results`.

    python docs/make_results.py results              # writes docs/results.md and docs/results/*.svg
    python docs/make_results.py results --out DIR

    results/METHOD/RUN/run.json, steps.jsonl ─▶ tables with 95 % intervals, paired tests, figures

`docs/keep_results.py` adds records. Every number on the page comes from them, but for the published lines, which are marked.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from memagent.eval.records import ItemRecord, read_evaluation, read_items
from memagent.eval.report.anchors import Anchor, read_anchors
from memagent.eval.report.plots import Plot, length_plot, lines_of
from memagent.eval.report.report import load_report
from memagent.eval.report.sheets import NONE, Column, Sheet, beside_sheet, markdown
from memagent.eval.report.tables import (
    RULER_TEN,
    AverageRow,
    CompareRow,
    Entry,
    ResultRow,
    average_rows,
    compare_rows,
    format_tokens,
    result_rows,
)
from memagent.eval.stats import Comparison, Interval, compare, wilson

ORDER = ("trained", "warm start", "base", "trained weights")
"""Methods in tables and figures; others follow."""
HOTPOTQA = "hotpotqa"
PAPER = {HOTPOTQA: "original_sub_em_boxed", "ruler": "original_ruler_boxed"}
"""The paper's rule, by group of tasks."""
PAPER_QUESTIONS = ("ruler/qa_1", "ruler/qa_2")
"""Tasks of RULER that the paper scores as questions."""
SHOWN_ANCHORS = (
    "RL-MemAgent-14B (v1)",
    "RL-MemAgent-7B (v1)",
    "MemAgent-7B without RL",
    "Qwen2.5-Instruct-7B-1M",
)
"""Published lines in figures and tables; the package has all of them."""
LONG_SECTIONS = 200
"""Readings of at least so many sections show whether a section takes longer as the text grows."""

HEAD = """\
# Results

What the readers that this project has trained can do, on questions that none of them was trained on. This page is made by
`python docs/make_results.py results` from the records in `results`, one line for each answer; [experiments.md](experiments.md)
has the training runs, with what failed.

{methods}
- All methods have the same questions and texts, and decode greedily. Failed items count as wrong.
- **strict**: the boxed answer, word for word. **as the paper scores**: it contains the right answer or is contained in it
  (`original_sub_em_boxed`), for RULER the share of the answers that it contains (`original_ruler_boxed`); see [grading](grading.md).
- Brackets are 95 % intervals. **captured** and **retained**: questions whose evidence was whole, word for word, in any memory, and in the last one.
- The adapters were chosen by their scores on the same HotpotQA dev questions, so these may be too favourable.
"""
ABOUT = {
    "trained": """\
- **trained** is `local:memagent-1.5b`: Qwen2.5-Coder-1.5B-Instruct with the adapter of this repository, sections of 2,048 tokens, a memory
  of at most 512, a window of 4,096.""",
    "warm start": "- **warm start** is the same before reinforcement learning.",
    "base": """\
- **base** is the model without an adapter: as reader with the same settings, with the whole text in one prompt (`direct`; at most 32,768
  tokens, the middle is cut out of longer texts), and with the passages that BM25 finds in a window of 4,096 (`bm25`).""",
    "trained weights": "- **trained weights** are those of the trained reader in the other methods.",
}
"""What methods are, in the order of ORDER."""
VALIDATION_NOTE = """\
Lengths marked * are validations of a training run (`memagent train`), with the same reader and the same grading. The others are runs of
`memagent eval`:
"""
COMMANDS = """\
```text
memagent eval results/hotpotqa --source HOTPOTQA --engine local:memagent-1.5b --lengths 7k --run-dir runs/hotpotqa-7k
memagent eval results/ruler --source essays=TEXTS --source squad-dev=FILE --engine local:memagent-1.5b --lengths 8k --run-dir runs/ruler-8k
memagent eval results/beyond --engine local:memagent-1.5b --lengths 8k --run-dir runs/beyond-8k
python docs/keep_results.py results/trained runs/hotpotqa-7k runs/ruler-8k runs/beyond-8k
python docs/make_results.py results
```

The warm start and the base model are measured by `--engine local:qwen2.5-coder-1.5b`, with and without `--adapter FOLDER`; direct reading and
retrieval by `--method direct --set methods.0.settings={window=32768}` and `--method bm25`.
"""


class Records(NamedTuple):
    """All records, with the method of each, and which of them are validations."""

    entries: tuple[Entry, ...]
    validations: frozenset[tuple[str, str, int | None]]
    """Method, task and length."""

    def of(self, keep: Callable[[ItemRecord], bool]) -> list[Entry]:
        """Those that a rule selects."""
        return [entry for entry in self.entries if keep(entry.record)]


def read(folder: Path) -> Records:
    """The records under a folder; methods in the order of ORDER."""
    runs = sorted(path.parent for path in folder.glob("*/*/run.json"))
    if not runs:
        raise SystemExit(f"{folder} has no records; see docs/keep_results.py")
    labels = {run: run.parent.name.replace("-", " ") for run in runs}
    load_report([f"{labels[run]}={run}" for run in runs])  # refuses what is not comparable
    entries: list[Entry] = []
    validations: set[tuple[str, str, int | None]] = set()
    for run in runs:
        manifest = read_evaluation(run)
        methods = len(manifest.get("methods", {}))
        for record in read_items(run):
            series = labels[run] if methods == 1 else f"{labels[run]}, {record.method}"
            entries.append(Entry(series, record))
            if manifest.get("suite") == "validation":
                validations.add((series, record.task, record.target_tokens))
    return Records(
        tuple(sorted(entries, key=lambda entry: _rank(entry.series))), frozenset(validations)
    )


def _rank(series: str) -> tuple[int, str]:
    name = series.partition(",")[0]
    return (ORDER.index(name) if name in ORDER else len(ORDER), series)


def graded(entries: Iterable[Entry], grader: str) -> list[Entry]:
    """The entries with the scores of a grader; those it has not graded are left out."""
    found = [(entry.series, entry.record.graded_by(grader)) for entry in entries]
    return [Entry(series, record) for series, record in found if record is not None]


def paper_graded(entries: Iterable[Entry]) -> list[Entry]:
    """The entries with the scores by the paper's rules."""
    found: list[Entry] = []
    for entry in entries:
        task = entry.record.task
        group = HOTPOTQA if task in PAPER_QUESTIONS else task.partition("/")[0]
        found += graded([entry], PAPER[group])
    return found


# --- rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShares:
    """What became of the evidence, in questions that have some."""

    captured: Interval
    retained: Interval
    num_right: int
    """Right by the strict rule, of those with all evidence retained."""
    num_retained: int


def memory_shares(records: Sequence[ItemRecord]) -> MemoryShares | None:
    """Questions with all evidence in any memory and in the last; None where no evidence is known."""
    known = [record for record in records if record.captured is not None]
    if not known:
        return None
    holds = [record for record in known if record.retained == 1.0]
    return MemoryShares(
        captured=wilson(sum(record.captured == 1.0 for record in known), len(known)),
        retained=wilson(len(holds), len(known)),
        num_right=sum(record.score == 1.0 for record in holds),
        num_retained=len(holds),
    )


class PageRow(NamedTuple):
    """A method on a task at a length."""

    strict: ResultRow
    paper: Interval | None
    f1: Interval | None
    shares: MemoryShares | None
    is_validation: bool


Place = tuple[str, str, int | None]


def _place(row: ResultRow) -> Place:
    return (row.series, row.task, row.length.tokens)


def page_rows(records: Records, entries: Sequence[Entry]) -> list[PageRow]:
    """One row per task, length and method, graded strictly and by the paper's rule."""
    strict = graded(entries, "strict")
    by_place: dict[Place, list[ItemRecord]] = defaultdict(list)
    for series, record in strict:
        by_place[series, record.task, record.target_tokens].append(record)
    papers = {_place(row): row.score for row in result_rows(paper_graded(entries))}
    f1 = {_place(row): row.score for row in result_rows(graded(entries, "f1"))}
    return [
        PageRow(
            row,
            papers.get(_place(row)),
            f1.get(_place(row)),
            memory_shares(by_place[_place(row)]),
            _place(row) in records.validations,
        )
        for row in result_rows(strict)
    ]


def change_by_length(
    entries: Sequence[Entry], *, task: str
) -> list[tuple[str, str, str, Comparison]]:
    """For each method, its longest texts against its shortest ones, on the questions that both have."""
    found = []
    by_series: dict[str, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for series, record in entries:
        if record.task == task and record.target_tokens:
            question = record.id.rpartition("/")[2]
            by_series[series][record.target_tokens][question] = record.score
    for series, lengths in by_series.items():
        shortest = min(lengths)
        for length in sorted(lengths)[1:]:
            both = sorted(lengths[shortest].keys() & lengths[length].keys())
            if both:
                scores = [
                    [lengths[one][question] for question in both] for one in (length, shortest)
                ]
                names = (format_tokens(shortest), format_tokens(length))
                found.append((series, *names, compare(*scores)))
    return found


# --- tables ---------------------------------------------------------------------------------------


def percent(score: Interval | None) -> str:
    """49.4 % (45.0 to 53.8)"""
    if score is None:
        return NONE
    return f"{100 * score.value:.1f} % ({100 * score.low:.1f} to {100 * score.high:.1f})"


def points(found: Comparison) -> str:
    """+2.6 (-0.6 to +5.8)"""
    change = found.difference
    return f"{100 * change.value:+.1f} ({100 * change.low:+.1f} to {100 * change.high:+.1f})"


def column(title: str, value: Callable[[Any], Any], *, is_number: bool = True) -> Column:
    return Column(title=title, value=value, is_number=is_number)


def scores_table(rows: Sequence[PageRow]) -> str:
    """Scores of all methods."""
    columns = [
        column("length", lambda row: row.strict.length.label + "*" * row.is_validation),
        column("method", lambda row: row.strict.series, is_number=False),
        column("questions", lambda row: row.strict.score.num),
        column("strict", lambda row: percent(row.strict.score)),
        column("as the paper scores", lambda row: percent(row.paper)),
    ]
    if any(row.f1 for row in rows):
        columns.append(column("F1", lambda row: row.f1 and f"{100 * row.f1.value:.1f} %"))
    if any(row.shares for row in rows):
        columns += [
            column(
                "captured", lambda row: row.shares and f"{100 * row.shares.captured.value:.1f} %"
            ),
            column(
                "retained", lambda row: row.shares and f"{100 * row.shares.retained.value:.1f} %"
            ),
            column(
                "right, of retained",
                lambda row: row.shares and f"{row.shares.num_right} of {row.shares.num_retained}",
            ),
        ]
    if any(row.strict.num_cut for row in rows):
        columns.append(column("not read whole", lambda row: row.strict.num_cut))
    return _table(columns, rows)


def task_table(rows: Sequence[PageRow]) -> str:
    """A line for each task and method, a column for each length."""
    lengths = sorted({row.strict.length for row in rows}, key=lambda length: length.rank)
    cells = {(row.strict.task, row.strict.series, row.strict.length): row for row in rows}
    lines = list({(row.strict.task, row.strict.series): None for row in rows})
    columns = [
        column("task", lambda line: line[0].partition("/")[2], is_number=False),
        column("method", lambda line: line[1], is_number=False),
    ]
    for length in lengths:
        columns.append(
            column(length.label, lambda line, at=length: _both_scores(cells.get((*line, at))))
        )
    return _table(columns, lines)


def _both_scores(row: PageRow | None) -> str | None:
    if row is None:
        return None
    paper = NONE if row.paper is None else f"{100 * row.paper.value:.1f}"
    score = row.strict.score
    return f"{100 * score.value:.1f}, {paper} ({score.num})" + "*" * row.is_validation


def comparison_table(found: Sequence[CompareRow]) -> str:
    """Paired differences between methods."""
    columns = [
        column("length", lambda row: row.length.label if row.length else "all"),
        column("methods", lambda row: f"{row.first} against {row.second}", is_number=False),
        column("questions", lambda row: row.comparison.difference.num),
        column("difference in points", lambda row: points(row.comparison)),
        column("better", lambda row: row.comparison.num_better),
        column("worse", lambda row: row.comparison.num_worse),
        column("p", lambda row: f"{row.comparison.p_value:.2g}"),
    ]
    return _table(columns, found)


def change_table(found: Sequence[tuple[str, str, str, Comparison]]) -> str:
    """Paired differences between lengths."""
    columns = [
        column("method", lambda row: row[0], is_number=False),
        column("from", lambda row: row[1]),
        column("to", lambda row: row[2]),
        column("questions", lambda row: row[3].difference.num),
        column("difference in points", lambda row: points(row[3])),
        column("p", lambda row: f"{row[3].p_value:.2g}"),
    ]
    return _table(columns, found)


def average_table(strict: Sequence[AverageRow], paper: Sequence[AverageRow]) -> str:
    """Averages over tasks."""
    papers = {(row.series, row.length): row.score for row in paper}
    columns = [
        column("length", lambda row: row.length.label),
        column("method", lambda row: row.series, is_number=False),
        column("tasks", lambda row: len(row.tasks)),
        column("items", lambda row: row.score.num),
        column("strict", lambda row: percent(row.score)),
        column("as the paper scores", lambda row: percent(papers.get((row.series, row.length)))),
    ]
    return _table(columns, strict)


class SectionTime(NamedTuple):
    """Seconds of a section in long readings: of the first ones, and of all."""

    series: str
    length: str
    num: int
    sections: float
    first: float
    all: float


def section_times(entries: Sequence[Entry]) -> list[SectionTime]:
    """By method and length, where readings are long."""
    found: dict[tuple[int, str], list[ItemRecord]] = defaultdict(list)
    for series, record in entries:
        if record.num_sections >= LONG_SECTIONS and "reading" in record.metadata:
            found[record.target_tokens or 0, series].append(record)
    return [
        SectionTime(
            series,
            format_tokens(length),
            len(records),
            fmean(record.num_sections for record in records),
            fmean(record.metadata["reading"]["first_section_seconds"] for record in records),
            fmean(record.metadata["reading"]["section_seconds"] for record in records),
        )
        for (length, series), records in sorted(found.items())
    ]


def time_table(times: Sequence[SectionTime]) -> str:
    columns = [
        column("length", lambda row: row.length),
        column("method", lambda row: row.series, is_number=False),
        column("texts at once", lambda row: row.num),
        column("sections", lambda row: f"{row.sections:,.0f}"),
        column("seconds of a section, first 28K", lambda row: f"{row.first:.3f}"),
        column("all", lambda row: f"{row.all:.3f}"),
        column("ratio", lambda row: f"{row.all / row.first:.2f}"),
    ]
    return _table(columns, times)


def _table(columns: Sequence[Column], rows: Sequence[Any]) -> str:
    sheet = Sheet(name="", caption="", columns=tuple(columns), rows=tuple(rows))
    return markdown(sheet).lstrip()


# --- sections of the page ---------------------------------------------------------------------------


def hotpotqa_part(records: Records, anchors: Sequence[Anchor]) -> tuple[str, list[Plot]]:
    """Questions over two paragraphs, by length."""
    entries = records.of(lambda record: record.task == HOTPOTQA)
    strict, paper = graded(entries, "strict"), paper_graded(entries)
    rows = page_rows(records, entries)
    published = [one for one in anchors if one.task == HOTPOTQA and one.label in SHOWN_ANCHORS]
    plots = [
        _by_length("hotpotqa-paper", "HotpotQA as the paper scores", result_rows(paper), published),
        _by_length("hotpotqa-strict", "HotpotQA, strict", result_rows(strict), ()),
        _memory_plot(rows),
    ]
    compared = [row for row in compare_rows(strict) if "trained" in (row.first, row.second)]
    parts = [
        "## HotpotQA by length\n",
        scores_table(rows),
        _image(
            plots[0],
            "Lines of the paper (arXiv 2507.02259) are dashed: 128 questions a point, by its own rules.",
        ),
        "### From short to long texts\n\nThe same questions, strict.\n",
        change_table(change_by_length(strict, task=HOTPOTQA)),
        _image(plots[2], "Questions whose evidence was whole in any memory, and in the last one."),
    ]
    if compared:
        parts += [
            "### Methods on the same questions\n",
            "Strict; `p` is the exact sign test.\n",
            comparison_table(compared),
        ]
        parts.append(_image(plots[1]))
    parts += ["### Beside the paper\n", _beside(HOTPOTQA, result_rows(paper), published)]
    return "\n".join(part for part in parts if part), [plot for plot in plots if plot]


def ruler_part(records: Records, anchors: Sequence[Anchor]) -> tuple[str, list[Plot]]:
    """The paper's ten tasks and their average, then all tasks."""
    entries = records.of(lambda record: record.task.startswith("ruler/"))
    if not entries:
        return "", []
    ten = [entry for entry in entries if entry.record.task in RULER_TEN]
    strict, paper = (
        average_rows(result_rows(some)) for some in (graded(ten, "strict"), paper_graded(ten))
    )
    published = [
        one for one in anchors if one.task == "ruler/average" and one.label in SHOWN_ANCHORS
    ]
    lines = lines_of(((row.series, row.x, row.score) for row in paper), _series(paper))
    plot = length_plot("ruler-average", "RULER: average of ten tasks", lines, published)
    parts = [
        "## RULER\n\nThe average of the paper's ten synthetic tasks.\n",
        average_table(strict, paper),
        _image(plot),
        _beside("RULER, average of ten tasks", paper, published),
        "### Task by task\n\nStrict, and as the paper scores, in percent; in brackets the number of items.\n",
        task_table(page_rows(records, entries)),
    ]
    return "\n".join(part for part in parts if part), [plot] if plot else []


def beyond_part(records: Records) -> str:
    """Tasks that RULER does not have, each by its own grader."""
    entries = records.of(lambda record: record.task.startswith("beyond/"))
    if not entries:
        return ""
    columns = [
        column("task", lambda row: row.task, is_number=False),
        column("length", lambda row: row.length.label),
        column("method", lambda row: row.series, is_number=False),
        column("questions", lambda row: row.score.num),
        column("score", lambda row: percent(row.score)),
    ]
    text = "## Beyond RULER\n\nEach task by its own grader ([data](data.md)).\n"
    return f"{text}\n{_table(columns, result_rows(entries))}"


def time_part(records: Records) -> str:
    """Does a section take longer late in a long text?"""
    times = section_times(records.entries)
    if not times:
        return ""
    about = "## Time\n\nSeconds of a section in long texts, all of a row read at once: of the first 28K tokens, and of the whole text.\n"
    return f"{about}\n{time_table(times)}"


def _by_length(
    name: str, title: str, rows: Sequence[ResultRow], published: Sequence[Anchor]
) -> Plot | None:
    lines = lines_of(((row.series, row.x, row.score) for row in rows), _series(rows))
    return length_plot(name, title, lines, published)


def _memory_plot(rows: Sequence[PageRow]) -> Plot | None:
    own = [row for row in rows if row.shares is not None and row.strict.series == ORDER[0]]
    names = ("captured", "retained", "right, strict")
    found = [
        (name, row.strict.x, score)
        for row in own
        if row.shares is not None
        for name, score in zip(
            names, (row.shares.captured, row.shares.retained, row.strict.score), strict=True
        )
    ]
    return length_plot(
        "hotpotqa-memory",
        "HotpotQA, the trained reader: evidence in its memory",
        lines_of(found, names),
        (),
    )


def _series(rows: Iterable[ResultRow | AverageRow]) -> list[str]:
    return sorted({row.series for row in rows}, key=_rank)


def _beside(
    name: str, rows: Sequence[ResultRow] | Sequence[AverageRow], published: Sequence[Anchor]
) -> str:
    return markdown(beside_sheet(name, rows, published)) if rows and published else ""


def _image(plot: Plot | None, note: str = "") -> str:
    return (
        f"![{plot.description}](results/{plot.name}.svg)\n\n{note}".rstrip() + "\n" if plot else ""
    )


def make_page(folder: Path) -> tuple[str, list[Plot]]:
    """The page as Markdown, and its figures."""
    records = read(folder)
    anchors = read_anchors("paper")
    hotpotqa, plots = hotpotqa_part(records, anchors)
    ruler, more = ruler_part(records, anchors)
    names = {entry.series.partition(",")[0] for entry in records.entries}
    head = HEAD.replace("{methods}", "\n".join(ABOUT[name] for name in ORDER if name in names))
    parts = [head, hotpotqa, ruler, beyond_part(records), time_part(records), "## Commands\n"]
    parts.append(f"{VALIDATION_NOTE}\n{COMMANDS}" if records.validations else COMMANDS)
    return "\n".join(part for part in parts if part), [*plots, *more]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    given = parser.parse_args(arguments)
    text, plots = make_page(given.results)
    (given.out / "results").mkdir(parents=True, exist_ok=True)
    (given.out / "results.md").write_text(text, encoding="utf-8")
    for plot in plots:
        (given.out / "results" / f"{plot.name}.svg").write_bytes(plot.svg)


if __name__ == "__main__":
    main()

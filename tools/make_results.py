"""The results page and its figures, from the small records in `results`.

    python tools/make_results.py results              # writes docs/results.md and docs/results/*.svg
    python tools/make_results.py results --out DIR

    results/METHOD/RUN/run.json, steps.jsonl ─▶ tables with 95 % intervals, paired tests, figures

`tools/keep_results.py` adds records. Every number on the page comes from them, but for the published lines, which are marked.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from compare_lengths import (
    PAPER_RULE,
    LengthPair,
    LengthRow,
    Lengths,
    Share,
    by_length,
    length_pairs,
    shared_rows,
    was_full,
)

from memagent.eval.records import ItemRecord, read_evaluation, read_items
from memagent.eval.report.anchors import Anchor, read_anchors
from memagent.eval.report.plots import Plot, length_plot, lines_of
from memagent.eval.report.report import load_report
from memagent.eval.report.rows import (
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
from memagent.eval.report.tables import NONE, Column, Table, compared_table, markdown
from memagent.eval.stats import Comparison, Interval, wilson
from memagent.rewards.text import last_boxed
from memagent.rewards.verifiers import grade

ORDER = ("trained", "warm start", "warm start validation", "base", "trained weights")
"""Methods in tables and figures; others follow."""
HOTPOTQA = "hotpotqa"
PAPER = {HOTPOTQA: PAPER_RULE, "ruler": "original_ruler_boxed"}
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
FORM_GRADERS = ("strict", "lenient", "f1", "contains")
"""Rules that ask less and less of the form of an answer."""
LONG_SECTIONS = 200
"""Readings of at least so many sections show whether a section takes longer as the text grows."""

HEAD = """\
# Results

What the readers that this project has trained can do, on questions that none of them was trained on. This page is made by
`python tools/make_results.py results` from the records in `results`, one line for each answer; [experiments.md](experiments.md)
has the training runs, with what failed.

{methods}
- All methods have the same questions and texts, and decode greedily. Failed items count as wrong. Differences and `p` (exact sign
  test) are of questions that both sides answered; `p` is not corrected for the number of comparisons.
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
    "warm start validation": """\
- **warm start validation** is the warm start as its training run measured it, with answers of at most 64 tokens instead of 256, at
  lengths that were not measured again.""",
    "base": """\
- **base** is the model without an adapter, with the whole text in one prompt (`direct`; at most 32,768 tokens, the middle is cut out of
  longer texts), and with the passages that BM25 finds in a window of 4,096 (`bm25`). As a reader it was not measured. It
  seldom writes the box that it is asked for: see [below](#methods-on-the-same-questions) how much of its scores that is.""",
    "trained weights": "- **trained weights** are those of the trained reader in the other methods.",
}
"""What methods are, in the order of ORDER."""
VALIDATION_NOTE = """\
Lengths marked * are validations of a training run (`memagent train`), with the same grading. The others are runs of `memagent eval`:
"""
FORM_NOTE = """\
All prompts ask for a box. A model that was not trained to write one leaves it out, so its strict score, and the paper's, say more about
the form than about what it found. `contains` counts a right answer anywhere in a short reply ([grading](grading.md)). On the questions that all
methods of a length have:
"""
MEMORY_NOTE = """\
If long texts cost the memory its facts, `retained` falls with the length. If they cost the answer that is written from it, `right, of retained`
falls. The trained reader on the questions that all its lengths have:
"""
COMMANDS = """\
```text
memagent eval results/hotpotqa --source HOTPOTQA --engine local:memagent-1.5b --lengths 7k --run-dir runs/hotpotqa-7k
memagent eval results/ruler --source essays=TEXTS --source squad-dev=FILE --engine local:memagent-1.5b --lengths 8k --run-dir runs/ruler-8k
memagent eval results/ruler --source essays=TEXTS --engine local:memagent-1.5b --lengths 512k --num 8 --run-dir runs/ruler-512k
memagent eval results/beyond --engine local:memagent-1.5b --lengths 8k --run-dir runs/beyond-8k
python tools/keep_results.py results/trained runs/hotpotqa-7k runs/ruler-8k runs/ruler-512k runs/beyond-8k
python tools/make_results.py results
```

The warm start and the base model are measured by `--engine local:qwen2.5-coder-1.5b`, with and without `--set adapter=FOLDER`; direct reading and
retrieval by `--method direct --set methods.0.settings={window=32768}` and `--method bm25`. Here those had `--num 256`, and RULER at 512K a
`--task` for each of the paper's ten.
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
        raise SystemExit(f"{folder} has no records; see tools/keep_results.py")
    labels = {run: run.parent.name.replace("-", " ") for run in runs}
    load_report([f"{labels[run]}={run}" for run in runs])  # refuses what is not comparable
    entries: list[Entry] = []
    validations: set[tuple[str, str, int | None]] = set()
    for run in runs:
        manifest = read_evaluation(run)
        methods = len(manifest.methods)
        for record in read_items(run):
            series = labels[run] if methods == 1 else f"{labels[run]}, {record.method}"
            entries.append(Entry(series, record))
            if manifest.suite == "validation":
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
    num_full: int
    """Items whose memory was full at least once."""
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
            sum(map(was_full, by_place[_place(row)])),
            _place(row) in records.validations,
        )
        for row in result_rows(strict)
    ]


def lengths_of(entries: Sequence[Entry]) -> dict[str, Lengths]:
    """Records of each method by length and question."""
    found: dict[str, list[ItemRecord]] = defaultdict(list)
    for series, record in entries:
        found[series].append(record)
    return {series: by_length(records) for series, records in found.items()}


class FormRow(NamedTuple):
    """How a method words its answers, on the questions of a length that all methods have."""

    length: str
    series: str
    boxed: Share
    scores: tuple[float, ...]
    """By the graders of FORM_GRADERS."""


def form_rows(entries: Sequence[Entry]) -> list[FormRow]:
    """Of the lengths at which a method leaves out the box more often than not."""
    return [
        row
        for length, series in sorted(_by_length_and_series(entries).items())
        for rows in [_forms(format_tokens(length), series)]
        if any(2 * row.boxed.num < row.boxed.of for row in rows)
        for row in rows
    ]


def _by_length_and_series(entries: Sequence[Entry]) -> dict[int, dict[str, dict[str, ItemRecord]]]:
    found: dict[int, dict[str, dict[str, ItemRecord]]] = defaultdict(lambda: defaultdict(dict))
    for series, record in entries:
        found[record.target_tokens or 0][series][record.id] = record
    return found


def _forms(length: str, series: dict[str, dict[str, ItemRecord]]) -> list[FormRow]:
    shared = sorted(set.intersection(*(set(some) for some in series.values())))
    return [
        FormRow(
            length,
            name,
            Share(sum(last_boxed(some[one].answer) is not None for one in shared), len(shared)),
            tuple(_mean_grade(grader, [some[one] for one in shared]) for grader in FORM_GRADERS),
        )
        for name, some in series.items()
        if shared
    ]


def _mean_grade(grader: str, records: Sequence[ItemRecord]) -> float:
    return fmean(
        grade(grader, one.answer, one.answers, one.match or "any").value for one in records
    )


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
    return Column(title, value=value, is_number=is_number)


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
    if any(row.strict.num_failed for row in rows):
        columns.append(column("failed", lambda row: row.strict.num_failed))
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
        *_difference_columns(lambda row: row.comparison),
    ]
    return _table(columns, found)


def change_table(found: Sequence[tuple[str, LengthPair]]) -> str:
    """Paired differences between lengths."""
    columns = [
        column("method", lambda row: row[0], is_number=False),
        column("from", lambda row: format_tokens(row[1].shorter)),
        column("to", lambda row: format_tokens(row[1].longer)),
        column("questions", lambda row: row[1].strict.difference.num),
        column(
            "strict", lambda row: " to ".join(f"{100 * one:.1f}" for one in row[1].scores) + " %"
        ),
        *_difference_columns(lambda row: row[1].strict),
        column("as the paper scores", lambda row: row[1].paper and points(row[1].paper)),
    ]
    return _table(columns, found)


def _difference_columns(found: Callable[[Any], Comparison]) -> list[Column]:
    return [
        column("difference in points", lambda row: points(found(row))),
        column("better", lambda row: found(row).num_better),
        column("worse", lambda row: found(row).num_worse),
        column("p", lambda row: f"{found(row).p_value:.2g}"),
    ]


def shared_table(rows: Sequence[LengthRow]) -> str:
    """What a memory held at each length, on the same questions."""
    columns = [
        column("length", lambda row: format_tokens(row.length)),
        column("questions", lambda row: row.score.num),
        column("strict", lambda row: percent(row.score)),
        column("captured", lambda row: percent(row.captured)),
        column("retained", lambda row: percent(row.retained)),
        column("right, of retained", lambda row: row.right_retained),
        column("right, of the others", lambda row: row.right_other),
        column("changes of the memory a text", lambda row: f"{row.changes:.1f}"),
        column("texts whose memory was full", lambda row: row.num_full),
    ]
    return _table(columns, rows)


def retained_table(found: Sequence[LengthPair]) -> str:
    """Questions that had all evidence in the last memory at both lengths."""
    columns = [
        column("from", lambda row: format_tokens(row.shorter)),
        column("to", lambda row: format_tokens(row.longer)),
        column("questions", lambda row: row.both_retained.difference.num),
        *_difference_columns(lambda row: row.both_retained),
    ]
    return _table(columns, [row for row in found if row.both_retained])


def lost_table(pair: LengthPair) -> str:
    """Questions that are right in a short text and wrong in a long one."""
    columns = [
        column("right answer", lambda row: row[1].answers[0], is_number=False),
        column(
            f"answer at {format_tokens(pair.longer)}",
            lambda row: last_boxed(row[1].answer) or row[1].answer,
            is_number=False,
        ),
        column("evidence in the last memory", lambda row: f"{100 * (row[1].retained or 0):.0f} %"),
        column("right as the paper scores", lambda row: _paper_verdict(row[1])),
    ]
    return _table(columns, pair.lost)


def _paper_verdict(record: ItemRecord) -> str | None:
    score = record.scores.get(PAPER_RULE)
    return None if score is None else ("yes" if score == 1.0 else "no")


def form_table(rows: Sequence[FormRow]) -> str:
    """Scores by rules that ask more or less of the form of an answer."""
    columns = [
        column("length", lambda row: row.length),
        column("method", lambda row: row.series, is_number=False),
        column("boxed", lambda row: row.boxed),
        *(
            column(f"`{name}`", lambda row, at=number: f"{100 * row.scores[at]:.1f} %")
            for number, name in enumerate(FORM_GRADERS)
        ),
    ]
    return _table(columns, rows)


def evidence_table(rows: Sequence[PageRow]) -> str:
    """Captured and retained, of each task."""
    columns = [
        column("task", lambda row: row.strict.task.partition("/")[2], is_number=False),
        column("method", lambda row: row.strict.series, is_number=False),
        column("length", lambda row: row.strict.length.label),
        column("items", lambda row: row.shares.captured.num),
        column("captured", lambda row: percent(row.shares.captured)),
        column("retained", lambda row: percent(row.shares.retained)),
        column("memory was full", lambda row: row.num_full),
    ]
    return _table(columns, rows)


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
    table = Table(name="", caption="", columns=tuple(columns), rows=tuple(rows))
    return markdown(table).lstrip()


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
        *_length_parts(strict),
        _image(plots[2], "Questions whose evidence was whole in any memory, and in the last one."),
    ]
    if compared:
        parts += ["### Methods on the same questions\n\nStrict.\n", comparison_table(compared)]
        parts += [_image(plots[1]), *_form_parts(entries)]
    parts += ["### Beside the paper\n", _beside(HOTPOTQA, result_rows(paper), published)]
    return "\n".join(part for part in parts if part), [plot for plot in plots if plot]


def _length_parts(strict: Sequence[Entry]) -> list[str]:
    """The same questions in texts of several lengths."""
    lengths = lengths_of(strict)
    pairs = [(series, pair) for series, found in lengths.items() for pair in length_pairs(found)]
    parts = ["### From short to long texts\n\nThe same questions.\n", change_table(pairs)]
    own = [pair for series, pair in pairs if series == ORDER[0]]
    rows = shared_rows(lengths.get(ORDER[0], {}))
    return parts + _memory_parts(rows, own) if rows and own else parts


def _memory_parts(rows: Sequence[LengthRow], pairs: Sequence[LengthPair]) -> list[str]:
    last = pairs[-1]
    names = (format_tokens(last.shorter), format_tokens(last.longer))
    parts = [
        f"### The memory, or the answer?\n\n{MEMORY_NOTE}",
        shared_table(rows),
        "Strict, on the questions with all evidence in the last memory at both lengths:\n",
        retained_table(pairs),
    ]
    if last.lost:
        parts += [
            f"Questions that are right at {names[0]} and wrong at {names[1]}; {last.lost_retained} have all evidence in the last memory:\n",
            lost_table(last),
        ]
    return parts


def _form_parts(entries: Sequence[Entry]) -> list[str]:
    """Where a method leaves out the box, what else its answers hold."""
    rows = form_rows(entries)
    return [FORM_NOTE, form_table(rows)] if rows else []


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
    rows = page_rows(records, entries)
    plot = length_plot("ruler-average", "RULER: average of ten tasks", lines, published)
    parts = [
        "## RULER\n\nThe average of the paper's ten synthetic tasks.\n",
        average_table(strict, paper),
        _image(plot),
        _beside("RULER, average of ten tasks", paper, published),
        "### Task by task\n\nStrict, and as the paper scores, in percent; in brackets the number of items.\n",
        task_table(rows),
    ]
    parts += _evidence_parts(rows)
    return "\n".join(part for part in parts if part), [plot] if plot else []


def _evidence_parts(rows: Sequence[PageRow]) -> list[str]:
    """Tasks and lengths at which not every item kept all its evidence."""
    known = [row for row in rows if row.shares is not None]
    less = [row for row in known if row.shares and row.shares.retained.value < 1]
    if not less:
        return []
    about = f"Items whose evidence was whole in any memory, and in the last one. In the other {len(known) - len(less)} of {len(known)} lines all of it was, in all items:\n"
    return [about, evidence_table(less)]


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
    return markdown(compared_table(name, rows, published)) if rows and published else ""


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
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "docs")
    given = parser.parse_args(arguments)
    text, plots = make_page(given.results)
    (given.out / "results").mkdir(parents=True, exist_ok=True)
    (given.out / "results.md").write_text(text, encoding="utf-8")
    for plot in plots:
        (given.out / "results" / f"{plot.name}.svg").write_bytes(plot.svg)


if __name__ == "__main__":
    main()

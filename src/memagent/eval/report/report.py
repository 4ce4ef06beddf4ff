"""Reports: tables and plots from the run directories of evaluations.

    RUN, RUN, ... ─▶ load_report ─▶ Report ─┬─▶ tables      for the terminal
                     (checked)              └─▶ write_report(DIR)
                                                  report.html    one page, plots inside
                                                  report.md
                                                  *.csv          numbers in full
                                                  plots/         PNG and SVG

    report = load_report(["runs/reader", "big=runs/reader-14b"])
    print(report.results[0].score)
    write_report(report, Path("report"))

Failed items count as wrong, unfinished runs are marked, and runs that are not comparable are refused.
Reports are reproducible byte for byte.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from memagent.errors import ConfigError, RunError
from memagent.eval.records import EvaluationManifest, ItemRecord, read_evaluation, read_items
from memagent.eval.report import tables
from memagent.eval.report.anchors import Anchor
from memagent.eval.report.plots import (
    INK,
    PAPER,
    Plot,
    accuracy_plot,
    average_plot,
    check_library,
    cost_plot,
)
from memagent.eval.report.rows import (
    AverageRow,
    CompareRow,
    Entry,
    LengthUnit,
    ResultRow,
    average_rows,
    compare_rows,
    item_of,
    result_rows,
)
from memagent.eval.report.tables import Column, Table
from memagent.files import reason_of
from memagent.rewards.verifiers import open_grader

BYTES = "bytes"
"""The tokenizer whose tokens are bytes."""
ANSWERING = frozenset({"adapter", "extra_body", "yarn_factor", "yarn_window"})
"""Engine settings that change answers, rather than speed or address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRun:
    """A run directory that was read."""

    path: Path = field(compare=False)
    label: str | None
    """The user's name for it."""
    manifest: EvaluationManifest
    records: tuple[ItemRecord, ...]

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @property
    def title(self) -> str:
        """The folder's name, behind the user's."""
        return self.name if self.label is None else f"{self.label} ({self.name})"

    @property
    def num_done(self) -> int:
        """Items that have a record."""
        return len(self.records)

    @property
    def num_failed(self) -> int:
        """Items that failed."""
        return sum(record.status == "failed" for record in self.records)

    @property
    def state(self) -> str:
        """finished, UNFINISHED, or unknown where the manifest has no number of items."""
        if self.manifest.num_items is None:
            return "unknown"
        return "finished" if self.num_done >= self.manifest.num_items else "UNFINISHED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What runs show together."""

    runs: tuple[LoadedRun, ...]
    series: tuple[str, ...]
    """Lines of plots: a model with a method."""
    results: tuple[ResultRow, ...]
    unfinished: tuple[ResultRow, ...]
    """Results from an unfinished run."""
    averages: tuple[AverageRow, ...]
    comparisons: tuple[CompareRow, ...]
    anchors: tuple[Anchor, ...]
    """Published lines on the tasks of the results; none where lengths are in bytes."""
    has_left_out_anchors: bool = False
    """True when there are published lines whose lengths, in tokens, cannot be compared."""

    @property
    def unit(self) -> LengthUnit:
        """What the lengths of the texts count."""
        is_in_bytes = any(run.manifest.length_tokenizer == BYTES for run in self.runs)
        return "bytes" if is_in_bytes else "tokens"

    @property
    def depths(self) -> list[ResultRow]:
        """Results of tasks with evidence: those of a series together, by length."""
        rows = [row for row in self.results if row.buckets]
        return sorted(
            rows, key=lambda row: (row.task, self.series.index(row.series), row.length.rank)
        )

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks that have results."""
        return tuple({row.task: None for row in self.results})

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups of tasks that have averages."""
        return tuple({row.group: None for row in self.averages})


# --- loading --------------------------------------------------------------------------------------


def load_report(
    names: Sequence[str], *, anchors: Sequence[Anchor] = (), grader: str | None = None
) -> Report:
    """The report of run directories, each as PATH or LABEL=PATH.

    With `grader`, scores are those of that grader, which has graded the runs beside their own or later.
    """
    runs = [_loaded(name, grader) for name in names]
    series_of = _series(runs)
    _check_comparable(runs, series_of)
    entries = _entries(runs, series_of)
    if not entries:
        raise RunError(
            f"{' and '.join(names)} hold no finished items yet; there is nothing to report"
        )
    results = result_rows(entries)
    open_cells = {
        (series_of[number, record.method], record.task, record.target_tokens)
        for number, run in enumerate(runs)
        if run.state != "finished"
        for record in run.records
    }
    averages = average_rows(results)
    tasks = {row.task for row in results} | {row.anchor_task for row in averages}
    published = tuple(anchor for anchor in anchors if anchor.task in tasks)
    is_in_bytes = any(run.manifest.length_tokenizer == BYTES for run in runs)
    return Report(
        runs=tuple(runs),
        series=tuple({entry.series: None for entry in entries}),
        results=tuple(results),
        unfinished=tuple(
            row for row in results if (row.series, row.task, row.length.tokens) in open_cells
        ),
        averages=tuple(averages),
        comparisons=tuple(compare_rows(entries)),
        anchors=() if is_in_bytes else published,
        has_left_out_anchors=is_in_bytes and bool(published),
    )


def _loaded(name: str, grader: str | None) -> LoadedRun:
    label, path = _split(name)
    manifest = read_evaluation(path, "reports need evaluations")
    order = {method: number for number, method in enumerate(manifest.methods)}

    def place(record: ItemRecord) -> tuple[str, int, int, int, int]:
        number = order.get(record.method, len(order))
        return (record.task, number, record.target_tokens or 0, record.index, record.sample)

    # records are journalled in the order in which they finish, which varies
    records = tuple(sorted(read_items(path, with_traces=False), key=place))
    if grader is not None:
        records = tuple(_graded(record, grader, path) for record in records)
    return LoadedRun(path=path, label=label, manifest=manifest, records=records)


def _graded(record: ItemRecord, grader: str, path: Path) -> ItemRecord:
    open_grader(grader)
    graded = record.graded_by(grader)
    if graded is None:
        raise RunError(
            f"{path} has answers that {grader} has not graded; `memagent eval regrade {path}` with "
            f"`grader={grader}` grades them without asking again"
        )
    return graded


def _split(name: str) -> tuple[str | None, Path]:
    """`LABEL=PATH`, or a path that may itself have a `=` in it."""
    label, equals, path = name.partition("=")
    if not equals or Path(name).exists():
        return None, Path(name)
    if not label or not path:
        raise ConfigError(f"{name!r} is neither a folder nor LABEL=FOLDER")
    return label, Path(path)


def _series(runs: Sequence[LoadedRun]) -> dict[tuple[int, str], str]:
    """The series of each run and method. Models are named where there are several."""
    models = {run.manifest.model for run in runs if run.label is None}
    short = {model: model.rstrip("/").rsplit("/", 1)[-1] for model in models}
    if len(set(short.values())) < len(models):
        short = {model: model for model in models}
    series = {}
    for number, run in enumerate(runs):
        methods = list({record.method: None for record in run.records})
        for method in methods:
            if run.label is not None:
                name = run.label if len(methods) == 1 else f"{run.label}, {method}"
            else:
                name = method if len(models) == 1 else f"{short[run.manifest.model]}, {method}"
            series[number, method] = name
    return series


def _entries(runs: Sequence[LoadedRun], series_of: dict[tuple[int, str], str]) -> list[Entry]:
    """All records with their series; the same item twice in one series is an error."""
    seen: dict[tuple[Any, ...], int] = {}
    entries = []
    for number, run in enumerate(runs):
        for record in run.records:
            series = series_of[number, record.method]
            item = (series, record.task, record.target_tokens, record.index, record.id, record.seed)
            if item in seen:
                raise ConfigError(
                    f"{runs[seen[item]].path} and {run.path} hold the same items of {series} on "
                    f"{record.task}; give them different names as LABEL={run.path}"
                )
            seen[item] = number
            entries.append(Entry(series, record))
    return entries


# --- comparability --------------------------------------------------------------------------------

DIFFERENT = {
    "tokenizer": "{first} counts lengths with the tokenizer {before}, {path} with {now}, so their lengths are "
    "not comparable; report them separately",
    "source": "{first} and {path} generated texts from different files of the source {name}, so their items "
    "differ; report them separately",
    "grader": "{name} is graded by {before} in {first}, by {now} in {path}; report them separately",
    "settings": "{first} and {path} both hold {name}, but with different settings; give them different names "
    "as LABEL={path}",
}
"""What must be the same in all runs that have it, and the error where it is not."""
Fact = tuple[str, tuple[Any, ...], str]
"""A key of DIFFERENT, what it is of, its name first, and its value."""


def _check_comparable(runs: Sequence[LoadedRun], series_of: dict[tuple[int, str], str]) -> None:
    paths = [run.path.resolve() for run in runs]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"{path} is given twice")
    facts = [list(_facts(run, number, series_of)) for number, run in enumerate(runs)]
    for kind in DIFFERENT:
        known: dict[tuple[Any, ...], tuple[str, Path]] = {}
        for run, own in zip(runs, facts, strict=True):
            for _, key, value in (fact for fact in own if fact[0] == kind):
                before, first = known.setdefault(key, (value, run.path))
                if value != before:
                    raise _differs(kind, key[0], before, first, value, run.path)
    rules: dict[str, tuple[set[str], Path]] = {}
    for run in runs:
        for task in dict.fromkeys(record.task for record in run.records):
            own_rules = {_rule_of(record) for record in run.records if record.task == task}
            others, first = rules.setdefault(task, (own_rules, run.path))
            if own_rules.isdisjoint(others):  # runs of different items
                raise _differs("grader", task, min(others), first, min(own_rules), run.path)


def _facts(run: LoadedRun, number: int, series_of: dict[tuple[int, str], str]) -> Iterator[Fact]:
    manifest = run.manifest
    if manifest.length_tokenizer is not None:
        yield "tokenizer", ("",), manifest.length_tokenizer
    for source, digest in manifest.sources.items():
        yield "source", (source,), digest
    for record in run.records:
        item = (record.task, record.target_tokens, item_of(record))
        yield "grader", item, _rule_of(record)
    engine = {n: v for n, v in manifest.engine.settings.items() if n in ANSWERING}
    for (place, method), series in series_of.items():
        if place == number:
            settings = (manifest.model, engine, manifest.methods.get(method))
            yield "settings", (series,), json.dumps(settings, sort_keys=True)


def _rule_of(record: ItemRecord) -> str:
    limit = record.graded_tokens
    return f"{record.grader} up to {limit} tokens" if limit else record.grader


def _differs(kind: str, name: str, before: str, first: Path, now: str, path: Path) -> ConfigError:
    return ConfigError(
        DIFFERENT[kind].format(name=name, before=before, first=first, now=now, path=path)
    )


# --- tables, notes, plots -------------------------------------------------------------------------


def report_tables(report: Report) -> list[Table]:
    """The tables of a report, those without rows left out."""
    found = [
        runs_table(report.runs),
        tables.results_table(report.results, report.unfinished),
        tables.averages_table(report.averages),
        tables.comparisons_table(report.comparisons),
        tables.depth_table(report.depths),
    ]
    return [table for table in found if table.rows]


def published_tables(report: Report) -> list[Table]:
    """For each task and average with published lines, a table of them next to the measured ones."""
    found = []
    for task in report.tasks:
        own = [row for row in report.results if row.task == task]
        if published := [anchor for anchor in report.anchors if anchor.task == task]:
            found.append(tables.compared_table(task, own, published))
    for group in report.groups:
        averages = [row for row in report.averages if row.group == group]
        named = averages[0].anchor_task
        if published := [anchor for anchor in report.anchors if anchor.task == named]:
            found.append(tables.compared_table(f"{group} average", averages, published))
    return found


def runs_table(runs: Sequence[LoadedRun]) -> Table:
    """The runs, their progress and their versions."""
    count = "{:,}".format
    columns = (
        Column("run", value="title", is_number=False),
        Column(None, "run", "name"),
        Column(None, "label"),
        Column("model", "model", "manifest.model", is_number=False),
        Column(
            "methods", value=lambda run: ", ".join(run.manifest.methods) or None, is_number=False
        ),
        Column("suite", "suite", "manifest.suite", is_number=False),
        Column("seed", "seed", "manifest.seed"),
        Column("lengths counted by", "tokenizer", "manifest.length_tokenizer", is_number=False),
        Column("done", "num_done", show=count),
        Column("planned", "num_planned", "manifest.num_items", show=count),
        Column("failed", "num_failed"),
        Column("state", "state", is_number=False),
        Column("memagent", "memagent", "manifest.memagent"),
        Column(
            "started", "created", "manifest.created", show=lambda time: time[:16].replace("T", " ")
        ),
    )
    return Table(name="runs", caption="Runs and their progress.", columns=columns, rows=tuple(runs))


def notes(report: Report) -> list[str]:
    """What a reader of the tables has to know, one or two sentences each."""
    num_failed = sum(row.num_failed for row in report.results)
    num_samples = sum(row.num_samples for row in report.results)
    seeds = sorted({run.manifest.seed for run in report.runs if run.manifest.seed is not None})
    seed_words = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    found = [
        f"{num_samples:,} answers, {num_failed:,} of them failed "
        f"({100 * num_failed / num_samples:.1f} %). Failed items count as wrong: they score 0 and "
        "stay in n.",
        f"n is the number of items{f'; {seed_words}' if seeds else ''}. Intervals are 95 %: Wilson's "
        "where every score is 0 or 1, else those of a score test between the bounds; none has a width of "
        "zero.",
    ]
    num_empty = sum(row.num_empty for row in report.results)
    if num_failed or num_empty:
        lost = sum(row.lost_tokens for row in report.results)
        found.append(
            f"{num_failed:,} failed and {num_empty:,} empty answers used {lost:,} tokens; the column "
            "`answered` is the score without them."
        )
    if num_long := sum(row.num_over_limit for row in report.results):
        found.append(
            f"{num_long:,} answers are longer than their task allows; a part of each is graded."
        )
    if report.has_left_out_anchors:
        found.append("Lengths are in bytes; published lines, in tokens, are left out.")
    for run in report.runs:
        if run.state == "UNFINISHED":
            found.append(
                f"UNFINISHED: {run.name} has {run.num_done:,} of {run.manifest.num_items:,} items; its "
                "rows are marked with * and may change."
            )
    by_grader: dict[str, list[str]] = {}
    for task in report.tasks:
        names = {name for row in report.results if row.task == task for name in row.graders}
        by_grader.setdefault(" and ".join(sorted(names)), []).append(task)
    found += [f"Graded by {grader}: {', '.join(tasks)}." for grader, tasks in by_grader.items()]
    return found


def credits_of(report: Report) -> list[str]:
    """Where the published lines come from, and how they differ from measured ones."""
    cited = {(anchor.citation, anchor.note): None for anchor in report.anchors}
    return [f"Published lines are from {who}. {note}".strip() for who, note in cited]


def report_plots(report: Report) -> list[Plot]:
    """The plots of a report: of groups of tasks, then of each task."""
    rows, anchors, series, unit = report.results, report.anchors, report.series, report.unit
    plots: list[Plot | None] = []
    for group in report.groups:
        plots.append(average_plot(group, report.averages, anchors, series=series, unit=unit))
    for task in report.tasks:
        plots.append(accuracy_plot(task, rows, anchors, series=series, unit=unit))
        plots.append(cost_plot(task, rows, series=series))
    return [plot for plot in plots if plot is not None]


# --- writing --------------------------------------------------------------------------------------


def write_report(report: Report, folder: Path, *, title: str = "Evaluation") -> list[Path]:
    """Write the page, Markdown, CSV and plots; the files, the page first."""
    check_library()
    plots = report_plots(report)
    own, beside = report_tables(report), published_tables(report)
    remarks = [*notes(report), *credits_of(report)]
    contents: dict[str, bytes] = {
        "report.html": page(title, remarks, own, beside, plots).encode(),
        "report.md": markdown_report(title, remarks, [*own, *beside], plots).encode(),
    }
    as_csv = [*own, *([tables.published_table(report.anchors)] if report.anchors else [])]
    contents |= {f"{table.name}.csv": tables.csv_text(table).encode() for table in as_csv}
    for plot in plots:
        contents[f"plots/{plot.name}.svg"] = plot.svg
        contents[f"plots/{plot.name}.png"] = plot.png
    try:
        (folder / "plots").mkdir(parents=True, exist_ok=True)
        for name, data in contents.items():
            (folder / name).write_bytes(data)
    except OSError as error:
        raise ConfigError(f"cannot write the report to {folder}: {reason_of(error)}") from None
    return [folder / name for name in contents]


def markdown_report(
    title: str, remarks: Sequence[str], shown: Sequence[Table], plots: Sequence[Plot]
) -> str:
    """The report as Markdown, with the plots by name."""
    points = "\n".join(f"- {tables.inline(line)}" for line in remarks)
    parts = [f"# {title}\n\n{points}\n", *(tables.markdown(table) for table in shown)]
    for plot in plots:  # brackets of its own would end those of the image
        name = tables.inline(plot.title).replace("[", "&#91;").replace("]", "&#93;")
        parts.append(f"![{name}](plots/{plot.name}.png)\n")
    return "\n".join(parts)


# --- the page -------------------------------------------------------------------------------------

#     notes, tables, plots ─▶ page.html (the template beside this file) ─▶ report.html
# Plots are inlined as SVG. Their ids are prefixed with the plot's name, because ids are shared by the
# page, and ink and paper become the page's colours, so that plots are readable in light and dark mode.


TEMPLATE = "page.html"
FIRST = ("runs", "results", "averages")
"""Tables above the plots; the others are below."""

_prolog = re.compile(r"^.*?(?=<svg)", re.S)
_metadata = re.compile(r"<metadata>.*?</metadata>\s*", re.S)
_title = re.compile(r"<title>.*?</title>\s*", re.S)
_id = re.compile(r'\bid="([^"]+)"')
_use = re.compile(r'(url\(#|href="#)([^")]+)')


def page(
    title: str,
    notes: Sequence[str],
    tables: Sequence[Table],
    published: Sequence[Table],
    plots: Sequence[Plot],
) -> str:
    """The page as HTML."""
    source = (files("memagent.eval.report") / TEMPLATE).read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    return environment.from_string(source).render(
        title=title,
        first=FIRST,
        notes=notes,
        tables=tables,
        published=published,
        plots=[(plot, inline_svg(plot)) for plot in plots],
    )


def inline_svg(plot: Plot) -> Markup:
    """A plot's SVG as a part of a page."""
    svg = _prolog.sub("", plot.svg.decode(), count=1)
    svg = _title.sub("", _metadata.sub("", svg, count=1), count=1)
    svg = _id.sub(rf'id="{plot.name}-\1"', svg)
    svg = _use.sub(rf"\g<1>{plot.name}-\2", svg)
    svg = svg.replace(INK, "currentColor").replace(PAPER, "none")
    names = f'{plot.name}-title {plot.name}-description"'
    labels = (
        f'<title id="{plot.name}-title">{html.escape(plot.title)}</title>'
        f'<desc id="{plot.name}-description">{html.escape(plot.description)}</desc>'
    )
    start, end = svg.split(">", 1)
    return Markup(f'{start} role="img" aria-labelledby="{names}>\n{labels}{end}')

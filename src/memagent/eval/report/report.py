"""Reports: tables and plots from the run directories of evaluations.

    RUN, RUN, ... ─▶ load_report ─▶ Report ─┬─▶ sheets      tables for the terminal
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

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memagent.errors import ConfigError, RunError
from memagent.eval.records import ItemRecord, read_evaluation, read_items
from memagent.eval.report import sheets
from memagent.eval.report.anchors import Anchor
from memagent.eval.report.figures import paper_figures
from memagent.eval.report.page import page
from memagent.eval.report.plots import (
    Plot,
    accuracy_plot,
    average_plot,
    check_library,
    cost_plot,
    depth_plot,
)
from memagent.eval.report.sheets import Column, Sheet
from memagent.eval.report.tables import (
    AverageRow,
    CompareRow,
    DepthRow,
    Entry,
    LengthUnit,
    ResultRow,
    average_rows,
    compare_rows,
    depth_rows,
    item_of,
    result_rows,
)
from memagent.files import reason_of
from memagent.rewards.verifiers import open_grader

BYTES = "bytes"
"""The tokenizer whose tokens are bytes."""
ANSWERING = frozenset({"adapter", "extra_body", "yarn_factor", "yarn_window"})
"""Engine settings that change answers, rather than speed or address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a report shows of a run."""

    name: str
    """The folder's name."""
    label: str | None
    """The user's name for it."""
    model: str
    methods: tuple[str, ...]
    suite: str | None
    seed: int | None
    tokenizer: str | None
    """Tokenizer that counted lengths; None where no lengths were requested."""
    num_done: int
    num_planned: int | None
    """None where the manifest has no number."""
    num_failed: int
    created: str
    version: str
    """Of memagent."""

    @property
    def is_finished(self) -> bool:
        """Whether every item that was planned has a record."""
        return self.num_planned is not None and self.num_done >= self.num_planned

    @property
    def state(self) -> str:
        """finished, UNFINISHED or unknown."""
        if self.num_planned is None:
            return "unknown"
        return "finished" if self.is_finished else "UNFINISHED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What runs show together."""

    runs: tuple[RunInfo, ...]
    series: tuple[str, ...]
    """Lines of plots: a model with a method."""
    results: tuple[ResultRow, ...]
    unfinished: tuple[ResultRow, ...]
    """Results from an unfinished run."""
    averages: tuple[AverageRow, ...]
    comparisons: tuple[CompareRow, ...]
    depths: tuple[DepthRow, ...]
    anchors: tuple[Anchor, ...]
    """Published lines on the tasks of the results; none where lengths are in bytes."""
    has_left_out_anchors: bool = False
    """True when there are published lines whose lengths, in tokens, cannot be compared."""

    @property
    def unit(self) -> LengthUnit:
        """What the lengths of the texts count."""
        return "bytes" if any(run.tokenizer == BYTES for run in self.runs) else "tokens"

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks that have results."""
        return tuple({row.task: None for row in self.results})

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups of tasks that have averages."""
        return tuple({row.group: None for row in self.averages})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """A run directory that was read."""

    path: Path
    info: RunInfo
    methods: dict[str, Any]
    """Each method with its settings, as the manifest has them."""
    engine: dict[str, Any]
    """Settings of the engine that change its answers."""
    sources: dict[str, str]
    """SHA-256 of the source files of generated texts."""
    records: tuple[ItemRecord, ...]


# --- loading --------------------------------------------------------------------------------------


def load_report(
    names: Sequence[str], *, anchors: Sequence[Anchor] = (), grader: str | None = None
) -> Report:
    """The report of run directories, each as PATH or LABEL=PATH.

    With `grader`, scores are those of that grader, which has graded the runs beside their own or later.
    """
    runs = [_loaded(name, grader) for name in names]
    _check_distinct(runs)
    _check_tokenizers(runs)
    _check_sources(runs)
    _check_graders(runs)
    series_of = _series(runs)
    _check_settings(runs, series_of)
    entries = _entries(runs, series_of)
    if not entries:
        raise RunError(
            f"{' and '.join(names)} hold no finished items yet; there is nothing to report"
        )
    results = result_rows(entries)
    open_series = {
        (series_of[number, record.method], record.task, record.target_tokens)
        for number, run in enumerate(runs)
        if not run.info.is_finished
        for record in run.records
    }
    averages = average_rows(results)
    tasks = {row.task for row in results} | {row.anchor_task for row in averages}
    published = tuple(anchor for anchor in anchors if anchor.task in tasks)
    is_in_bytes = any(run.info.tokenizer == BYTES for run in runs)
    return Report(
        runs=tuple(run.info for run in runs),
        series=tuple({entry.series: None for entry in entries}),
        results=tuple(results),
        unfinished=tuple(
            row for row in results if (row.series, row.task, row.length.tokens) in open_series
        ),
        averages=tuple(averages),
        comparisons=tuple(compare_rows(entries)),
        depths=tuple(depth_rows(entries)),
        anchors=() if is_in_bytes else published,
        has_left_out_anchors=is_in_bytes and bool(published),
    )


def _loaded(name: str, grader: str | None) -> _Loaded:
    label, path = _split(name)
    manifest = read_evaluation(path, "reports need evaluations")
    methods = tuple(manifest.get("methods", {}))
    order = {method: number for number, method in enumerate(methods)}

    def place(record: ItemRecord) -> tuple[str, int, int, int, int]:
        number = order.get(record.method, len(order))
        return (record.task, number, record.target_tokens or 0, record.index, record.sample)

    # records are journalled in the order in which they finish, which varies
    records = tuple(sorted(read_items(path, with_traces=False), key=place))
    if grader is not None:
        records = tuple(_graded(record, grader, path) for record in records)
    info = RunInfo(
        name=path.resolve().name,
        label=label,
        model=str(manifest.get("model", "")),
        methods=methods,
        suite=manifest.get("suite"),
        seed=manifest.get("seed"),
        tokenizer=manifest.get("length_tokenizer"),
        num_done=len(records),
        num_planned=manifest.get("num_items"),
        num_failed=sum(record.status == "failed" for record in records),
        created=str(manifest.get("created", "")),
        version=str(manifest.get("memagent", "")),
    )
    engine = manifest.get("engine", {}).get("settings", {})
    return _Loaded(
        path=path,
        info=info,
        methods=manifest.get("methods", {}),
        engine={name: engine[name] for name in sorted(ANSWERING & engine.keys())},
        sources=manifest.get("sources", {}),
        records=records,
    )


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


def _series(runs: Sequence[_Loaded]) -> dict[tuple[int, str], str]:
    """The series of each run and method. Models are named where there are several."""
    models = {run.info.model for run in runs if run.info.label is None}
    short = {model: model.rstrip("/").rsplit("/", 1)[-1] for model in models}
    if len(set(short.values())) < len(models):
        short = {model: model for model in models}
    series = {}
    for number, run in enumerate(runs):
        methods = list({record.method: None for record in run.records})
        for method in methods:
            if run.info.label is not None:
                name = run.info.label if len(methods) == 1 else f"{run.info.label}, {method}"
            else:
                name = method if len(models) == 1 else f"{short[run.info.model]}, {method}"
            series[number, method] = name
    return series


def _entries(runs: Sequence[_Loaded], series_of: dict[tuple[int, str], str]) -> list[Entry]:
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


def _check_distinct(runs: Sequence[_Loaded]) -> None:
    paths = [run.path.resolve() for run in runs]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"{path} is given twice")


def _check_tokenizers(runs: Sequence[_Loaded]) -> None:
    counted = [run for run in runs if run.info.tokenizer is not None]
    for run in counted[1:]:
        first = counted[0]
        if run.info.tokenizer != first.info.tokenizer:
            raise ConfigError(
                f"{first.path} counts lengths with the tokenizer {first.info.tokenizer}, {run.path} "
                f"with {run.info.tokenizer}, so their lengths are not comparable; report them separately"
            )


def _check_sources(runs: Sequence[_Loaded]) -> None:
    """Items with the same index come from the same source files."""
    known: dict[str, tuple[str, Path]] = {}
    for run in runs:
        for source, digest in run.sources.items():
            before, path = known.setdefault(source, (digest, run.path))
            if digest != before:
                raise ConfigError(
                    f"{path} and {run.path} generated texts from different files of the source {source}, "
                    "so their items differ; report them separately"
                )


def _check_graders(runs: Sequence[_Loaded]) -> None:
    """Each item is graded by one grader; items of a task may name different graders."""
    by_item: dict[tuple[Any, ...], tuple[str, Path]] = {}
    by_task: dict[str, tuple[set[str], Path]] = {}
    for run in runs:
        graders: dict[str, set[str]] = {}
        for record in run.records:
            rule = _rule_of(record)
            graders.setdefault(record.task, set()).add(rule)
            item = (record.task, record.target_tokens, item_of(record))
            before, path = by_item.setdefault(item, (rule, run.path))
            if rule != before:
                raise _graded_twice(record.task, before, path, rule, run.path)
        for task, own in graders.items():
            others, path = by_task.setdefault(task, (own, run.path))
            if own.isdisjoint(others):  # disjoint items of one task
                raise _graded_twice(task, min(others), path, min(own), run.path)


def _rule_of(record: ItemRecord) -> str:
    limit = record.graded_tokens
    return f"{record.grader} up to {limit} tokens" if limit else record.grader


def _graded_twice(task: str, one: str, path: Path, other: str, other_path: Path) -> ConfigError:
    return ConfigError(
        f"{task} is graded by {one} in {path}, by {other} in {other_path}; report them separately"
    )


def _check_settings(runs: Sequence[_Loaded], series_of: dict[tuple[int, str], str]) -> None:
    """Runs of one series have the same settings."""
    known: dict[str, tuple[Any, Path]] = {}
    for (number, method), series in series_of.items():
        run = runs[number]
        settings = (run.info.model, run.engine, run.methods.get(method))
        before, path = known.setdefault(series, (settings, run.path))
        if json.dumps(settings, sort_keys=True) != json.dumps(before, sort_keys=True):
            raise ConfigError(
                f"{path} and {run.path} both hold {series}, but with different settings; give them "
                f"different names as LABEL={run.path}"
            )


# --- tables, notes, plots -------------------------------------------------------------------------


def report_sheets(report: Report) -> list[Sheet]:
    """The tables of a report, those without rows left out."""
    found = [
        runs_sheet(report.runs),
        sheets.results_sheet(report.results, report.unfinished),
        sheets.averages_sheet(report.averages),
        sheets.comparisons_sheet(report.comparisons),
        sheets.depth_sheet(report.depths),
    ]
    return [sheet for sheet in found if sheet.rows]


def published_sheets(report: Report) -> list[Sheet]:
    """For each task and average with published lines, a table of them next to the measured ones."""
    found = []
    for task in report.tasks:
        own = [row for row in report.results if row.task == task]
        if published := [anchor for anchor in report.anchors if anchor.task == task]:
            found.append(sheets.beside_sheet(task, own, published))
    for group in report.groups:
        averages = [row for row in report.averages if row.group == group]
        named = averages[0].anchor_task
        if published := [anchor for anchor in report.anchors if anchor.task == named]:
            found.append(sheets.beside_sheet(f"{group} average", averages, published))
    return found


def runs_sheet(runs: Sequence[RunInfo]) -> Sheet:
    """The runs, their progress and their versions."""
    return Sheet(
        name="runs",
        caption="Runs and their progress.",
        columns=(
            Column(title="run", value=_run_name, is_number=False),
            Column(key="run", value=lambda run: run.name),
            Column(key="label", value=lambda run: run.label),
            Column(title="model", key="model", value=lambda run: run.model, is_number=False),
            Column(
                title="methods", value=lambda run: ", ".join(run.methods) or None, is_number=False
            ),
            Column(title="suite", key="suite", value=lambda run: run.suite, is_number=False),
            Column(title="seed", key="seed", value=lambda run: run.seed),
            Column(
                title="lengths counted by",
                key="tokenizer",
                value=lambda run: run.tokenizer,
                is_number=False,
            ),
            Column(
                title="done", key="num_done", value=lambda run: run.num_done, show="{:,}".format
            ),
            Column(
                title="planned",
                key="num_planned",
                value=lambda run: run.num_planned,
                show="{:,}".format,
            ),
            Column(title="failed", key="num_failed", value=lambda run: run.num_failed),
            Column(title="state", key="state", value=lambda run: run.state, is_number=False),
            Column(title="memagent", key="memagent", value=lambda run: run.version),
            Column(
                title="started",
                key="created",
                value=lambda run: run.created,
                show=lambda time: time[:16].replace("T", " "),
            ),
        ),
        rows=tuple(runs),
    )


def _run_name(run: RunInfo) -> str:
    return run.name if run.label is None else f"{run.label} ({run.name})"


def notes(report: Report) -> list[str]:
    """What a reader of the tables has to know, one or two sentences each."""
    num_failed = sum(row.num_failed for row in report.results)
    num_samples = sum(row.num_samples for row in report.results)
    seeds = sorted({run.seed for run in report.runs if run.seed is not None})
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
                f"UNFINISHED: {run.name} has {run.num_done:,} of {run.num_planned:,} items; its "
                "rows are marked with * and may change."
            )
    by_grader: dict[str, list[str]] = {}
    for task in report.tasks:
        by_grader.setdefault(_graders(report, task), []).append(task)
    found += [f"Graded by {grader}: {', '.join(tasks)}." for grader, tasks in by_grader.items()]
    return found


def credits_of(report: Report) -> list[str]:
    """Where the published lines come from, and how they differ from measured ones."""
    cited = {(anchor.citation, anchor.note): None for anchor in report.anchors}
    return [f"Published lines are from {who}. {note}".strip() for who, note in cited]


def _graders(report: Report, task: str) -> str:
    names = {name for row in report.results if row.task == task for name in row.graders}
    return " and ".join(sorted(names))


def report_plots(report: Report) -> list[Plot]:
    """The plots of a report, by task."""
    rows, series = report.results, report.series
    unit = report.unit
    plots = [
        average_plot(group, report.averages, report.anchors, series=series, unit=unit)
        for group in report.groups
    ]
    for task in report.tasks:
        plots += [
            accuracy_plot(task, rows, report.anchors, series=series, unit=unit),
            depth_plot(task, report.depths, unit=unit),
            cost_plot(task, rows, series=series),
        ]
    return [plot for plot in plots if plot is not None]


# --- writing --------------------------------------------------------------------------------------


def write_report(
    report: Report, folder: Path, *, title: str = "Evaluation", with_paper: bool = False
) -> list[Path]:
    """Write the page, Markdown, CSV and plots; the files, the page first.

    `with_paper` adds the paper's figures; `report.anchors` holds its lines.
    """
    check_library()
    plots = report_plots(report)
    if with_paper:
        figures = paper_figures(
            report.results, report.averages, report.anchors, series=report.series, unit=report.unit
        )
        plots = [*figures, *plots]
    tables, beside = report_sheets(report), published_sheets(report)
    remarks = [*notes(report), *credits_of(report)]
    contents: dict[str, bytes] = {
        "report.html": page(title, remarks, tables, beside, plots).encode(),
        "report.md": markdown_report(title, remarks, [*tables, *beside], plots).encode(),
    }
    csv_sheets = [*tables, *([sheets.published_sheet(report.anchors)] if report.anchors else [])]
    contents |= {f"{sheet.name}.csv": sheets.csv_text(sheet).encode() for sheet in csv_sheets}
    for plot in plots:
        contents[f"plots/{plot.name}.svg"] = plot.svg
        contents[f"plots/{plot.name}.png"] = plot.png
    return _written(folder, contents)


def markdown_report(
    title: str, remarks: Sequence[str], tables: Sequence[Sheet], plots: Sequence[Plot]
) -> str:
    """The report as Markdown, with the plots by name."""
    points = "\n".join(f"- {sheets.inline(line)}" for line in remarks)
    parts = [f"# {title}\n\n{points}\n", *(sheets.markdown(sheet) for sheet in tables)]
    parts += [f"![{_bare(plot.title)}](plots/{plot.name}.png)\n" for plot in plots]
    return "\n".join(parts)


def _bare(title: str) -> str:
    """A title inside the brackets of an image, which its own would end."""
    return sheets.inline(title).replace("[", "&#91;").replace("]", "&#93;")


def _written(folder: Path, contents: dict[str, bytes]) -> list[Path]:
    try:
        (folder / "plots").mkdir(parents=True, exist_ok=True)
        for name, data in contents.items():
            (folder / name).write_bytes(data)
    except OSError as error:
        raise ConfigError(f"cannot write the report to {folder}: {reason_of(error)}") from None
    return [folder / name for name in contents]

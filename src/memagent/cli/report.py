"""`memagent report`: tables, a page and plots of evaluations."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.table import Table as TerminalTable
from rich.text import Text

from memagent.cli.shared.console import TerminalConsole, escaped_for, print_json, print_rendered
from memagent.eval.report.anchors import read_anchors
from memagent.eval.report.report import (
    Report,
    credits_of,
    load_report,
    notes,
    published_tables,
    report_tables,
    write_report,
)
from memagent.eval.report.tables import Table, published_table
from memagent.rewards.verifiers import GRADERS

FILE_WIDTH = 200
"""Columns of output that goes to a file or another program, where lines need not fit a screen."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder for report.html, report.md, CSV files and plots. By default tables are only printed.",
)
@click.option(
    "--anchors",
    default="paper",
    show_default=True,
    help="Published lines to show too: paper, none, or a JSON file.",
)
@click.option(
    "--grader",
    type=click.Choice(tuple(GRADERS)),
    help="Report the scores of this grader: one that graded beside the runs' own, or later.",
)
@click.option("--title", default="Evaluation", show_default=True, help="Heading of the report.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def command(
    runs: tuple[str, ...],
    out: Path | None,
    anchors: str,
    grader: str | None,
    title: str,
    as_json: bool,
) -> None:
    """Report evaluations: scores with intervals, failures, cost, comparisons, published results.

    Each RUN is the directory of an evaluation, or LABEL=DIRECTORY to give it a name.

    \b
      memagent report runs/reader runs/direct
      memagent report runs/* --out report
      memagent report small=runs/a large=runs/b --out report
    """
    published = () if anchors == "none" else read_anchors(anchors)
    report = load_report(runs, anchors=published, grader=grader)
    written = write_report(report, out, title=title) if out else []
    if as_json:
        _print_json(report)
    else:
        _print_tables(report)
    if written:
        print(escaped_for(sys.stderr, f"report: {written[0]}"), file=sys.stderr)


def _print_tables(report: Report) -> None:
    console = TerminalConsole(highlight=False, markup=False)
    if not console.is_terminal:
        console = TerminalConsole(highlight=False, markup=False, width=FILE_WIDTH)
    with console.capture() as printed:  # rich would end the process where a pipe is closed
        for table in [*report_tables(report), *published_tables(report)]:
            console.print(_shown(table))
        for note in [*notes(report), *credits_of(report)]:
            console.print(Text(note, style="yellow" if note.startswith("UNFINISHED") else "dim"))
    print_rendered(printed.get())


def _shown(table: Table) -> TerminalTable:
    shown = TerminalTable(title=Text(table.name, style="bold"), title_justify="left", box=None)
    for column in table.shown:
        shown.add_column(
            column.title or "",
            justify="right" if column.is_number else "left",
            no_wrap=column.is_number,
            overflow="fold",
        )
    for line in table.lines():
        shown.add_row(*(Text(cell) for cell in line))
    return shown


def _print_json(report: Report) -> None:
    """Every table by name, each row by column, numbers in full."""
    found = report_tables(report)
    if report.anchors:
        found.append(published_table(report.anchors))
    tables = {table.name: table.records() for table in found}
    print_json({"notes": [*notes(report), *credits_of(report)], "unit": report.unit, **tables})

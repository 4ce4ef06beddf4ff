"""`memagent eval regrade`: grade the answers of a run again."""

from __future__ import annotations

from pathlib import Path

import click

from memagent.cli.eval.output import print_results
from memagent.eval.records import regrade
from memagent.rewards.verifiers import GRADERS


@click.command("regrade", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--grader",
    "graders",
    multiple=True,
    required=True,
    type=click.Choice(tuple(GRADERS)),
    help="Grader to grade by; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def command(run: Path, graders: tuple[str, ...], as_json: bool) -> None:
    """Grade the answers of the evaluation in RUN by other graders. No question is asked again.

    \b
      memagent eval regrade runs/first --grader f1 --grader exact
      memagent report runs/first --grader f1

    The scores are kept in RUN, beside those of its own grader, and shown as further columns. Failed
    items count as wrong for every grader.
    """
    print_results(regrade(run, graders), as_json=as_json)

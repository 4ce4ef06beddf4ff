"""`memagent doctor`: what works on this machine, and what to run for what does not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter

import click

from memagent.cli.shared.run_command import print_json
from memagent.doctor.examination import Finding, examine, findings
from memagent.errors import plain

SIGNS = {"ok": "ok", "missing": "--", "broken": "!!", "note": "  "}
MAX_CHARS = 300
MIN_WIDTH = 13
"""Of names, so that most areas are aligned."""


@click.command("doctor", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option(
    "--connect",
    "connects",
    is_flag=True,
    help="Ask the endpoints of the environment and of your profiles which models they serve; sends no text.",
)
def command(as_json: bool, connects: bool) -> int:
    """Look at this machine: what is installed, which engines and devices work, which models and
    profiles there are, what is missing and the command that adds it.

    Something that is there and does not work gives exit code 1.
    """
    if as_json:
        found = examine(connects=connects)
        print_json([asdict(finding) for finding in found])
    else:
        found = _print(findings(connects=connects))
    return int(any(finding.state == "broken" for finding in found))


def _print(found: Iterable[Finding]) -> list[Finding]:
    """Each area as soon as it was looked at; all findings."""
    shown: list[Finding] = []
    for area, group in groupby(found, key=attrgetter("area")):
        in_area = list(group)
        click.echo(f"{chr(10) if shown else ''}{area}")
        width = max(MIN_WIDTH, *(len(finding.name) for finding in in_area))
        for finding in in_area:
            _print_finding(finding, width)
        shown += in_area
    return shown


def _print_finding(finding: Finding, width: int) -> None:
    line = f"  {SIGNS[finding.state]}  {plain(finding.name):<{width}}  {plain(finding.detail, MAX_CHARS)}"
    click.echo(line.rstrip())
    if finding.remedy:
        click.echo(f"      {'':<{width}}  add it: {finding.remedy}")

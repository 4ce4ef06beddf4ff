"""`memagent doctor`: what works on this machine, and what to run for what does not."""

from __future__ import annotations

from dataclasses import asdict

import click

from memagent.cli.shared.run_command import print_json
from memagent.doctor.examination import Finding, examine
from memagent.foreign import plain

SIGNS = {"ok": "ok", "missing": "--", "broken": "!!", "note": "  "}
MAX_CHARS = 300


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
    findings = examine(connects=connects)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        _print(findings)
    return int(any(finding.state == "broken" for finding in findings))


def _print(findings: list[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    area = ""
    for finding in findings:
        if finding.area != area:
            area = finding.area
            click.echo(f"{'' if finding is findings[0] else chr(10)}{area}")
        line = f"  {SIGNS[finding.state]}  {plain(finding.name):<{width}}  {plain(finding.detail, MAX_CHARS)}"
        click.echo(line.rstrip())
        if finding.remedy:
            click.echo(f"      {'':<{width}}  add it: {finding.remedy}")

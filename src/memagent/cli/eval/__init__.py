"""`memagent eval`: score methods on questions. Without a name, `run`.

Not here: opening and running an evaluation (`eval/setup.py`, `eval/runner.py`).
"""

from __future__ import annotations

import click

from memagent.cli.shared.lazy import LazyGroup

COMMANDS: dict[str, str] = {
    "run": "Ask questions and score the answers; `memagent eval SUITE` is the same.",
    "regrade": "Grade the answers of a run again, by other graders, without asking again.",
}
"""Name to one-line help; `NAME` lives in `memagent.cli.eval.NAME` as `command`, or where `places` says."""


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    prefix="memagent.cli.eval.",
    default="run",
    places={"regrade": "run:regrade_run"},
    context_settings={"help_option_names": ["-h", "--help"]},
)
def command() -> None:
    """Score methods on questions."""

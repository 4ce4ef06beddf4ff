"""`memagent serve`: serve a model. Each command is in `memagent.cli.serve.NAME`; without a name, `run`.

Not here: the servers themselves (`serve`).
"""

from __future__ import annotations

import click

from memagent.cli.shared.lazy import LazyGroup

COMMANDS: dict[str, str] = {
    "run": "Serve a model; `memagent serve --engine ENGINE` is the same.",
    "keys": "Add, list and remove keys of the reading gateway.",
}
"""Name to one-line help; `NAME` lives in `memagent.cli.serve.NAME` as `command`."""


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    prefix="memagent.cli.serve.",
    default="run",
    context_settings={"help_option_names": ["-h", "--help"]},
)
def command() -> None:
    """Serve a model over HTTP with OpenAI's API."""

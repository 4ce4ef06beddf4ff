"""`memagent data`: build, inspect, filter and convert datasets.

Not here: the functions behind the commands (`data`, and `rl/warmstart/trace_files.py` for traces).
"""

from __future__ import annotations

import click

from memagent.cli.shared.lazy import LazyGroup

COMMANDS: dict[str, str] = {
    "build": "Build datasets from a recipe, or from one task.",
    "filter": "Drop questions that a model answers without the text.",
    "traces": "Write warm-start traces by rule from examples with evidence.",
    "inspect": "Show examples and statistics of a dataset.",
    "convert": "Convert datasets to other formats.",
    "sources": "List, fetch and check the files that datasets are built from.",
}
"""Name to one-line help; `NAME` lives in `memagent.cli.data.NAME` as `command`, or where `places` says."""


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    prefix="memagent.cli.data.",
    places={"convert": "inspect:convert"},
    context_settings={"help_option_names": ["-h", "--help"]},
)
def command() -> None:
    """Datasets: questions over texts of any length, with known answers and known evidence."""

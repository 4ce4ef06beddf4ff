"""`memagent train`: train a model. Without a name, `run`.

Not here: opening and running a training (`rl/trainer.py`).
"""

from __future__ import annotations

import click

from memagent.cli.shared.lazy import LazyGroup

COMMANDS: dict[str, str] = {
    "run": "Train by reinforcement learning; `memagent train CONFIG` is the same.",
    "sft": "Train on given replies only: the warm start of a config.",
    "export": "Write the model or adapter of a run as a folder that other tools load.",
}
"""Name to one-line help; where each lives says `places`."""


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    prefix="memagent.cli.train.",
    default="run",
    places={"sft": "run:sft", "export": "run:export_run"},
    context_settings={"help_option_names": ["-h", "--help"]},
)
def command() -> None:
    """Train a model for an agent."""

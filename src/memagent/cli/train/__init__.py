"""`memagent train`: train a model. Without a name, `run`.

Not here: opening and running a training (`rl/trainer.py`).
"""

from __future__ import annotations

from memagent.cli.shared.lazy import LazyGroup

command = LazyGroup(
    __name__,
    "Train a model for an agent.",
    {
        "run": "Train by reinforcement learning; `memagent train CONFIG` is the same.",
        "sft": "Train on given replies only: the warm start of a config.",
        "export": "Write the model or adapter of a run as a folder that other tools load.",
    },
    default="run",
    places={"sft": "run:sft", "export": "run:export_run"},
)

"""`memagent data`: build, inspect, filter and convert datasets.

Not here: the functions behind the commands (`data`, and `rl/warmstart/trace_files.py` for traces).
"""

from __future__ import annotations

from memagent.cli.shared.lazy import LazyGroup

command = LazyGroup(
    __name__,
    "Datasets: questions over texts of any length, with known answers and known evidence.",
    {
        "build": "Build datasets from a recipe, or from one task.",
        "filter": "Drop questions that a model answers without the text.",
        "traces": "Write warm-start traces by rule from examples with evidence.",
        "inspect": "Show examples and statistics of a dataset.",
        "convert": "Convert datasets to other formats.",
        "sources": "List, fetch and check the files that datasets are built from.",
    },
    places={"convert": "inspect:convert"},
)

"""`memagent serve`: serve a model. Each command is in `memagent.cli.serve.NAME`; without a name, `run`.

Not here: the servers themselves (`serve`).
"""

from __future__ import annotations

from memagent.cli.shared.lazy import LazyGroup

command = LazyGroup(
    __name__,
    "Serve a model over HTTP with OpenAI's API.",
    {
        "run": "Serve a model; `memagent serve --engine ENGINE` is the same.",
        "keys": "Add, list and remove keys of the reading gateway.",
    },
    default="run",
)

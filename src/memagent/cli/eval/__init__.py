"""`memagent eval`: score methods on questions. Without a name, `run`.

Not here: opening and running an evaluation (`eval/setup.py`, `eval/runner.py`).
"""

from __future__ import annotations

from memagent.cli.shared.lazy import LazyGroup

command = LazyGroup(
    __name__,
    "Score methods on questions.",
    {
        "run": "Ask questions and score the answers; `memagent eval SUITE` is the same.",
        "regrade": "Grade the answers of a run again, by other graders, without asking again.",
    },
    default="run",
    places={"regrade": "run:regrade_run"},
)

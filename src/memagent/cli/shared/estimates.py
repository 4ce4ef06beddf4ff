"""Cost and time before the first call, as commands print them with --dry-run."""

from __future__ import annotations

from typing import Any

from memagent.agent.work import Work
from memagent.cli.shared.progress import duration
from memagent.types import Prices


def time_text(seconds: float | None, model: str) -> str:
    """The estimate, and what it rests on."""
    if seconds is None:
        return f"not known: no run has measured {model} yet; a first one, such as with --max-calls 3, does"
    about = "less than 1 s" if seconds < 1 else f"about {duration(seconds)}"
    return f"{about} (as the last run with {model} took)"


def cost_and_time(work: Work, prices: Prices | None, seconds: float | None) -> dict[str, Any]:
    """The same as JSON; what is not known is left out."""
    values: dict[str, Any] = {}
    if prices is not None:
        values["min_cost"], values["max_cost"] = work.cost(prices)
    if seconds is not None:
        values["seconds"] = seconds
    return values

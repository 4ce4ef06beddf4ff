"""Cost and time before the first call, as commands print them with --dry-run."""

from __future__ import annotations

from typing import Any, Protocol

from memagent.agent.rates import CallRate, TimeEstimate
from memagent.cli.shared.progress import duration
from memagent.types import Prices

CLOSE = 1.2
"""Estimates that differ by less than this factor are one."""


class Costed(Protocol):
    """What has a cost."""

    def cost(self, prices: Prices) -> tuple[float, float]:
        """The lowest and the highest cost."""
        ...


def time_text(seconds: TimeEstimate | None, rate: CallRate | None, model: str) -> str:
    """The estimate, and what it rests on."""
    if seconds is None or rate is None:
        return f"not known: no run has measured {model} yet; a first one, such as with --max-calls 3, does"
    if rate.reply_share is None:
        how = "measured now with two short calls"
    else:
        how = f"as {rate.num_calls:,} calls of a run took on {rate.measured}"
    if seconds.high < 1:
        return f"less than 1 s ({how})"
    if seconds.high <= CLOSE * seconds.low or round(seconds.high) <= round(seconds.low):
        return f"about {duration(seconds.high)} ({how})"
    return f"between {duration(seconds.low)} and {duration(seconds.high)} ({how})"


def cost_and_time(
    work: Costed, prices: Prices | None, seconds: TimeEstimate | None
) -> dict[str, Any]:
    """The same as JSON; what is not known is left out."""
    values: dict[str, Any] = {}
    if prices is not None:
        values["min_cost"], values["max_cost"] = work.cost(prices)
    if seconds is not None:
        values["min_seconds"], values["max_seconds"] = seconds
    return values

"""Progress of commands: a bar on a terminal, a line every ten seconds elsewhere.

    with ProgressFrame(console) as frame:
        engine.on_retry = frame.retry
        frame.show("12 of 40 items", completed=12, total=40, detail="2 min left")

Everything here goes to standard error; standard output is for results.
"""

from __future__ import annotations

import math
import re
import threading
import time
from typing import Any, NamedTuple, Self

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from memagent.agent.work import Work
from memagent.cli.shared.console import CommandConsole
from memagent.engines.limit import Failure
from memagent.engines.store import PullState
from memagent.types import Prices

SECONDS_BETWEEN_LINES = 10.0
SECONDS_BETWEEN_RETRIES = 60.0
"""A failure that repeats is reported again after so long."""
SECONDS_TO_FIRST_LINE = 0.5
BAR_WIDTH = 24

_number = re.compile(r"\d+(?:\.\d+)?(?= s\b)")


class _RetryLine(NamedTuple):
    """When a failure was reported, and how often it occurred since."""

    seconds: float
    num_unreported: int


class ProgressFrame:
    """Shows how far a command has come, with notes about calls that are repeated."""

    def __init__(self, console: CommandConsole, *, is_transient: bool = False) -> None:
        """With `is_transient` the bar disappears at the end."""
        self.console = console
        self._started = self._last_line = time.monotonic()
        self._last_retry: dict[str, _RetryLine] = {}
        """The last line about each reason, seconds in it aside."""
        self._latest = ""
        self._has_printed = False
        self._timer: threading.Timer | None = None
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=BAR_WIDTH),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[detail]}", style="dim", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", style="yellow", markup=False),
            console=console.rich,
            transient=is_transient,
            disable=console.is_quiet or not console.rich.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, visible=False, detail="", note="")

    def __enter__(self) -> Self:
        self._bar.start()
        if not self.console.rich.is_terminal and not self.console.is_quiet:
            self._timer = threading.Timer(SECONDS_TO_FIRST_LINE, self._print_first)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._bar.stop()

    def _print_first(self) -> None:
        """A line before the first ten seconds are over, though nothing may be finished by then."""
        if self._latest and not self._has_printed:
            self.print(self._latest)

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.monotonic() - self._started

    def show(
        self, headline: str, *, completed: float, total: float | None, detail: str = ""
    ) -> None:
        """Update the bar; elsewhere print a line if the last one is ten seconds old."""
        self._bar.update(
            self._task,
            description=headline,
            completed=completed,
            total=total,
            visible=True,
            detail=detail,
            note="",
        )
        if self.console.rich.is_terminal:
            return
        self._latest = f"{headline}, {detail}" if detail else headline
        if time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self._has_printed = True
            self.print(self._latest)

    def hide(self) -> None:
        """Take the bar away until the next `show`."""
        self._bar.update(self._task, visible=False)

    def retry(self, failure: Failure, delay: float) -> None:
        """Note that a call failed and is repeated; fits `on_retry` of engines."""
        note = f"{failure.reason}; retry in {delay:.0f} s"
        self._bar.update(self._task, note=note)
        if not self.console.rich.is_terminal and delay >= 1:
            self._report_retry(failure.reason, note)

    def _report_retry(self, reason: str, note: str) -> None:
        """One line for a failure, however many calls and attempts it concerns, until it is old."""
        key = _number.sub("0", reason)
        now, last = time.monotonic(), self._last_retry.get(key)
        if last is not None and now - last.seconds < SECONDS_BETWEEN_RETRIES:
            self._last_retry[key] = last._replace(num_unreported=last.num_unreported + 1)
            return
        self._last_retry[key] = _RetryLine(now, num_unreported=0)
        more = f" {last.num_unreported + 1} more times" if last and last.num_unreported else ""
        self.print(f"the endpoint failed{more} ({note})")

    def print(self, text: str) -> None:
        """A line above the bar; nothing with --quiet."""
        if not self.console.is_quiet:
            self.console.print(text)


class PullProgress:
    """Progress of a download: a bar on a terminal, one line elsewhere, with the size first."""

    def __init__(self, name: str, console: CommandConsole) -> None:
        self._name = name
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=BAR_WIDTH),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console.rich,
            transient=True,
            disable=console.is_quiet or not console.rich.is_terminal,
        )
        self._task = self._bar.add_task(name, total=None)
        self._has_begun = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._has_begun:
            self._bar.stop()

    def __call__(self, state: PullState) -> None:
        """Take in how far the download has come."""
        if not self._has_begun:
            self._has_begun = True
            if not self._console.is_quiet:
                size, here = size_text(state.total_bytes), size_text(state.num_bytes)
                kept = f" ({here} are here)" if state.num_bytes else ""
                self._console.print(f"pulling {self._name}: {size} from {state.source}{kept}")
            self._bar.start()
        self._bar.update(self._task, completed=state.num_bytes, total=state.total_bytes)


def size_text(num_bytes: int) -> str:
    """Bytes for people: 51 kB, 98 MB, 1,234 MB."""
    if num_bytes < 1e6:
        return f"{math.ceil(num_bytes / 1e3)} kB"
    return f"{num_bytes / 1e6:,.0f} MB"


def duration(seconds: float) -> str:
    """Seconds for people: 42 s, 3 min 20 s, 2 h 5 min."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


# --- cost and time before the first call ----------------------------------------------------------


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

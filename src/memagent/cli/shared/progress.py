"""What the user sees while a text is read: a bar on a terminal, now and then a line elsewhere.

Everything here goes to standard error; standard output is for answers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from difflib import ndiff
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from memagent.agent.trace import Step
from memagent.documents.chunking import Chunks

SECONDS_BETWEEN_LINES = 10.0
CHANGE_STYLES = {"+ ": "green", "- ": "red"}


class ReadingProgress:
    """Shows how far a reading has come: section i of n, tokens per second, time left."""

    def __init__(
        self,
        chunks: Chunks,
        finished: Sequence[int],
        *,
        console: Console,
        is_quiet: bool,
        show_memory: bool,
    ) -> None:
        self._chunks = chunks
        self._num_finished = list(finished)
        """Steps done, by question."""
        self._memories = [""] * len(finished)
        self._console = console
        self._is_quiet = is_quiet
        self._show_memory = show_memory
        self._started = time.monotonic()
        self._last_line = self._started
        self._num_tokens = 0
        self._num_new_steps = 0
        self._note = ""
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("[dim]{task.fields[rate]}[/dim]"),
            TimeElapsedColumn(),
            TextColumn("[yellow]{task.fields[note]}[/yellow]"),
            console=console,
            disable=is_quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task(self._headline(), total=None, rate="", note="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def step(self, question_number: int, step: Step) -> None:
        """Take in a new step."""
        self._num_finished[question_number] += 1
        self._num_new_steps += 1
        self._num_tokens += step.usage.prompt_tokens + step.usage.completion_tokens
        self._note = ""
        if self._show_memory and step.kind == "read":
            self._print_memory(question_number, step)
        self._refresh()

    def retry(self, reason: str, delay: float) -> None:
        """Tell that a call failed and will be tried again."""
        self._note = f"{reason}; again in {delay:.0f} s"
        if self._console.is_terminal:
            self._refresh()
        elif not self._is_quiet and delay >= 1:
            self._print(f"the endpoint failed ({self._note})")

    def _refresh(self) -> None:
        if self._console.is_terminal:
            self._bar.update(
                self._task,
                description=self._headline(),
                completed=sum(self._num_finished),
                total=self._total_steps()[0],
                rate=self._rate(),
                note=escape(self._note),
            )
        elif not self._is_quiet and time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self._print(f"{self._headline()}, {self._rate()}")

    def _headline(self) -> str:
        total, is_exact = self._chunks.estimated_total()
        about = "" if is_exact else "about "
        if len(self._num_finished) == 1:
            done = self._num_finished[0]
            return (
                "answering"
                if done >= total and is_exact
                else f"section {done + 1} of {about}{total}"
            )
        sections = sum(min(count, total) for count in self._num_finished)
        return f"{sections} of {about}{total * len(self._num_finished)} sections"

    def _total_steps(self) -> tuple[int, bool]:
        total, is_exact = self._chunks.estimated_total()
        return (total + 1) * len(self._num_finished), is_exact

    def _rate(self) -> str:
        elapsed = time.monotonic() - self._started
        if not self._num_new_steps or elapsed <= 0:
            return ""
        left = self._total_steps()[0] - sum(self._num_finished)
        seconds_left = left * elapsed / self._num_new_steps
        return f"{self._num_tokens / elapsed:,.0f} tokens/s, {duration(seconds_left)} left"

    def _print_memory(self, question_number: int, step: Step) -> None:
        """The lines of the memory that are new, and those that are gone."""
        before, self._memories[question_number] = self._memories[question_number], step.memory
        places = ", ".join(str(place) for place in step.section.places) if step.section else ""
        number = f"question {question_number + 1}, " if len(self._num_finished) > 1 else ""
        changes = [
            line
            for line in ndiff(before.splitlines(), step.memory.splitlines())
            if line[:2] in CHANGE_STYLES
        ]
        told = "memory after" if changes else "memory unchanged by"
        self._print(f"[bold]{number}{told} section {step.index + 1}[/bold] ({escape(places)})")
        for line in changes:
            self._print(f"[{CHANGE_STYLES[line[:2]]}]{escape(line)}[/]")

    def _print(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, soft_wrap=True)


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

"""What the user sees while a text is read: how far it is, and the memory as it changes."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import ndiff

from memagent.agent.rates import CallTimes
from memagent.agent.trace import Step
from memagent.cli.shared.progress import ProgressFrame, duration
from memagent.cli.shared.run_command import CommandConsole
from memagent.config import AgentConfig
from memagent.documents.chunking import Chunks

CHANGE_STYLES = {"+ ": "green", "- ": "red"}


class ReadingProgress(ProgressFrame):
    """Shows section i of n, tokens per second and the time left."""

    def __init__(
        self,
        chunks: Chunks,
        finished: Sequence[int],
        *,
        console: CommandConsole,
        show_memory: bool,
        config: AgentConfig,
    ) -> None:
        """`finished` holds the steps that were done before, by question."""
        super().__init__(console)
        self.times = CallTimes()
        """How long the calls took."""
        self._limits = {"read": config.memory_tokens, "answer": config.answer_tokens}
        self._reasoning = config.reasoning_tokens
        self._chunks = chunks
        self._num_finished = list(finished)
        self._memories = [""] * len(finished)
        self._show_memory = show_memory
        self._num_tokens = 0
        self._num_new_steps = 0
        self._refresh()

    def on_step(self, question_number: int, step: Step) -> None:
        """Take in a new step."""
        self._num_finished[question_number] += 1
        self._num_new_steps += 1
        self.times.add(
            prompt_tokens=step.usage.prompt_tokens,
            completion_tokens=step.usage.completion_tokens,
            limit=self._limits.get(step.kind, 0) + self._reasoning,
            seconds=step.seconds,
        )
        self._num_tokens += step.usage.prompt_tokens + step.usage.completion_tokens
        if self._show_memory and step.kind == "read":
            self._print_memory(question_number, step)
        self._refresh()

    def _refresh(self) -> None:
        self.show(
            self._headline(),
            completed=sum(self._num_finished),
            total=self._total_steps() if self._num_new_steps else None,
            detail=self._rate(),
        )

    def _headline(self) -> str:
        total, is_exact = self._chunks.estimated_total()
        about = "" if is_exact else "about "
        if len(self._num_finished) > 1:
            sections = sum(min(count, total) for count in self._num_finished)
            return f"{sections} of {about}{total * len(self._num_finished)} sections"
        done = self._num_finished[0]
        if done >= total and is_exact:
            return "answering"
        return f"section {done + 1} of {about}{total}"

    def _total_steps(self) -> int:
        return (self._chunks.estimated_total()[0] + 1) * len(self._num_finished)

    def _rate(self) -> str:
        if not self._num_new_steps or self.seconds <= 0:
            return ""
        left = self._total_steps() - sum(self._num_finished)
        total = self._chunks.estimated_total()[0] + 1
        num_others = sum(count < total for count in self._num_finished) - 1
        num_done = self._num_new_steps + max(0, num_others) / 2  # calls in flight are half done
        seconds_left = left * self.seconds / num_done
        return f"{self._num_tokens / self.seconds:,.0f} tokens/s, {duration(seconds_left)} left"

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
        change = "memory after" if changes else "memory unchanged by"
        self.console.print(f"{number}{change} section {step.index + 1} ({places})", style="bold")
        for line in changes:
            self.console.print(line, style=CHANGE_STYLES[line[:2]])

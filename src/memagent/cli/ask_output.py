"""What `memagent ask` prints: answers and plans on standard output, everything else on the side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from difflib import ndiff
from typing import Any

from memagent.agent.evidence.ledger import Citation
from memagent.agent.trace import Step, Trace
from memagent.agent.work import ReadingPlan, Speed
from memagent.cli.shared.console import CommandConsole, print_json
from memagent.cli.shared.progress import ProgressFrame, cost_and_time, duration, time_text
from memagent.config import AgentConfig
from memagent.documents.chunking import Chunks
from memagent.engines.base import BaseEngine
from memagent.types import Prices


def print_answers(traces: Sequence[Trace], *, as_json: bool) -> None:
    """The answers; with their questions if there are several."""
    if as_json:
        results = [_result(trace) for trace in traces]
        print_json(results[0] if len(results) == 1 else results)
    elif len(traces) == 1:
        print(answer_text(traces[0]))
    else:
        print("\n\n".join(f"{trace.question}\n{answer_text(trace)}" for trace in traces))


def answer_text(trace: Trace) -> str:
    """The answer, and below it the quotes that it cites."""
    lines = [one.line() for one in trace.citations]
    return "\n".join([f"{trace.final_answer}", *(["", *lines] if lines else [])])


def print_plan(
    plan: ReadingPlan,
    prices: Prices | None,
    speed: Speed | None,
    engine: BaseEngine,
    *,
    as_json: bool,
) -> None:
    """What a reading will take."""
    seconds = (
        plan.seconds(speed, lanes=None if engine.runs_here else plan.calls_at_once)
        if speed
        else None
    )
    if as_json:
        print_json({**asdict(plan), **cost_and_time(plan, prices, seconds)})
        return
    about = "" if plan.is_exact else " (estimated)"
    print(f"sections            {plan.num_chunks:>14,}")
    up_to = f" to {plan.max_calls:,}" if plan.max_calls > plan.num_calls else ""
    print(f"calls               {plan.num_calls:>14,}{up_to}")
    print(f"prompt tokens       {plan.prompt_tokens:>14,}{about}")
    print(f"  with memory up to {plan.prompt_tokens + plan.max_memory_tokens:>14,}{about}")
    print(f"completion up to    {plan.max_completion_tokens:>14,}")
    if prices:
        low, high = plan.cost(prices)
        print(f"cost between        {low:>14,.4f} and {high:,.4f}")
    print(f"time                {time_text(seconds, engine.model)}")


def _result(trace: Trace) -> dict[str, Any]:
    return {
        "answer": trace.final_answer,
        "question": trace.question,
        **({"citations": [_citation(one) for one in trace.citations]} if trace.has_quotes else {}),
        **({"unread": trace.unread} if trace.unread else {}),
        **({"num_withheld": trace.num_withheld} if trace.num_withheld else {}),
        "num_chunks": trace.num_chunks,
        "usage": asdict(trace.usage),
        "trace": trace.to_dict(),
    }


def _citation(citation: Citation) -> dict[str, Any]:
    quote = citation.quote
    return {
        "number": citation.number,
        "where": citation.where,
        "text": quote.text,
        "start": quote.start,
        "end": quote.end,
        **({"item": quote.item, "value": quote.value} if quote.item else {}),
        "places": [asdict(place) for place in quote.places],
    }


# --- progress of a reading ------------------------------------------------------------------------


CHANGE_STYLES = {"+ ": "green", "- ": "red"}


class ReadingProgress(ProgressFrame):
    """Shows section i of n, tokens per second and the time left."""

    def __init__(
        self,
        chunks: Chunks,
        num_questions: int,
        *,
        console: CommandConsole,
        show_memory: bool,
        config: AgentConfig,
    ) -> None:
        super().__init__(console)
        self.prompt_tokens = 0
        """Prompt tokens of the new calls."""
        self.call_seconds = 0.0
        """The new calls, one after the other."""
        self._is_apart = config.merges
        self._rounds = config.rounds if config.mode == "parallel" else 1
        self._chunks = chunks
        self._num_finished = [0] * num_questions
        self._passes = [Passes() for _ in range(num_questions)]
        self._memories = [""] * num_questions
        self._show_memory = show_memory
        self._num_tokens = 0
        self._num_new_steps = 0
        self._refresh()

    def on_step(self, question_number: int, step: Step) -> None:
        """Take in a step."""
        self._num_finished[question_number] += 1
        self._passes[question_number].add(step)
        if not step.is_known:
            self._num_new_steps += 1
            self.prompt_tokens += step.usage.prompt_tokens
            self.call_seconds += step.seconds
            self._num_tokens += step.usage.prompt_tokens + step.usage.completion_tokens
        if self._show_memory and step.kind != "answer" and "nothing" not in step.flags:
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
        if self._is_apart:
            return self._apart_headline(total, about)
        if len(self._num_finished) > 1:
            sections = sum(min(count, total) for count in self._num_finished)
            return f"{sections} of {about}{total * len(self._num_finished)} sections"
        done = self._num_finished[0]
        if done >= total and is_exact:
            return "answering"
        return f"section {done + 1} of {about}{total}"

    def _apart_headline(self, total: int, about: str) -> str:
        """How far the furthest round is."""
        number = max(passes.round for passes in self._passes)
        those = [passes for passes in self._passes if passes.round == number]
        num_read = sum(passes.num_read for passes in those)
        wanted = total * len(those)
        if num_read >= wanted:
            return "merging and answering"
        before = f"round {number} of up to {self._rounds}: " if self._rounds > 1 else ""
        return f"{before}{num_read} of {about}{wanted} sections"

    def _total_steps(self) -> int:
        total = self._chunks.estimated_total()[0]
        return sum(passes.round * total + passes.num_merges + 1 for passes in self._passes)

    def _rate(self) -> str:
        if not self._num_new_steps or self.seconds <= 0:
            return ""
        left = self._total_steps() - sum(self._num_finished)
        total = self._chunks.estimated_total()[0] + 1
        num_others = 0 if self._is_apart else sum(n < total for n in self._num_finished) - 1
        num_done = self._num_new_steps + max(0, num_others) / 2  # calls in flight are half done
        seconds_left = left * self.seconds / num_done
        return f"{self._num_tokens / self.seconds:,.0f} tokens/s, {duration(seconds_left)} left"

    def _print_memory(self, question_number: int, step: Step) -> None:
        """The lines of the memory that are new, and those that are gone."""
        before, self._memories[question_number] = self._memories[question_number], step.memory
        places = f" ({', '.join(map(str, step.section.places))})" if step.section else ""
        number = f"question {question_number + 1}, " if len(self._num_finished) > 1 else ""
        changes = [
            line
            for line in ndiff(before.splitlines(), step.memory.splitlines())
            if line[:2] in CHANGE_STYLES
        ]
        title = _title(step, self._chunks, is_changed=bool(changes))
        self.console.print(f"{number}{title}{places}", style="bold")
        for line in changes:
            self.console.print(line, style=CHANGE_STYLES[line[:2]])


class Passes:
    """How often one question has gone through the sections, and how far it is."""

    def __init__(self) -> None:
        self.round = 1
        self.num_read = 0
        """Sections of the current round."""
        self.num_merges = 0

    def add(self, step: Step) -> None:
        """Count a step."""
        self.num_merges += step.kind == "merge"
        if step.kind == "read":
            self.num_read = 1 if (step.round or 1) > self.round else self.num_read + 1
            self.round = max(self.round, step.round or 1)


def _title(step: Step, chunks: Chunks, *, is_changed: bool) -> str:
    """What a memory that is shown belongs to."""
    if step.section is None:
        return f"memory after merging {len(step.inputs)} notes"
    section = f"section {chunks.number_at(step.section.start) + 1}"
    if step.round is not None:
        return f"note on {section}"
    return f"{'memory after' if is_changed else 'memory unchanged by'} {section}"

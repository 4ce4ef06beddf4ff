"""The report on a filtered dataset: what was dropped, by which rule and engine, and what it cost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from pathlib import Path

from memagent.data.filtering.screening import (
    BareQuestion,
    FilterSettings,
    OnFailure,
    ReplyLog,
    Verdict,
)
from memagent.data.formats.files import disk_errors
from memagent.files import write_atomically
from memagent.types import Prices, Usage

SHOWN_FAILURES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What one engine knew, and what it was sent."""

    model: str
    num_dropped: int
    """Questions that it was the first to answer."""
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterReport:
    """What was kept and dropped of a file."""

    num_questions: int
    """Questions in the file."""
    num_screened: int
    """Questions with a verdict; fewer where enough were kept before the end."""
    num_kept: int
    """Examples that were written."""
    num_dropped: int
    """Questions that were answered without their text."""
    num_failed: int
    """Questions whose calls failed and that no reply answered."""
    on_failure: OnFailure
    """Whether the failed ones were kept or dropped."""
    samples: int
    by_rule: dict[str, int]
    """Dropped questions by the rules that the right reply met: boxed, contains, or both."""
    by_engine: tuple[EngineReport, ...]
    by_task: dict[str, dict[str, int]]
    """For each task, how many questions were kept, dropped and failed."""
    failures: dict[str, str] = field(default_factory=dict)
    """For each failed question, by its id, the first reason."""
    cost: float | None = None
    """In the currency of the prices; None without prices."""

    @property
    def usage(self) -> Usage:
        """Usage of all engines, over all resumptions."""
        return reduce(lambda one, other: one + other, (e.usage for e in self.by_engine), Usage())

    def to_json(self) -> str:
        """The report as indented JSON."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    def to_text(self) -> str:
        """The report for people."""
        lines = [
            f"questions   {self.num_questions:>9,}",
            f"screened    {self.num_screened:>9,}",
            f"kept        {self.num_kept:>9,}",
            f"dropped     {self.num_dropped:>9,}",
            *(f"  {rule:<10}{num:>9,}" for rule, num in self.by_rule.items()),
            *(f"  by {engine.model}: {engine.num_dropped:,}" for engine in self.by_engine),
        ]
        if self.num_failed:
            fate = "kept" if self.on_failure == "keep" else "not kept"
            lines.append(f"failed      {self.num_failed:>9,} ({fate})")
            shown = list(self.failures.items())[:SHOWN_FAILURES]
            lines += [f"  {name}: {reason}" for name, reason in shown]
            if len(self.failures) > SHOWN_FAILURES:
                lines.append(f"  and {len(self.failures) - SHOWN_FAILURES:,} more, see the report")
        if len(self.by_task) > 1:
            lines += [
                f"  {task}: kept {counts['kept']:,}, dropped {counts['dropped']:,}, "
                f"failed {counts['failed']:,}"
                for task, counts in self.by_task.items()
            ]
        usage = self.usage
        about = "about " if usage.is_estimated else ""
        cost = f", cost {self.cost:.4f}" if self.cost is not None else ""
        lines.append(
            f"{usage.calls:,} calls, {about}{usage.prompt_tokens:,} prompt and "
            f"{usage.completion_tokens:,} completion tokens{cost}"
        )
        return "\n".join(lines) + "\n"


def report_on(
    questions: Sequence[BareQuestion],
    verdicts: Sequence[Verdict],
    models: Sequence[str],
    settings: FilterSettings,
    log: ReplyLog,
    *,
    prices: Prices | None = None,
) -> FilterReport:
    """Count the verdicts."""
    fates = Counter(verdict.fate for verdict in verdicts)
    by_task: dict[str, dict[str, int]] = {}
    for verdict in verdicts:
        task = questions[verdict.number].task
        by_task.setdefault(task, dict.fromkeys(("kept", "dropped", "failed"), 0))
        by_task[task][verdict.fate] += 1
    dropped = [verdict for verdict in verdicts if verdict.fate == "dropped"]
    usages = [Usage() for _ in models]
    for (_, engine, _), reply in log.replies.items():
        usages[engine] += reply.usage
    by_engine = tuple(
        EngineReport(
            model=model,
            num_dropped=sum(verdict.engine == number for verdict in dropped),
            usage=usages[number],
        )
        for number, model in enumerate(models)
    )
    report = FilterReport(
        num_questions=len(questions),
        num_screened=len(verdicts),
        num_kept=sum(verdict.is_kept(settings.on_failure) for verdict in verdicts),
        num_dropped=fates["dropped"],
        num_failed=fates["failed"],
        on_failure=settings.on_failure,
        samples=settings.samples,
        by_rule=dict(sorted(Counter(" and ".join(verdict.rules) for verdict in dropped).items())),
        by_engine=by_engine,
        by_task=by_task,
        failures={
            questions[verdict.number].id: verdict.failures[0]
            for verdict in verdicts
            if verdict.fate == "failed"
        },
        cost=None if prices is None else _cost(usages, prices),
    )
    return report


def write_report(path: Path, report: FilterReport) -> None:
    """Put the report on disk."""
    with disk_errors(path):
        write_atomically(path, report.to_json().encode(), mode=0o666)


def report_path(out: Path) -> Path:
    """Where the report on a filtered dataset is."""
    return out.with_name(f"{out.name}.filter.json")


def _cost(usages: Iterable[Usage], prices: Prices) -> float:
    return sum(
        prices.cost(prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)
        for usage in usages
    )

"""Progress of an evaluation: items, score, failures, cost, time left."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from memagent.cli.shared.progress import ProgressFrame, duration
from memagent.cli.shared.run_command import CommandConsole
from memagent.eval.records import ItemRecord
from memagent.eval.runner import Evaluation


class EvalProgress:
    """How far an evaluation has come: items, score, failures, cost, time left."""

    def __init__(self, evaluation: Evaluation, console: CommandConsole) -> None:
        plan = evaluation.plan
        self.frame = ProgressFrame(console)
        self._tokens = {(item.task, item.target_tokens): item.num_tokens for item in plan.items}
        self._num_total = evaluation.num_items
        self._work_total = sum(item.num_tokens + 1 for item in plan.items) * (
            evaluation.num_items // max(1, len(plan.items))
        )
        self._work_done = 0
        self._num_done = self._num_failed = 0
        self._score = self._cost = 0.0
        self._has_cost = False
        self._count_all(evaluation.records.values())
        self._work_before = self._work_done
        if self._num_done:
            console.report(f"resuming after {self._num_done:,} of {self._num_total:,} items")

    def __enter__(self) -> Self:
        self.frame.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.frame.__exit__(*exception)

    def record(self, record: ItemRecord) -> None:
        """Count a finished item."""
        self._count_all([record])
        self.frame.show(self._headline(), completed=self._num_done, total=self._num_total)

    def _count_all(self, records: Iterable[ItemRecord]) -> None:
        for record in records:
            self._num_done += 1
            self._num_failed += record.status == "failed"
            self._score += record.score
            self._cost += record.cost or 0.0
            self._has_cost |= record.cost is not None
            self._work_done += self._tokens.get((record.task, record.target_tokens), 0) + 1

    def _headline(self) -> str:
        parts = [f"{self._num_done:,} of {self._num_total:,} items"]
        if self._num_done:
            parts.append(f"score {self._score / self._num_done:.3f}")
        if self._num_failed:
            parts.append(f"{self._num_failed:,} failed")
        if self._has_cost:
            parts.append(f"cost {self._cost:.4f}")
        done = self._work_done - self._work_before
        if done:
            left = self.frame.seconds * (self._work_total - self._work_done) / done
            parts.append(f"{duration(left)} left")
        return ", ".join(parts)

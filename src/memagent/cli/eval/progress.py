"""Progress of an evaluation: items, calls, score, failures, cost, time left."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from memagent.cli.shared.progress import ProgressFrame, duration
from memagent.cli.shared.run_command import CommandConsole
from memagent.eval.calls import CallDone
from memagent.eval.forecast import Remaining
from memagent.eval.records import ItemRecord
from memagent.eval.runner import Evaluation


class EvalProgress:
    """How far an evaluation has come."""

    def __init__(self, evaluation: Evaluation, console: CommandConsole) -> None:
        self.frame = ProgressFrame(console)
        self.remaining = Remaining(evaluation.forecast)
        self._num_total = evaluation.num_items
        self._num_done = self._num_failed = 0
        self._score = self._cost = 0.0
        self._has_cost = False
        for record in evaluation.records.values():
            self.remaining.finish(record)
        self._count_all(evaluation.records.values())
        if self._num_done:
            console.report(f"resuming after {self._num_done:,} of {self._num_total:,} items")

    def __enter__(self) -> Self:
        self.frame.__enter__()
        self._show()
        return self

    def __exit__(self, *exception: object) -> None:
        self.frame.__exit__(*exception)

    def call(self, call: CallDone) -> None:
        """Count an answered call."""
        self.remaining.call(call)
        self._show()

    def record(self, record: ItemRecord) -> None:
        """Count a finished item."""
        self.remaining.finish(record)
        self._count_all([record])
        self._show()

    def _show(self) -> None:
        self.frame.show(self._headline(), completed=self._num_done, total=self._num_total)

    def _count_all(self, records: Iterable[ItemRecord]) -> None:
        for record in records:
            self._num_done += 1
            self._num_failed += record.status == "failed"
            self._score += record.score
            self._cost += record.cost or 0.0
            self._has_cost |= record.cost is not None

    def _headline(self) -> str:
        parts = [f"{self._num_done:,} of {self._num_total:,} items"]
        if self.remaining.num_calls:
            parts.append(f"{self.remaining.num_calls:,} calls")
        if self._num_done:
            parts.append(f"score {self._score / self._num_done:.3f}")
        if self._num_failed:
            parts.append(f"{self._num_failed:,} failed")
        if self._has_cost:
            parts.append(f"cost {self._cost:.4f}")
        left = self.remaining.seconds(self.frame.seconds)
        if left is not None:
            parts.append(f"{duration(left)} left")
        return ", ".join(parts)

"""A training run: its curves, the rollouts it saved, and its validations.

metrics.jsonl                 a line for each step and validation: the curves
samples/step-000012.jsonl     rollouts of a step, by group
validation/step-000010.jsonl  every answer of a validation, as items
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from memagent.errors import RunError
from memagent.run_files import parse_line
from memagent.runs import METRICS, read_manifest
from memagent.tracking import NOT_FINITE
from memagent.viewer.evaluations import Items
from memagent.viewer.line_index import LineIndex
from memagent.viewer.traces import MAX_SHOWN, Json, StoredTrace, answer_of, embedded_trace, totals

SAMPLES = "samples"
VALIDATION = "validation"
OPEN_FILES = 64
"""Files of rollouts and validations whose lines are known."""

_step_file = re.compile(r"step-(\d{1,12})\.jsonl")


class SavedRollout(BaseModel):
    """A rollout as a training run saves it for people to read."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    task_id: str = ""
    question: str | None = None
    answers: tuple[str, ...] = ()
    index: int = 0
    reward: float = Field(default=0.0, allow_inf_nan=False)
    advantage: float | None = Field(default=None, allow_inf_nan=False)
    group_rewards: tuple[float, ...] = ()
    status: str = "ok"
    error: str | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    trace: dict[str, Any] | None = None
    record: dict[str, Any] = Field(default_factory=dict)


class Training:
    """A run of `memagent train`, finished or not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._manifest = read_manifest(path)
        self._metrics = LineIndex(path, METRICS, _metrics_of)
        self._opened = lru_cache(OPEN_FILES)(
            lambda step: LineIndex(path, _file_of(SAMPLES, step), SavedRollout.model_validate_json)
        )
        self._validated = lru_cache(OPEN_FILES)(
            lambda step: Items(path, _file_of(VALIDATION, step))
        )

    def overview(self) -> Json:
        """What is trained, and which steps have rollouts or a validation to look at."""
        config = self._config
        model = config.get("model")
        return {
            "about": str(config.get("about") or ""),
            "model": str(model.get("source", "")) if isinstance(model, dict) else "",
            "num_steps": config.get("steps"),
            "config": config,
            "samples": self._steps(SAMPLES),
            "validations": self._steps(VALIDATION),
        }

    def metrics(self, after: int) -> Json:
        """Lines of metrics from a number on, and how many there are."""
        self._metrics.refresh()
        heads = self._metrics.heads
        return {
            "num_lines": len(heads),
            "lines": [head for head in heads[max(after, 0) :] if head is not None],
        }

    def rollouts(self, step: int) -> Json:
        """The saved rollouts of a step, by group."""
        groups: dict[str, list[Json]] = {}
        for number, rollout in enumerate(self._rollouts(step)):
            if rollout is not None:
                groups.setdefault(rollout.task_id, []).append(_row(number, rollout))
        shared = ("task_id", "question", "answers", "group_rewards")
        return {
            "step": step,
            "groups": [
                {**{name: rollouts[0][name] for name in shared}, "rollouts": rollouts}
                for rollouts in groups.values()
            ],
        }

    def rollout(self, step: int, number: int) -> StoredTrace:
        """The trace of a saved rollout."""
        found = dict(enumerate(self._rollouts(step))).get(number)
        if found is None:
            raise RunError(f"there is no rollout {number} of step {step}")
        title = {
            "rollout": {**_row(number, found), "step": step, "record": found.record},
        }
        return embedded_trace(found.trace, self.settings, title, question=found.question or "")

    def validation(self, step: int) -> Items:
        """The items of a validation."""
        self._check_step(VALIDATION, step)
        return self._validated(step)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of reading of the agent."""
        agent = self._config.get("agent")
        found = agent.get("settings") if isinstance(agent, dict) else None
        return found if isinstance(found, dict) else {}

    @property
    def _config(self) -> dict[str, Any]:
        config = self._manifest.get("config")
        return config if isinstance(config, dict) else {}

    def _steps(self, folder: str) -> list[int]:
        try:
            names = [path.name for path in (self.path / folder).iterdir()]
        except OSError:
            return []
        return sorted(int(match[1]) for match in map(_step_file.fullmatch, names) if match)

    def _check_step(self, folder: str, step: int) -> None:
        if step not in self._steps(folder):
            raise RunError(f"there is nothing in {folder} of step {step}")

    def _rollouts(self, step: int) -> list[SavedRollout | None]:
        self._check_step(SAMPLES, step)
        index = self._opened(step)
        index.refresh()
        return index.heads


def _file_of(folder: str, step: int) -> str:
    return f"{folder}/step-{step:06}.jsonl"


def _metrics_of(line: bytes) -> Json:
    """A line of metrics; numbers that JSON cannot express are None."""
    values = parse_line(line)
    if values is None or not isinstance(values.get("step"), int):
        raise ValueError("no line of metrics")
    numbers = {
        key: None if value in NOT_FINITE or not math.isfinite(value) else value
        for key, value in values.items()
        if isinstance(value, int | float) or value in NOT_FINITE
    }
    return {**numbers, "kind": str(values.get("kind", ""))}


def _row(number: int, rollout: SavedRollout) -> Json:
    """What is shown of a rollout beside the others of its group."""
    return {
        "number": number,
        **rollout.model_dump(exclude={"trace", "record"}),
        "question": rollout.question and rollout.question[:MAX_SHOWN],
        "answers": [answer[:MAX_SHOWN] for answer in rollout.answers[:5]],
        "metrics": {name: value for name, value in rollout.metrics.items() if math.isfinite(value)},
        **_outcome(rollout),
    }


def _outcome(rollout: SavedRollout) -> Json:
    try:
        trace = embedded_trace(rollout.trace, {}, {})
    except (RunError, ValidationError):
        return {"answer": None, "memories": [], "totals": {}}
    steps = [trace.step_at(number) for number in range(len(trace.heads))]
    answer = answer_of(steps[-1]) if steps else None
    memories = [
        {"index": step.index, "memory": step.memory[:MAX_SHOWN], "flags": step.flags}
        for step in steps
        if step.kind != "answer"
    ]
    return {"answer": answer, "memories": memories, "totals": totals(trace.heads)}

"""The records of training: what an agent returns, and what is learnt from it.

    Group (one task)
    ├── Rollout 0   reward 1.0
    │   ├── Sample  prompt prompt prompt SAMPLED SAMPLED          one row of tokens
    │   └── Sample  prompt prompt SAMPLED tool tool SAMPLED
    └── Rollout 1   reward 0.0
        └── Sample  ...

No tensors here: agents, drivers and tests need none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an agent returns when it has solved its task, or tried to.

    Example: Outcome(answer="Paris", metrics={"turns": 3})
    """

    answer: str
    reward: float | None = None
    """None leaves the verdict on the answer to the grader of the task."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the agent's own; they are averaged and logged."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """Anything worth looking at later, as JSON takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One row of tokens, some of which the policy drew. The three tuples have one length.

    Example: Sample(ids=(5, 6, 7), is_sampled=(False, False, True), logprobs=(0.0, 0.0, -1.2))
    """

    ids: tuple[int, ...]
    is_sampled: tuple[bool, ...]
    """True where the policy drew the token. These carry loss; prompts and tool results do not."""
    logprobs: tuple[float, ...]
    """Log-probability that the engine reported when it drew the token; 0.0 where not sampled."""
    policy_version: int = 0
    """The weights that drew the tokens; of several calls, the oldest."""

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.is_sampled) == len(self.logprobs):
            raise ValueError(
                f"a sample has {len(self.ids)} ids, {len(self.is_sampled)} marks and "
                f"{len(self.logprobs)} logprobs: all three have one entry per token"
            )
        if self.is_sampled and self.is_sampled[0]:
            raise ValueError("the first token of a sample has nothing before it to be drawn from")

    @property
    def num_sampled(self) -> int:
        """How many tokens carry loss."""
        return self.is_sampled.count(True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One attempt at a task: its rows, its reward."""

    task_id: str
    index: int
    """Which of its group."""
    samples: tuple[Sample, ...]
    """Every conversation of the attempt, in the order in which they began."""
    reward: float
    """0.0 when it failed; no statistic counts it then."""
    status: Status = "ok"
    error: str | None = None
    """Why it failed, in one line."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    """What is saved to be looked at: the answer, the trace."""

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"

    @property
    def num_sampled(self) -> int:
        """How many tokens carry loss, over all rows."""
        return sum(sample.num_sampled for sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All attempts at one task."""

    task_id: str
    rollouts: tuple[Rollout, ...]
    """Failed ones included: they are counted, and nothing is learnt from them."""

    @property
    def ok(self) -> tuple[Rollout, ...]:
        """The attempts that count."""
        return tuple(rollout for rollout in self.rollouts if rollout.is_ok)

    @property
    def num_failed(self) -> int:
        return len(self.rollouts) - len(self.ok)

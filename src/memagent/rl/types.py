"""The records of training: what an agent returns, and what the policy is trained on.

    Group (one task)
    ├── Rollout 0   reward 1.0   trace
    │   ├── Sample  prompt prompt prompt SAMPLED SAMPLED          one row of tokens
    │   └── Sample  prompt prompt SAMPLED tool tool SAMPLED
    └── Rollout 1   reward 0.0   trace
        └── Sample  ...

No tensors here: agents, drivers and tests need none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from memagent.agent.trace import Trace
from memagent.types import AttemptStatus

FailedBy = Literal["policy", "machine"]
"""What made a rollout fail: replies that the agent cannot use, or anything else (engine, tools, code)."""


class AgentTask(Protocol):
    """What an agent is asked to solve. An `Example` of `memagent.data` is one."""

    @property
    def id(self) -> str:
        """Unique among the tasks of a run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an agent returns.

    Example: Outcome(answer="Paris", metrics={"turns": 3})
    """

    answer: str
    reward: float | None = None
    """None leaves the reward to the grader of the run."""
    trace: Trace | None = None
    """The steps, with the answer as the last one; None builds a trace from the agent's calls."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the agent reports; they are averaged and logged."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """Anything else worth reading later, as plain JSON values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One row of tokens, some of which the policy sampled. The three tuples have the same length.

    Example: Sample(ids=(5, 6, 7), is_sampled=(False, False, True), logprobs=(0.0, 0.0, -1.2))
    """

    ids: tuple[int, ...]
    is_sampled: tuple[bool, ...]
    """True where the policy sampled the token. These carry loss; prompts and tool results do not."""
    logprobs: tuple[float, ...]
    """Log-probability that the engine reported for a sampled token; 0.0 elsewhere."""
    policy_version: int = 0
    """The weights that sampled the tokens; of several, the oldest."""
    token_versions: tuple[int, ...] | None = None
    """The weights that sampled each token, where they differ; 0 for tokens that were not sampled."""

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.is_sampled) == len(self.logprobs):
            raise ValueError(
                f"a sample has {len(self.ids)} ids, {len(self.is_sampled)} marks and "
                f"{len(self.logprobs)} logprobs: all three have one entry per token"
            )
        if self.is_sampled and self.is_sampled[0]:
            raise ValueError("the first token of a sample has no prompt to be sampled from")
        if self.token_versions is not None and len(self.token_versions) != len(self.ids):
            raise ValueError("`token_versions` has one entry per token")

    @property
    def num_sampled(self) -> int:
        """How many tokens carry loss."""
        return self.is_sampled.count(True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One attempt at a task: its rows, its reward, its trace."""

    task_id: str
    index: int
    """Number within its group."""
    samples: tuple[Sample, ...]
    """All conversations of the attempt, in the order in which they started."""
    reward: float
    """The reward; for a failed rollout that of failures, if there is one, else 0.0."""
    status: AttemptStatus = "ok"
    failed_by: FailedBy | None = None
    """Who caused the failure."""
    is_penalised: bool = False
    """True for a failed rollout whose reward counts and whose tokens are trained on."""
    error: str | None = None
    """Why it failed, in one line."""
    trace: Trace | None = None
    """The steps; of a failed rollout, those that were finished."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    """What the agent recorded beyond the trace; of a failed rollout, the traceback."""

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"

    @property
    def is_scored(self) -> bool:
        """Whether its reward is in means and advantages: it did not fail, or failing has a reward."""
        return self.is_ok or self.is_penalised

    @property
    def answer(self) -> str | None:
        """The answer of the trace; None when the rollout failed before it."""
        return None if self.trace is None else self.trace.answer

    @property
    def score(self) -> float:
        """The reward before any penalty for length."""
        return self.metrics.get("unshaped_reward", self.reward)

    @property
    def num_sampled(self) -> int:
        """How many tokens carry loss, over all rows."""
        return sum(sample.num_sampled for sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All attempts at one task."""

    task_id: str
    rollouts: tuple[Rollout, ...]
    """Failed ones included."""

    @property
    def ok(self) -> tuple[Rollout, ...]:
        """The attempts that did not fail."""
        return tuple(rollout for rollout in self.rollouts if rollout.is_ok)

    @property
    def scored(self) -> tuple[Rollout, ...]:
        """The attempts whose rewards count."""
        return tuple(rollout for rollout in self.rollouts if rollout.is_scored)

    @property
    def num_failed(self) -> int:
        return len(self.rollouts) - len(self.ok)

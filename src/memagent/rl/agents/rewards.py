"""Rewards: a number for the outcome of an agent, by a grader of evaluation or a function of the user.

    reward_of = open_reward("strict")                  # any grader of memagent.rewards
    reward_of = open_reward("my_reward.py:reward")     # def reward(task, outcome) -> float, or async
    await check_reward(reward_of, task)                # before the first rollout
    reward = await reward_of(task, outcome)

`strict` is the training verifier: one of the accepted answers, boxed, word for word; where all of them are
required, the share of them in the box. `recall` is the share of the accepted answers that occur anywhere in
the reply. Answers to RULER's tasks are limited in length, as in evaluation. A user's ordinary function runs in
a process of the pool (`memagent.rl.agents.offload`), an async one on the event loop of the rollouts.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from numbers import Real
from typing import Any, Protocol

from memagent.data.tasks.registry import MAX_ANSWER_TOKENS
from memagent.errors import ConfigError, MemagentError
from memagent.names import hint
from memagent.plugins import error_line, is_file_spec, load_function
from memagent.rewards.verifiers import GRADERS, NEEDS_NO_ANSWERS, Match, grade
from memagent.rl.agents.offload import offload
from memagent.rl.types import AgentTask, Outcome


class GradedTask(AgentTask, Protocol):
    """A task with accepted answers."""

    @property
    def answers(self) -> tuple[str, ...]: ...

    @property
    def match(self) -> Match: ...


Reward = Callable[[Any, Outcome], Awaitable[float]]
"""Takes a task and the outcome of an agent, returns a finite number."""


def open_reward(spec: str) -> Reward:
    """A reward by the name of a grader, or from a file as `path.py:function`."""
    if is_file_spec(spec):
        return _user_reward(spec)
    if spec not in GRADERS:
        raise ConfigError(
            f"there is no reward {spec!r}; {hint(spec, GRADERS)}, or path.py:function"
        )

    async def graded(task: GradedTask, outcome: Outcome) -> float:
        own = getattr(task, "grader", spec)  # unanswerable questions keep their own grader
        name = own if own in NEEDS_NO_ANSWERS else spec
        kind = getattr(task, "task", None)  # tasks of users need not have one
        limit = MAX_ANSWER_TOKENS.get(kind) if isinstance(kind, str) else None
        return grade(name, outcome.answer, task.answers, task.match, max_tokens=limit).value

    return graded


def with_bonus(reward: Reward, weights: Mapping[str, float]) -> Reward:
    """A reward plus weighted metrics of the agent; one that an outcome does not have counts as 0."""
    if not weights:
        return reward

    async def rewarded(task: Any, outcome: Outcome) -> float:
        bonus = sum(weight * outcome.metrics.get(name, 0.0) for name, weight in weights.items())
        return await reward(task, outcome) + bonus

    return rewarded


async def check_reward(reward: Reward, task: Any) -> None:
    """Try a reward on an empty answer to a task. Raises ConfigError when it fails."""
    try:
        await reward(task, Outcome(answer=""))
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        why = str(error) if isinstance(error, MemagentError) else error_line(error)
        raise ConfigError(
            f"the reward cannot grade an empty answer to {task.id}: {why}; it must return a number "
            "for any answer"
        ) from None


def checked_reward(value: object, spec: str) -> float:
    """A reward as a float. Raises ConfigError for anything but a finite number."""
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ConfigError(f"{spec} returned {value!r} as reward; it must return a finite number")
    return float(value)


def _user_reward(spec: str) -> Reward:
    function = load_function(spec, what="reward", parameters=("task", "outcome"))
    is_async = inspect.iscoroutinefunction(function)

    async def graded(task: Any, outcome: Outcome) -> float:
        pending = function(task, outcome) if is_async else offload(function, task, outcome)
        return checked_reward(await pending, spec)

    return graded

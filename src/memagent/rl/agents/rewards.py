"""Rewards: a number for what an agent came to. The graders of evaluation, or a function of the user.

    reward = open_reward("strict")                 # any grader of memagent.rewards
    reward = open_reward("my_reward.py:score")     # def score(task, outcome) -> float, or async
    await check_reward(reward, task)               # before the first rollout
    value = await reward(task, outcome)

`strict` is the training verifier: one of the accepted answers, boxed, word for word; where all of them are
asked for, the share that stands in the box. `recall` is the share of the accepted answers that stand
anywhere in the reply. A user's ordinary function runs in a process of the pool (`memagent.rl.agents.offload`),
an async one among the rollouts.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable
from difflib import get_close_matches
from numbers import Real
from typing import Any, Protocol

from memagent.errors import ConfigError, MemagentError
from memagent.plugins import error_line, is_file_spec, load_function
from memagent.rewards.verifiers import GRADERS, NEEDS_NO_ANSWERS, Match, grade
from memagent.rl.agents.offload import offload
from memagent.rl.types import Outcome


class Task(Protocol):
    """What an agent is given to do. An `Example` of `memagent.data` is one."""

    @property
    def id(self) -> str:
        """Unique among the tasks of a run."""
        ...


class GradedTask(Task, Protocol):
    """A task with accepted answers."""

    @property
    def answers(self) -> tuple[str, ...]: ...

    @property
    def match(self) -> Match: ...


Reward = Callable[[Any, Outcome], Awaitable[float]]
"""A task and the outcome of an agent in, a finite number out."""


def open_reward(spec: str) -> Reward:
    """A reward by the name of a grader, or from a file as `path.py:function`."""
    if is_file_spec(spec):
        return _user_reward(spec)
    if spec not in GRADERS:
        near = get_close_matches(spec, GRADERS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(GRADERS)}"
        raise ConfigError(f"there is no reward {spec!r}; {hint}, or path.py:function")

    async def graded(task: GradedTask, outcome: Outcome) -> float:
        own = getattr(task, "grader", spec)  # a question without an answer is graded as such
        name = own if own in NEEDS_NO_ANSWERS else spec
        return grade(name, outcome.answer, task.answers, task.match).value

    return graded


async def check_reward(reward: Reward, task: Any) -> None:
    """Try a reward on an empty answer to a task. Raises ConfigError when it cannot grade that."""
    try:
        await reward(task, Outcome(answer=""))
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        why = str(error) if isinstance(error, MemagentError) else error_line(error)
        raise ConfigError(
            f"the reward cannot grade an empty answer to {task.id}: {why}; it must give a number for "
            "any answer"
        ) from None


def checked_reward(value: object, spec: str) -> float:
    """A reward as a float. Raises ConfigError for what is no finite number."""
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ConfigError(f"{spec} gave {value!r} as reward; it must return a finite number")
    return float(value)


def _user_reward(spec: str) -> Reward:
    function = load_function(spec, what="reward", parameters=("task", "outcome"))
    is_async = inspect.iscoroutinefunction(function)

    async def graded(task: Any, outcome: Outcome) -> float:
        given = function(task, outcome) if is_async else offload(function, task, outcome)
        return checked_reward(await given, spec)

    return graded

"""The rollouts of a step: as many groups as are wanted, on disk as they finish.

    tasks ──▶ collect ──▶ groups ──▶ signal? ──▶ learnt from
                │                       │ no, with dynamic sampling
                └─▶ RUN/rollouts        └──▶ the next task instead

With the `free` driver a group is replaced as soon as it is known to teach nothing. With `lockstep` groups are
drawn in waves: what is computed together depends on the tasks alone, so that it can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from memagent.data.example import Example
from memagent.errors import RunError
from memagent.rl.agents.client import RunSampling
from memagent.rl.agents.offload import WorkerPool
from memagent.rl.rollouts.collect import Stats, collect
from memagent.rl.rollouts.log import RolloutLog
from memagent.rl.rollouts.tasks import TasksAhead
from memagent.rl.setup import Setup
from memagent.rl.types import Group, Rollout
from memagent.rl.update.advantages import has_signal, overlong_shaping


class Heard(Protocol):
    """Told of each rollout that has finished."""

    def __call__(self, stats: Stats, *, num_wanted: int) -> None: ...


@dataclass(slots=True)
class Found:
    """The rollouts of a step, while they come in."""

    groups: list[Group] = field(default_factory=list)
    """Those that are learnt from."""
    drawn: list[Group] = field(default_factory=list)
    """All of them, those without signal that were replaced included."""
    num_computed: int = 0
    """Tokens of prompts and replies of the rollouts that were drawn now."""
    tasks: dict[str, Example] = field(default_factory=dict)

    @property
    def num_unwanted(self) -> int:
        """Groups that were replaced."""
        return len(self.drawn) - len(self.groups)

    def noted(self, tasks: Iterable[Example]) -> Iterator[Example]:
        """The tasks, remembered as they go by."""
        for task in tasks:
            self.tasks[task.id] = task
            yield task

    def count(self, stats: Stats) -> None:
        """Add what a collection has drawn."""
        self.num_computed += stats.usage.prompt_tokens + stats.usage.completion_tokens


class Gatherer:
    """Draws the rollouts of steps."""

    def __init__(self, setup: Setup, run: Path, pool: WorkerPool, heard: Heard) -> None:
        self._setup = setup
        self._run = run
        self._pool = pool
        self._heard = heard

    async def gather(self, number: int, tasks: TasksAhead) -> Found:
        """The rollouts of a step; finished ones of a run that was killed are taken over."""
        log = RolloutLog(self._run, number)
        found = Found()
        if self._setup.config.rollout.driver == "lockstep":
            await self._in_waves(tasks, log, found)
        else:
            await self._freely(tasks, log, found)
        return found

    async def _freely(self, tasks: TasksAhead, log: RolloutLog, found: Found) -> None:
        """Groups without signal are replaced as soon as they are known."""
        settings = self._setup.config.rollout

        def heard(rollout: Rollout, stats: Stats) -> None:
            log.add(rollout)
            self._heard(stats, num_wanted=settings.prompts * settings.group_size)

        def is_wanted(group: Group) -> bool:
            found.drawn.append(group)
            return self._is_wanted(group)

        collection = collect(
            found.noted(tasks),
            num_groups=settings.prompts,
            is_wanted=is_wanted,
            max_unwanted=self._max_unwanted,
            concurrency=settings.concurrency,
            finished=log.finished,
            watch=heard,
            **self._how(),
        )
        async with collection:
            found.groups = await collection.all()
        found.count(collection.stats)

    async def _in_waves(self, tasks: TasksAhead, log: RolloutLog, found: Found) -> None:
        """What is drawn together depends on nothing but the tasks: groups are replaced in the next wave."""
        settings = self._setup.config.rollout
        largest = max(1, settings.concurrency // settings.group_size)
        done = iter(log.waves)
        while missing := min(
            settings.prompts - len(found.groups),
            settings.prompts + self._max_unwanted - len(found.drawn),
        ):
            some = list(islice(found.noted(tasks), min(missing, largest)))
            groups = _grouped(some, next(done, None))
            if groups is None:
                groups = await self._wave(some, log, found)
            found.drawn += groups
            found.groups += filter(self._is_wanted, groups)

    async def _wave(self, tasks: list[Example], log: RolloutLog, found: Found) -> list[Group]:
        settings = self._setup.config.rollout
        num_wanted = settings.prompts * settings.group_size
        collection = collect(
            tasks,
            concurrency=max(settings.concurrency, settings.group_size),
            watch=lambda _, stats: self._heard(stats, num_wanted=num_wanted),
            **self._how(),
        )
        async with collection:
            groups = await collection.all()
        log.add_wave([rollout for group in groups for rollout in group.rollouts])
        found.count(collection.stats)
        return groups

    def _how(self) -> dict[str, Any]:
        """What all rollouts of the run have in common."""
        settings, objective = self._setup.config.rollout, self._setup.config.objective
        shape = None
        if objective.overlong_tokens is not None:
            shape = partial(
                overlong_shaping,
                soft_tokens=objective.overlong_tokens,
                penalty=objective.overlong_penalty,
            )
        return {
            "agent": self._setup.agent,
            "engine": self._setup.engine,
            "group_size": settings.group_size,
            "driver": settings.driver,
            "seed": self._setup.config.seed,
            "reward": self._setup.reward,
            "sampling": RunSampling(
                temperature=settings.temperature, max_tokens=settings.max_tokens
            ),
            "seconds": settings.seconds,
            "pool": self._pool,
            "policy_version": self._setup.sync.policy_version,
            "shape": shape,
        }

    def _is_wanted(self, group: Group) -> bool:
        return has_signal(group) or not self._setup.config.objective.dynamic_sampling

    @property
    def _max_unwanted(self) -> int:
        settings = self._setup.config.rollout
        return 3 * settings.prompts if settings.max_unwanted is None else settings.max_unwanted


def _grouped(tasks: Sequence[Example], rollouts: Sequence[Rollout] | None) -> list[Group] | None:
    """The groups of a wave that was drawn before; None if it was not."""
    if rollouts is None:
        return None
    by_task: dict[str, list[Rollout]] = {task.id: [] for task in tasks}
    for rollout in rollouts:
        if rollout.task_id not in by_task:
            raise RunError(
                f"the run holds rollouts of {rollout.task_id}, which is not its turn; its tasks have "
                "changed, so remove its folder rollouts"
            )
        by_task[rollout.task_id].append(rollout)
    return [Group(task_id=name, rollouts=tuple(some)) for name, some in by_task.items()]

"""The rollouts of a training step: the groups to train on, saved as they finish.

    tasks ──▶ collect ──▶ groups ──▶ signal? ──▶ trained on
                │                       │ no, with dynamic sampling
                └─▶ RUN/rollouts        └──▶ the next task instead

With the `free` driver a group without signal is replaced as soon as it is finished. With `lockstep` groups
are collected in waves: which rollouts run together depends on the tasks alone, so waves are reproducible.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol

from memagent.data.example import Example
from memagent.errors import RunError
from memagent.rl.agents.offload import WorkerPool
from memagent.rl.agents.session import RunSampling
from memagent.rl.rollouts.collect import RolloutSpec, RolloutStats, collect
from memagent.rl.rollouts.rollout_log import RolloutLog
from memagent.rl.rollouts.tasks import TasksAhead
from memagent.rl.setup import Setup
from memagent.rl.types import Group, Rollout
from memagent.rl.update.advantages import has_signal, overlong_shaping


class OnStepRollout(Protocol):
    """Called when a rollout has finished, with the counts so far and how many the step needs."""

    def __call__(self, stats: RolloutStats, *, num_wanted: int) -> None: ...


@dataclass(slots=True)
class StepRollouts:
    """The rollouts of a step, while they are collected."""

    groups: list[Group] = field(default_factory=list)
    """Groups to train on."""
    all_groups: list[Group] = field(default_factory=list)
    """Also those without signal that were replaced."""
    num_computed: int = 0
    """Tokens of prompts and replies of new rollouts; those of a resumed run are not counted."""
    tasks: dict[str, Example] = field(default_factory=dict)
    """All tasks of the step, by id."""
    num_dropped: int = 0
    """Groups that were too old to train on."""
    position: int = 0
    """Tasks taken from the stream when the step had its groups."""
    pending: list[tuple[int, int]] = field(default_factory=list)
    """Position and deadline of those that no step has taken yet."""

    @property
    def num_unwanted(self) -> int:
        """Groups that were replaced."""
        return len(self.all_groups) - len(self.groups)

    def noted(self, tasks: Iterable[Example]) -> Iterator[Example]:
        """The same tasks; each is added to `tasks` as it passes."""
        for task in tasks:
            self.tasks[task.id] = task
            yield task

    def count(self, stats: RolloutStats) -> None:
        """Add the tokens of a collection."""
        self.num_computed += stats.usage.prompt_tokens + stats.usage.completion_tokens


class Gatherer:
    """Collects the rollouts of steps."""

    def __init__(
        self, setup: Setup, run: Path, pool: WorkerPool, on_rollout: OnStepRollout
    ) -> None:
        self._setup = setup
        self._run = run
        self._pool = pool
        self._on_rollout = on_rollout

    async def gather(self, number: int, tasks: TasksAhead) -> StepRollouts:
        """The rollouts of a step; those that a killed run has saved are reused."""
        found = StepRollouts()
        with RolloutLog(self._run, number) as log:
            if self._setup.config.rollout.driver == "lockstep":
                await self._in_waves(tasks, log, found)
            else:
                await self._freely(tasks, log, found)
        found.position = tasks.position
        return found

    async def aclose(self) -> None:
        """Nothing runs between steps."""

    async def _freely(self, tasks: TasksAhead, log: RolloutLog, found: StepRollouts) -> None:
        """Replace each group without signal as soon as it is finished."""

        def on_rollout(rollout: Rollout, stats: RolloutStats) -> None:
            log.add(rollout)
            self._report(rollout, stats)

        def is_wanted(group: Group) -> bool:
            found.all_groups.append(group)
            return self._is_wanted(group)

        collection = collect(
            found.noted(tasks),
            self._setup.engine,
            self._spec(),
            num_groups=self._setup.config.rollout.prompts,
            is_wanted=is_wanted,
            max_unwanted=self._max_unwanted,
            finished=log.finished,
            on_rollout=on_rollout,
            pool=self._pool,
            policy_version=self._setup.sync.policy_version,
        )
        async with collection:
            found.groups = await collection.all()
        found.count(collection.stats)

    async def _in_waves(self, tasks: TasksAhead, log: RolloutLog, found: StepRollouts) -> None:
        """Replace groups without signal in the next wave."""
        settings = self._setup.config.rollout
        largest = max(1, settings.concurrency // settings.group_size)
        saved = iter(log.waves)
        while missing := min(
            settings.prompts - len(found.groups),
            settings.prompts + self._max_unwanted - len(found.all_groups),
        ):
            wave = next(saved, None)
            # `rollout.concurrency` may have changed since a wave was saved
            num = min(missing, largest) if wave is None else len({one.task_id for one in wave})
            some = list(islice(found.noted(tasks), num))
            groups = await self._wave(some, log, found) if wave is None else _grouped(some, wave)
            found.all_groups += groups
            found.groups += filter(self._is_wanted, groups)

    async def _wave(
        self, tasks: list[Example], log: RolloutLog, found: StepRollouts
    ) -> list[Group]:
        spec = self._spec()
        collection = collect(
            tasks,
            self._setup.engine,
            replace(spec, concurrency=max(spec.concurrency, spec.group_size)),
            on_rollout=self._report,
            pool=self._pool,
            policy_version=self._setup.sync.policy_version,
        )
        async with collection:
            groups = await collection.all()
        log.add_wave([rollout for group in groups for rollout in group.rollouts])
        found.count(collection.stats)
        return groups

    def _spec(self) -> RolloutSpec:
        settings, objective = self._setup.config.rollout, self._setup.config.objective
        shape = None
        if objective.overlong_tokens is not None:
            shape = partial(overlong_shaping, soft_tokens=objective.overlong_tokens)
        return RolloutSpec(
            agent=self._setup.agent,
            group_size=settings.group_size,
            reward=self._setup.reward,
            driver=settings.driver,
            seed=self._setup.config.seed,
            sampling=RunSampling(temperature=settings.temperature, max_tokens=settings.max_tokens),
            concurrency=settings.concurrency,
            seconds=settings.seconds,
            shape=shape,
            failure_reward=settings.failure_reward,
        )

    def _report(self, rollout: Rollout, stats: RolloutStats) -> None:
        settings = self._setup.config.rollout
        self._on_rollout(stats, num_wanted=settings.prompts * settings.group_size)

    def _is_wanted(self, group: Group) -> bool:
        return has_signal(group) or not self._setup.config.objective.dynamic_sampling

    @property
    def _max_unwanted(self) -> int:
        return 3 * self._setup.config.rollout.prompts


def _grouped(tasks: Sequence[Example], rollouts: Sequence[Rollout]) -> list[Group]:
    """The groups of a saved wave."""
    by_task: dict[str, list[Rollout]] = {task.id: [] for task in tasks}
    for rollout in rollouts:
        if rollout.task_id not in by_task:
            raise RunError(
                f"the run has saved rollouts of {rollout.task_id}, which is not a task of this step; "
                "its tasks have changed, so remove its folder rollouts"
            )
        by_task[rollout.task_id].append(rollout)
    return [Group(task_id=name, rollouts=tuple(some)) for name, some in by_task.items()]

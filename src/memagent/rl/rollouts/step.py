"""The rollouts of training steps: the groups to train on, saved as they finish.

    tasks ──▶ collect ──▶ groups ──▶ signal? ──▶ trained on
                │            │          │ no, with dynamic sampling
                │            │          └──▶ the next task instead
                └─▶ RUN/rollouts        too old: dropped and counted

    gatherer = open_gatherer(setup, run, pool, on_rollout, pending=progress.pending)
    found = await gatherer.gather(step, tasks)
    await gatherer.aclose()

With the `free` driver groups are started as `Admission` allows: for this step alone, or with asynchronous rollouts for
later ones too, while the trainer updates. A rollout that is in progress when new weights arrive goes on with them; its
tokens carry the version that sampled them. Rollouts are saved in the file of the last step that may train on them. A
resumed run starts the groups again that no step of its checkpoint took, and reuses the rollouts that are saved.

With `lockstep` groups are collected in waves: which rollouts run together depends on the tasks alone, so waves are
reproducible.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol

from memagent.data.example import Example
from memagent.errors import RunError
from memagent.rl.agents.offload import WorkerPool
from memagent.rl.agents.session import RunSampling
from memagent.rl.rollouts.admission import Admission
from memagent.rl.rollouts.collect import Collection, RolloutSpec, RolloutStats
from memagent.rl.rollouts.rollout_log import RolloutLog, saved_steps
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


def open_gatherer(
    setup: Setup,
    run: Path,
    pool: WorkerPool,
    on_rollout: OnStepRollout,
    *,
    pending: Sequence[tuple[int, int]] = (),
) -> Gatherer:
    """The gatherer of a run; `pending` groups of a checkpoint, each with its deadline, are started first."""
    if setup.config.rollout.driver == "lockstep":
        return WaveGatherer(setup, run, pool, on_rollout)
    return FreeGatherer(setup, run, pool, on_rollout, pending)


class Gatherer(ABC):
    """Collects the rollouts of steps."""

    def __init__(
        self, setup: Setup, run: Path, pool: WorkerPool, on_rollout: OnStepRollout
    ) -> None:
        self._setup = setup
        self._run = run
        self._pool = pool
        self._on_rollout = on_rollout
        self._max_unwanted = 3 * setup.config.rollout.prompts

    @abstractmethod
    async def gather(self, number: int, tasks: TasksAhead) -> StepRollouts:
        """The rollouts of a step, as soon as there are enough; those that a killed run has saved are reused."""

    async def aclose(self) -> None:
        """Cancel what is running; in waves nothing runs between steps."""
        return

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


# --- freely ---------------------------------------------------------------------------------------


class FreeGatherer(Gatherer):
    """Starts a group wherever one may start; a step takes groups that are finished."""

    def __init__(
        self,
        setup: Setup,
        run: Path,
        pool: WorkerPool,
        on_rollout: OnStepRollout,
        pending: Sequence[tuple[int, int]] = (),
    ) -> None:
        """`pending`: position and deadline of groups that no step has taken."""
        super().__init__(setup, run, pool, on_rollout)
        config = setup.config
        self._is_asynchronous = config.rollout.asynchronous
        self._admission = Admission(
            prompts=config.rollout.prompts,
            max_staleness=config.num_versions - 1,
            max_unwanted=self._max_unwanted,
            num_steps=config.steps,
        )
        self._pending = pending
        self._positions: dict[str, int] = {}
        """Position of each outstanding task, by its id."""
        self._examples: dict[str, Example] = {}
        self._finished: dict[int, Group] = {}
        """Groups that no step has taken, by position."""
        self._unwanted: list[Group] = []
        """Since the last step."""
        self._last_steps: dict[str, int] = {}
        """The last step that may train on each outstanding task."""
        self._logs: dict[int, RolloutLog] = {}
        self._changed = asyncio.Event()
        self._collection: Collection | None = None
        self._pump: asyncio.Task[None] | None = None

    async def gather(self, number: int, tasks: TasksAhead) -> StepRollouts:
        """See `Gatherer`. With asynchronous rollouts, others go on."""
        self._admission.begin_step(number - 1)
        collection = self._collection
        if collection is None:
            collection = self._start(number, tasks)
        collection.wake()
        num_dropped = 0
        while True:
            self._changed.clear()
            stale = self._admission.drop_stale()  # sampled by an engine with old weights
            for position in stale:
                self._forget(self._finished.pop(position))
            if stale:  # other groups start instead
                collection.wake()
            num_dropped += len(stale)
            if (taken := self._admission.take()) is not None:
                break
            await self._changed.wait()
            assert self._pump is not None
            if self._pump.done():
                self._pump.result()
                raise AssertionError("tasks never end")
        return self._found(taken, num_dropped, collection, tasks)

    async def aclose(self) -> None:
        """Cancel what is running."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        with ExitStack() as stack:
            for log in self._logs.values():
                stack.callback(log.close)
        self._logs = {}

    def _start(self, number: int, tasks: TasksAhead) -> Collection:
        saved = []
        for step in saved_steps(self._run):
            if step >= number:
                saved += self._log(step).finished
        collection = Collection(
            self._drawn(tasks),
            self._setup.engine,
            self._spec(),
            is_wanted=self._sort_out,
            may_start=lambda: bool(self._pending) or self._admission.may_start,
            finished=saved,
            on_rollout=self._save,
            pool=self._pool,
            policy_version=self._setup.sync.policy_version,
        )
        self._collection = collection
        self._pump = asyncio.ensure_future(self._run_collection(collection))
        self._pump.add_done_callback(lambda _: self._changed.set())
        return collection

    async def _run_collection(self, collection: Collection) -> None:
        async with collection:
            async for group in collection:
                position = self._positions[group.task_id]
                self._finished[position] = group
                oldest = oldest_version(group) if self._is_asynchronous else None
                self._admission.finish(position, oldest=oldest)
                self._changed.set()

    def _drawn(self, tasks: TasksAhead) -> Iterator[Example]:
        """The pending tasks of a resumed run, then those of the stream."""
        stream = self._setup.stream(0)
        pending, self._pending = sorted(self._pending), []
        for number, (position, deadline) in enumerate(pending, start=1):
            self._pending = pending[number:]
            stream.move_to(position)
            yield self._noted(stream.draw(1)[0], position, deadline)
        while True:
            position = tasks.position
            yield self._noted(next(tasks), position, None)

    def _noted(self, task: Example, position: int, deadline: int | None) -> Example:
        deadline = self._admission.start(position, deadline=deadline)
        self._positions[task.id] = position
        self._examples[task.id] = task
        self._last_steps[task.id] = min(deadline + 1, self._setup.config.steps)
        return task

    def _save(self, rollout: Rollout, stats: RolloutStats) -> None:
        self._log(self._last_steps[rollout.task_id]).add(rollout)
        self._report(rollout, stats)

    def _log(self, step: int) -> RolloutLog:
        if step not in self._logs:
            self._logs[step] = RolloutLog(self._run, step)
        return self._logs[step]

    def _sort_out(self, group: Group) -> bool:
        if self._is_wanted(group):
            return True
        self._admission.discard(self._positions[group.task_id])
        self._unwanted.append(group)
        self._changed.set()
        return False

    def _found(
        self, taken: Sequence[int], num_dropped: int, collection: Collection, tasks: TasksAhead
    ) -> StepRollouts:
        groups = [self._finished.pop(position) for position in taken]
        used = collection.stats.usage
        found = StepRollouts(
            groups=groups,
            all_groups=[*groups, *self._unwanted],
            num_dropped=num_dropped,
            num_computed=used.prompt_tokens + used.completion_tokens,
            position=tasks.position,
            pending=[*self._admission.outstanding, *self._pending],
        )
        collection.restart_stats()
        self._unwanted = []
        for group in found.all_groups:
            found.tasks[group.task_id] = self._forget(group)
        for step in [step for step in self._logs if step <= self._admission.version]:
            self._logs.pop(step).close()  # no outstanding group is in it
        return found

    def _forget(self, group: Group) -> Example:
        del self._positions[group.task_id], self._last_steps[group.task_id]
        return self._examples.pop(group.task_id)


def oldest_version(group: Group) -> int | None:
    """The oldest weights that sampled a token of a group; None where there is no token."""
    samples = (sample for rollout in group.scored for sample in rollout.samples)
    return min((sample.policy_version for sample in samples if sample.num_sampled), default=None)


# --- in waves -------------------------------------------------------------------------------------


class WaveGatherer(Gatherer):
    """Replaces groups without signal in the next wave."""

    async def gather(self, number: int, tasks: TasksAhead) -> StepRollouts:
        """See `Gatherer`. Nothing runs between steps."""
        found = StepRollouts()
        settings = self._setup.config.rollout
        largest = max(1, settings.concurrency // settings.group_size)
        with RolloutLog(self._run, number) as log:
            saved = iter(log.waves)
            while missing := min(
                settings.prompts - len(found.groups),
                settings.prompts + self._max_unwanted - len(found.all_groups),
            ):
                wave = next(saved, None)
                # `rollout.concurrency` may have changed since a wave was saved
                num = min(missing, largest) if wave is None else len({one.task_id for one in wave})
                some = list(islice(tasks, num))
                found.tasks |= {task.id: task for task in some}
                groups = (
                    await self._wave(some, log, found) if wave is None else _grouped(some, wave)
                )
                found.all_groups += groups
                found.groups += filter(self._is_wanted, groups)
        found.position = tasks.position
        return found

    async def _wave(
        self, tasks: list[Example], log: RolloutLog, found: StepRollouts
    ) -> list[Group]:
        spec = self._spec()
        collection = Collection(
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
        used = collection.stats.usage
        found.num_computed += used.prompt_tokens + used.completion_tokens
        return groups


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

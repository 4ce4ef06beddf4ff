"""Rollouts that go on while the trainer updates.

    tasks ──▶ collect ──────────────────────────────▶ finished groups ──▶ gather(step) ──▶ trained on
                ▲  started as `Admission` allows             │
                └──── wake, at each step                     └─ too old: dropped and counted

    gatherer = open_gatherer(setup, run, pool, on_rollout, pending=progress.pending)
    found = await gatherer.gather(step, tasks)
    await gatherer.aclose()

A rollout that is in progress when new weights arrive goes on with them; its tokens carry the version that
sampled them. Rollouts are saved in the file of the last step that may train on them. A resumed run starts the
groups again that no step of its checkpoint took, and reuses the rollouts that are saved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from memagent.data.example import Example
from memagent.rl.agents.offload import WorkerPool
from memagent.rl.rollouts.admission import Admission
from memagent.rl.rollouts.collect import Collection, RolloutStats, collect
from memagent.rl.rollouts.rollout_log import RolloutLog, saved_steps
from memagent.rl.rollouts.step import Gatherer, OnStepRollout, StepRollouts
from memagent.rl.rollouts.tasks import TasksAhead
from memagent.rl.setup import Setup
from memagent.rl.types import Group, Rollout


def open_gatherer(
    setup: Setup,
    run: Path,
    pool: WorkerPool,
    on_rollout: OnStepRollout,
    *,
    pending: Sequence[tuple[int, int]] = (),
) -> Gatherer:
    """The gatherer of a run; `pending` groups of a checkpoint are started first."""
    if not setup.config.rollout.asynchronous:
        return Gatherer(setup, run, pool, on_rollout)
    return AsyncGatherer(setup, run, pool, on_rollout, pending)


class AsyncGatherer(Gatherer):
    """Collects rollouts all the time; a step takes groups that are finished."""

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
        assert config.objective.max_staleness is not None, "checked with the config"
        self._admission = Admission(
            prompts=config.rollout.prompts,
            max_staleness=config.objective.max_staleness,
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
        """The rollouts of a step, as soon as there are enough. Others go on."""
        self._admission.begin_step(number - 1)
        collection = self._collection
        if collection is None:
            collection = self._start(number, tasks)
        collection.wake()
        dropped: list[int] = []
        while True:
            self._changed.clear()
            dropped += self._drop_stale(collection)
            if (taken := self._admission.take()) is not None:
                break
            await self._changed.wait()
            assert self._pump is not None
            if self._pump.done():
                self._pump.result()
                raise AssertionError("tasks never end")
        return self._found(taken, len(dropped), collection, tasks)

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
        collection = collect(
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
                self._admission.finish(position, oldest=oldest_version(group))
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

    def _drop_stale(self, collection: Collection) -> list[int]:
        """Drop what an engine with old weights has sampled; other groups start instead."""
        dropped = self._admission.drop_stale()
        for position in dropped:
            self._forget(self._finished.pop(position))
        if dropped:
            collection.wake()
        return dropped

    def _found(
        self, taken: Sequence[int], num_dropped: int, collection: Collection, tasks: TasksAhead
    ) -> StepRollouts:
        groups = [self._finished.pop(position) for position in taken]
        found = StepRollouts(
            groups=groups,
            all_groups=[*groups, *self._unwanted],
            num_dropped=num_dropped,
            position=tasks.position,
            pending=[*self._admission.outstanding, *self._pending],
        )
        found.count(collection.stats)
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

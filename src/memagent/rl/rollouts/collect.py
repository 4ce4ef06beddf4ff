"""Rollouts: run an agent on tasks, several times each, and hand out groups as they finish.

    tasks ──▶ G rollouts each ──▶ agent ──▶ reward ──▶ Group ──▶ wanted? ──▶ handed out
                                                                    │ no
                                                                    └──▶ the next task instead

    async with collect(tasks, agent, engine, group_size=16, num_groups=128, reward=reward) as groups:
        async for group in groups:
            ...
    groups.stats.usage, groups.stats.num_failed

A rollout that raises is a failed Rollout with its reason; when nothing succeeds any more, the collection
stops with the last reason. Which tasks are run does not depend on which finish first: a task is drawn for
each group that is needed and for each one that was not wanted.
"""

from __future__ import annotations

import asyncio
import json
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, Self

from memagent.errors import ConfigError, DataError, EngineError, MemagentError
from memagent.plugins import error_line
from memagent.rl.agents.api import Agent
from memagent.rl.agents.client import Client, RunSampling, Session
from memagent.rl.agents.offload import WorkerPool
from memagent.rl.agents.recorder import call_of
from memagent.rl.agents.rewards import Reward, Task, checked_reward
from memagent.rl.rollouts.drivers import Driver, DriverName, Place, open_driver
from memagent.rl.types import Group, Outcome, Rollout
from memagent.types import Engine, Sampling, Usage

STOP_AFTER = 4
"""So many tasks without any success, one after the other, mean that the tasks are not to blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What a collection has done so far."""

    num_groups: int = 0
    """Groups that were handed out."""
    num_unwanted: int = 0
    """Groups that were made and not wanted; other tasks took their place."""
    num_rollouts: int = 0
    """Finished rollouts, failed ones included, taken over ones not."""
    num_failed: int = 0
    usage: Usage = field(default_factory=Usage)
    """What the calls of all finished rollouts took."""
    seconds: float = 0.0
    """Since the first rollout began."""
    call_seconds: float = 0.0
    """Time in calls, of all rollouts together."""
    reward_seconds: float = 0.0

    @property
    def sampled_tokens_per_second(self) -> float:
        """How fast replies come, of all rollouts together."""
        return self.usage.completion_tokens / self.seconds if self.seconds else 0.0


Watcher = Callable[[Rollout, Stats], None]
"""Told of each rollout as it finishes."""
Shaping = Callable[[Sequence[tuple[int, int]]], float]
"""What the lengths of replies, each with its limit, add to a reward."""


async def check_engine(engine: Engine) -> None:
    """Make one short call. Raises EngineRefused when the engine does not return what training needs."""
    completion = await engine.complete(
        [{"role": "user", "content": "Hello."}], Sampling(max_tokens=1)
    )
    call_of(completion, model=engine.model, policy_version=0)


def collect(
    tasks: Iterable[Task],
    agent: Agent,
    engine: Engine,
    *,
    group_size: int,
    driver: DriverName = "free",
    seed: int = 0,
    reward: Reward | None = None,
    sampling: RunSampling | None = None,
    num_groups: int | None = None,
    is_wanted: Callable[[Group], bool] | None = None,
    max_unwanted: int | None = None,
    concurrency: int = 1024,
    seconds: float | None = None,
    stop_after: int = STOP_AFTER,
    finished: Iterable[Rollout] = (),
    watch: Watcher | None = None,
    pool: WorkerPool | None = None,
    needs_tokens: bool = True,
    policy_version: int = 0,
    shape: Shaping | None = None,
) -> Collection:
    """Groups of rollouts, as they finish. Nothing begins before the first one is asked for.

    num_groups       how many are handed out; None takes each task once
    is_wanted        which groups count; others are replaced
    max_unwanted     how many are replaced, at most; then there may be fewer than `num_groups`
    concurrency      rollouts whose agents run at once, at most
    seconds          how long an agent may take, and a reward; None sets no limit
    stop_after       so many tasks that fail one after the other, in all rollouts, end the collection
    finished         rollouts from an earlier run; they are not made again
    pool             processes for `offload`, to keep for the next time; one of its own if None
    needs_tokens     False takes any engine and records nothing, for validation
    policy_version   of the weights, where the engine tells none
    shape            added to a reward, given the lengths of the replies and their limits
    """
    if group_size < 1:
        raise ConfigError(f"group_size={group_size} makes no rollout; set it to 2 or more")
    if concurrency < 1:
        raise ConfigError(f"concurrency={concurrency} lets no rollout run; set it to 1 or more")
    begin = partial(
        Session,
        engine,
        seed=seed,
        sampling=sampling,
        needs_tokens=needs_tokens,
        policy_version=policy_version,
    )
    return Collection(
        tasks,
        _Attempts(agent, begin, reward, open_driver(driver, engine), concurrency, seconds, shape),
        group_size=group_size,
        num_groups=num_groups,
        is_wanted=is_wanted,
        max_unwanted=max_unwanted,
        max_under_way=-(-concurrency // group_size) + 1,
        stop_after=stop_after,
        finished=finished,
        watch=watch,
        pool=pool,
    )


class Collection:
    """Groups as they finish, and counts. `async with` ends what is under way when one has enough."""

    def __init__(
        self,
        tasks: Iterable[Task],
        attempts: _Attempts,
        *,
        group_size: int,
        num_groups: int | None,
        is_wanted: Callable[[Group], bool] | None,
        max_unwanted: int | None,
        max_under_way: int,
        stop_after: int,
        finished: Iterable[Rollout],
        watch: Watcher | None,
        pool: WorkerPool | None,
    ) -> None:
        self._tasks = iter(tasks)
        self._attempts = attempts
        self._group_size = group_size
        self._num_groups = num_groups
        self._is_wanted = is_wanted or (lambda group: True)
        self._max_unwanted = max_unwanted
        self._max_under_way = max_under_way
        self._stop_after = stop_after
        self._finished = {(rollout.task_id, rollout.index): rollout for rollout in finished}
        self._watch = watch
        self._pool = pool or WorkerPool()
        self._owns_pool = pool is None
        self._under_way: dict[str, list[Rollout | None]] = {}
        """Rollouts of unfinished groups, by task."""
        self._running: dict[asyncio.Task[_Attempt], tuple[str, int]] = {}
        self._done: asyncio.Queue[asyncio.Task[_Attempt]] = asyncio.Queue()
        """Of those that run, the finished ones: waiting for all of them anew each time takes long."""
        self._ready: deque[Group] = deque()
        self._order: dict[str, int] = {}
        """When each task was drawn."""
        self._num_failed_in_a_row = 0
        """Tasks of which no rollout succeeded, since the last one that did."""
        self._last_error: BaseException | None = None
        self._started: float | None = None
        self.stats = Stats()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Group:
        try:
            while not self._ready:
                self._draw()
                if self._ready:
                    break
                if not self._running:
                    await self.aclose()
                    raise StopAsyncIteration
                done = await self._done.get()
                self._take(*self._running.pop(done), done.result())
        except StopAsyncIteration:
            raise
        except BaseException:
            await self.aclose()
            raise
        return self._ready.popleft()

    async def all(self) -> list[Group]:
        """All groups, in the order of their tasks."""
        groups = [group async for group in self]
        return sorted(groups, key=lambda group: self._order[group.task_id])

    async def aclose(self) -> None:
        """End what is under way. Rollouts that are not finished are gone."""
        running, self._running = list(self._running), {}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._owns_pool:
            await asyncio.to_thread(self._pool.close)

    def _draw(self) -> None:
        """Begin with further tasks while they are needed and there is room."""
        while self._needs_more() and len(self._under_way) < self._max_under_way:
            task = next(self._tasks, None)
            if task is None:
                self._tasks = iter(())
                return
            self._begin(task)

    def _needs_more(self) -> bool:
        if self._num_groups is None:
            return True
        have = self.stats.num_groups + len(self._under_way)
        spare = self._max_unwanted
        return have < self._num_groups and (
            spare is None or len(self._order) < self._num_groups + spare
        )

    def _begin(self, task: Task) -> None:
        if task.id in self._order:
            raise DataError(f"the task {task.id} came twice; ids must differ within a collection")
        self._order[task.id] = len(self._order)
        if self._started is None:
            self._started = perf_counter()
        rollouts: list[Rollout | None] = [
            self._finished.get((task.id, index)) for index in range(self._group_size)
        ]
        self._under_way[task.id] = rollouts
        for index, found in enumerate(rollouts):
            if found is None:
                place = (self._order[task.id], index)
                attempt = asyncio.ensure_future(self._attempts.attempt(task, place, self._pool))
                attempt.add_done_callback(self._done.put_nowait)
                self._running[attempt] = (task.id, index)
        self._close_group(task.id)

    def _take(self, task_id: str, index: int, attempt: _Attempt) -> None:
        rollout = attempt.rollout
        self._under_way[task_id][index] = rollout
        self._last_error = attempt.error or self._last_error
        if rollout.is_ok:
            self._num_failed_in_a_row = 0
        assert self._started is not None
        before = self.stats
        self._count(
            num_rollouts=before.num_rollouts + 1,
            num_failed=before.num_failed + (not rollout.is_ok),
            usage=before.usage + attempt.usage,
            seconds=perf_counter() - self._started,
            call_seconds=before.call_seconds + attempt.call_seconds,
            reward_seconds=before.reward_seconds + attempt.reward_seconds,
        )
        if self._watch:
            self._watch(rollout, self.stats)
        self._close_group(task_id)
        if self._num_failed_in_a_row >= self._stop_after:
            kind = EngineError if isinstance(self._last_error, EngineError) else ConfigError
            raise kind(
                f"all rollouts of {self._num_failed_in_a_row} tasks failed one after the other, the "
                f"last with: {rollout.error}"
            )

    def _close_group(self, task_id: str) -> None:
        rollouts = [rollout for rollout in self._under_way[task_id] if rollout is not None]
        if len(rollouts) < self._group_size:
            return
        del self._under_way[task_id]
        group = Group(task_id=task_id, rollouts=tuple(rollouts))
        self._num_failed_in_a_row += not group.ok
        if self._is_wanted(group):
            self._ready.append(group)
            self._count(num_groups=self.stats.num_groups + 1)
        else:
            self._count(num_unwanted=self.stats.num_unwanted + 1)

    def _count(self, **changes: Any) -> None:
        self.stats = replace(self.stats, **changes)


# --- one rollout ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """A finished rollout, and what it took."""

    rollout: Rollout
    usage: Usage
    call_seconds: float
    reward_seconds: float
    error: BaseException | None = None


class _Attempts:
    """Runs an agent on a task: turns, limits, the reward, and what becomes of errors."""

    def __init__(
        self,
        agent: Agent,
        begin: Callable[..., Session],
        reward: Reward | None,
        driver: Driver,
        concurrency: int,
        seconds: float | None,
        shape: Shaping | None,
    ) -> None:
        self._agent = agent
        self._begin = begin
        self._reward = reward
        self._driver = driver
        self._slots = asyncio.Semaphore(concurrency)
        self._seconds = seconds
        self._shape = shape or (lambda replies: 0.0)

    async def attempt(self, task: Task, place: Place, pool: WorkerPool) -> _Attempt:
        """One rollout. What the agent or the reward raises makes it a failed one."""
        pool.use()
        index = place[1]
        session = self._begin(task_id=task.id, index=index, turn=partial(self._driver.turn, place))
        reward_seconds = 0.0
        started = perf_counter()
        try:
            outcome = await self._outcome(task, session, place)
            agent_seconds = perf_counter() - started
            value = await self._value(task, outcome)
            reward_seconds = perf_counter() - started - agent_seconds
            times = {"agent": agent_seconds, "calls": session.seconds, "reward": reward_seconds}
            shaped = value + self._shape(session.replies)
            rollout = _rollout(task.id, index, outcome, value, shaped, session, times)
            error = None
        except (Exception, SystemExit) as raised:
            error = raised
            rollout = Rollout(
                task_id=task.id,
                index=index,
                samples=(),
                reward=0.0,
                status="failed",
                error=_reason(error),
                record={"traceback": "".join(traceback.format_exception(error))},
            )
        return _Attempt(
            rollout=rollout,
            usage=session.usage,
            call_seconds=session.seconds,
            reward_seconds=reward_seconds,
            error=error,
        )

    async def _outcome(self, task: Task, session: Session, place: Place) -> Outcome:
        async with self._slots:
            self._driver.enter(place)
            try:
                async with _limit(self._seconds, "the agent"):
                    outcome: object = await self._agent(task, Client(session))
            finally:
                self._driver.leave(place)
        return checked_outcome(outcome, session)

    async def _value(self, task: Task, outcome: Outcome) -> float:
        async with _limit(self._seconds, "the reward"):
            return await reward_of(task, outcome, self._reward)


def checked_outcome(outcome: object, session: Session) -> Outcome:
    """What an agent returned. Raises ConfigError when nothing can be learnt from it."""
    if not isinstance(outcome, Outcome) or not isinstance(outcome.answer, str):
        raise ConfigError(
            f"the agent returned {type(outcome).__name__}; return Outcome(answer=TEXT)"
        )
    if not session.usage.calls:
        raise ConfigError("the agent returned without a call of the client")
    try:
        json.dumps(dict(outcome.record))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the record of an outcome must be plain JSON: {error}") from None
    return outcome


async def reward_of(task: Task, outcome: Outcome, reward: Reward | None) -> float:
    """What an outcome is worth: by the agent's own word, else by the reward."""
    if outcome.reward is not None:
        return checked_reward(outcome.reward, "the agent")
    if reward is None:
        raise ConfigError(
            "the agent gives no reward; name a reward function, or return Outcome(reward=NUMBER)"
        )
    return await reward(task, outcome)


@asynccontextmanager
async def _limit(seconds: float | None, what: str) -> AsyncIterator[None]:
    """Raise EngineError when what is inside takes longer."""
    timer = asyncio.timeout(seconds)
    try:
        async with timer:
            yield
    except TimeoutError:
        if not timer.expired():  # one of the agent's own
            raise
        raise EngineError(f"{what} took longer than {seconds:g} s") from None


def _rollout(
    task_id: str,
    index: int,
    outcome: Outcome,
    score: float,
    reward: float,
    session: Session,
    times: Mapping[str, float],
) -> Rollout:
    samples = session.recorder.samples()
    usage = session.usage
    return Rollout(
        task_id=task_id,
        index=index,
        samples=samples,
        reward=reward,
        metrics={
            **{name: float(value) for name, value in outcome.metrics.items()},
            "score": score,
            "calls": float(usage.calls),
            "rows": float(len(samples)),
            "prompt_tokens": float(usage.prompt_tokens),
            "sampled_tokens": float(usage.completion_tokens),
            **{f"time/{name}": value for name, value in times.items()},
        },
        record={"answer": outcome.answer, **outcome.record},
    )


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, MemagentError) else error_line(error)

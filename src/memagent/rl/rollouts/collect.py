"""Collect rollouts: run an agent on tasks, several times each, and yield groups as they finish.

    tasks ──▶ G rollouts each ──▶ agent ──▶ reward ──▶ Group ──▶ wanted? ──▶ yielded
                                                                    │ no
                                                                    └──▶ the next task instead

    spec = RolloutSpec(agent=agent, reward=open_reward("strict"), group_size=16)
    async with Collection(tasks, engine, spec, num_groups=128) as groups:
        async for group in groups:
            ...
    groups.stats.usage, groups.stats.num_failed

A rollout that raises is a failed Rollout with its reason; when several tasks fail in a row, the collection
stops with the last reason. Which tasks are run does not depend on timing: a task is drawn for each group
that is needed and for each one that was replaced.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, Self

from memagent.agent.trace import Trace
from memagent.errors import (
    ConfigError,
    DataError,
    EmptyAnswer,
    EngineError,
    MemagentError,
    PromptTooLong,
)
from memagent.plugins import error_line, is_failure
from memagent.rl.agents.api import Agent, check_outcome
from memagent.rl.agents.client import Client
from memagent.rl.agents.offload import WorkerPool
from memagent.rl.agents.recorder import call_of
from memagent.rl.agents.rewards import Reward, checked_reward
from memagent.rl.agents.session import RunSampling, Session
from memagent.rl.rollouts.drivers import Driver, DriverName, RolloutKey, open_driver
from memagent.rl.types import AgentTask, FailedBy, Group, Outcome, Rollout
from memagent.types import Engine, Sampling, Usage

NETWORK_LIBRARIES = ("aiohttp", "concurrent", "http", "httpcore", "httpx", "openai", "urllib3")
"""Errors of these mean an outage, not a reply that cannot be used."""
STOP_AFTER = 4
"""This many tasks in a row without a success mean that the tasks are not the cause."""

Shaping = Callable[[Sequence[tuple[int, int]]], float]
"""What the lengths of replies, each with its limit, add to a reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """How rollouts are run; the same for all tasks of a run."""

    agent: Agent
    group_size: int
    """Rollouts of each task."""
    reward: Reward | None = None
    """None where the agent returns its own."""
    driver: DriverName = "free"
    seed: int = 0
    sampling: RunSampling = field(default_factory=RunSampling)
    concurrency: int = 1024
    """Rollouts that run at once, at most."""
    seconds: float | None = None
    """Time limit of an agent, and of a reward; None sets no limit."""
    stop_after: int = STOP_AFTER
    """Stop when all rollouts of this many tasks in a row have failed."""
    shape: Shaping | None = None
    """Added to a reward."""
    failure_reward: float | None = None
    """Reward of rollouts that the policy's replies made fail; None leaves them out of their group."""
    needs_tokens: bool = True
    """False accepts engines that return no tokens; rollouts have no rows then."""

    def __post_init__(self) -> None:
        for name in ("group_size", "concurrency"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"`{name}={value}` runs no rollout; set it to 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStats:
    """Counts of a collection so far."""

    num_groups: int = 0
    """Groups that are wanted."""
    num_unwanted: int = 0
    """Groups that were replaced by other tasks."""
    num_rollouts: int = 0
    """Finished rollouts, failed ones included, reused ones not."""
    num_failed: int = 0
    usage: Usage = field(default_factory=Usage)
    """Tokens of all finished rollouts."""
    seconds: float = 0.0
    """Since the first rollout started."""

    @property
    def sampled_tokens_per_second(self) -> float:
        """Sampled tokens of all rollouts per second."""
        return self.usage.completion_tokens / self.seconds if self.seconds else 0.0


OnRollout = Callable[[Rollout, RolloutStats], None]
"""Called with each rollout as it finishes."""


async def check_engine(engine: Engine) -> None:
    """Make one short call. Raises EngineRefused when the engine does not return what training needs."""
    completion = await engine.complete(
        [{"role": "user", "content": "Hello."}], Sampling(max_tokens=1)
    )
    call_of(completion, model=engine.model, policy_version=0)


async def check_agent(
    agent: Agent,
    task: AgentTask,
    engine: Engine,
    *,
    sampling: RunSampling,
    seconds: float | None = None,
) -> None:
    """Run an agent once, on a task. Raises ConfigError when every rollout would fail as this one does.

    That is when it returns no Outcome, raises before its first call, or asks for what the run does not
    allow. Errors after a reply may be due to the reply, and say nothing about other rollouts.
    """
    session = Session(engine, task_id=task.id, index=0, seed=0, sampling=sampling)
    try:
        async with _limit(seconds, "the agent"):
            outcome = await run_agent(agent, task, session, open_driver("free", engine), (0, 0))
        if outcome.reward is not None:
            checked_reward(outcome.reward, "the agent")
    except ConfigError as error:
        raise ConfigError(f"{error} (tried on {task.id})") from None
    except (Exception, SystemExit) as error:
        if not session.usage.calls and not isinstance(error, MemagentError):
            raise ConfigError(
                f"the agent fails on {task.id} before its first call: {error_line(error)}"
            ) from None


class Collection:
    """Groups of rollouts as they finish, and counts. Leaving its `async with` cancels what is still running."""

    def __init__(
        self,
        tasks: Iterable[AgentTask],
        engine: Engine,
        spec: RolloutSpec,
        *,
        num_groups: int | None = None,
        is_wanted: Callable[[Group], bool] | None = None,
        max_unwanted: int | None = None,
        may_start: Callable[[], bool] | None = None,
        finished: Iterable[Rollout] = (),
        on_rollout: OnRollout | None = None,
        pool: WorkerPool | None = None,
        policy_version: int = 0,
    ) -> None:
        """Nothing starts before the first group is awaited.

        num_groups       how many to yield; None runs each task once
        is_wanted        which groups to yield; the others are replaced
        max_unwanted     how many to replace, at most; then there may be fewer than `num_groups`
        may_start        whether a further task may start now; `Collection.wake` has it asked again
        finished         rollouts of an earlier run, to be reused
        pool             processes for `offload` that outlive the collection; None uses its own
        policy_version   of the weights, where the engine reports none
        """
        self._tasks = iter(tasks)
        self._attempts = _Attempts(spec, engine, policy_version)
        self._group_size = spec.group_size
        self._stop_after = spec.stop_after
        self._max_open = -(-spec.concurrency // spec.group_size) + 1
        """Groups that are collected at once, at most."""
        self._num_groups = num_groups
        self._is_wanted = is_wanted or (lambda group: True)
        self._max_unwanted = max_unwanted
        self._may_start = may_start or (lambda: True)
        self._is_held = False
        """Whether a task waits until it may start."""
        self._finished = {(rollout.task_id, rollout.index): rollout for rollout in finished}
        self._on_rollout = on_rollout
        self._pool = pool or WorkerPool()
        self._owns_pool = pool is None
        self._open: dict[str, list[Rollout | None]] = {}
        """Rollouts of unfinished groups, by task."""
        self._running: dict[asyncio.Task[_Attempt], tuple[str, int]] = {}
        self._done: asyncio.Queue[asyncio.Task[_Attempt] | None] = asyncio.Queue()
        """Finished ones of `_running`; `asyncio.wait` on all of them each time would be slow. None: `wake`."""
        self._ready: deque[Group] = deque()
        self._order: dict[str, int] = {}
        """Position of each task, by id."""
        self._num_failed_in_a_row = 0
        """Tasks without a successful rollout since the last success."""
        self._last_error: BaseException | None = None
        self._started: float | None = None
        self.stats = RolloutStats()

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
                if not self._running and not self._is_held:
                    await self.aclose()
                    raise StopAsyncIteration
                done = await self._done.get()
                if done is not None:
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

    def wake(self) -> None:
        """Ask `may_start` again."""
        self._done.put_nowait(None)

    def restart_stats(self) -> None:
        """Count from zero, as at the start of a step."""
        self.stats = RolloutStats()
        self._started = perf_counter()

    async def aclose(self) -> None:
        """Cancel what is still running. Unfinished rollouts are discarded."""
        running, self._running = list(self._running), {}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._owns_pool:
            await asyncio.to_thread(self._pool.close)

    def _draw(self) -> None:
        """Start further tasks while they are needed and there is room."""
        self._is_held = False
        wanted, spare = self._num_groups, self._max_unwanted
        while len(self._open) < self._max_open:
            if wanted is not None and self.stats.num_groups + len(self._open) >= wanted:
                return
            if wanted is not None and spare is not None and len(self._order) >= wanted + spare:
                return
            if not self._may_start():
                self._is_held = True
                return
            task = next(self._tasks, None)
            if task is None:
                self._tasks = iter(())
                return
            self._start(task)

    def _start(self, task: AgentTask) -> None:
        if task.id in self._order:
            raise DataError(
                f"the task id {task.id} occurs twice; ids must be unique within a collection"
            )
        self._order[task.id] = len(self._order)
        if self._started is None:
            self._started = perf_counter()
        rollouts: list[Rollout | None] = [
            self._finished.get((task.id, index)) for index in range(self._group_size)
        ]
        self._open[task.id] = rollouts
        for index, found in enumerate(rollouts):
            if found is None:
                key = (self._order[task.id], index)
                attempt = asyncio.ensure_future(self._attempts.attempt(task, key, self._pool))
                attempt.add_done_callback(self._done.put_nowait)
                self._running[attempt] = (task.id, index)
        self._close_group(task.id)

    def _take(self, task_id: str, index: int, attempt: _Attempt) -> None:
        rollout = attempt.rollout
        self._open[task_id][index] = rollout
        self._last_error = attempt.error or self._last_error
        if rollout.is_ok:
            self._num_failed_in_a_row = 0
        assert self._started is not None
        before = self.stats
        self.stats = replace(
            before,
            num_rollouts=before.num_rollouts + 1,
            num_failed=before.num_failed + (not rollout.is_ok),
            usage=before.usage + attempt.usage,
            seconds=perf_counter() - self._started,
        )
        if self._on_rollout:
            self._on_rollout(rollout, self.stats)
        self._close_group(task_id)
        if self._num_failed_in_a_row >= self._stop_after:
            kind = EngineError if _is_outage(self._last_error) else ConfigError
            raise kind(
                f"all rollouts of {self._num_failed_in_a_row} tasks in a row failed, the last with: "
                f"{rollout.error}"
            )

    def _close_group(self, task_id: str) -> None:
        rollouts = [rollout for rollout in self._open[task_id] if rollout is not None]
        if len(rollouts) < self._group_size:
            return
        del self._open[task_id]
        group = Group(task_id=task_id, rollouts=tuple(rollouts))
        self._num_failed_in_a_row += not group.ok
        if self._is_wanted(group):
            self._ready.append(group)
            self.stats = replace(self.stats, num_groups=self.stats.num_groups + 1)
        else:
            self.stats = replace(self.stats, num_unwanted=self.stats.num_unwanted + 1)


# --- one rollout ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """A finished rollout, and what it took."""

    rollout: Rollout
    usage: Usage
    error: BaseException | None = None


class _Attempts:
    """Runs an agent on a task: turns, limits, the reward, and errors."""

    def __init__(self, spec: RolloutSpec, engine: Engine, policy_version: int) -> None:
        self._spec = spec
        self._engine = engine
        self._driver = open_driver(spec.driver, engine)
        self._policy_version = policy_version
        self._slots = asyncio.Semaphore(spec.concurrency)

    async def attempt(self, task: AgentTask, key: RolloutKey, pool: WorkerPool) -> _Attempt:
        """One rollout. It fails if the agent or the reward raises."""
        pool.use()
        spec = self._spec
        session = Session(
            self._engine,
            task_id=task.id,
            index=key[1],
            seed=spec.seed,
            sampling=spec.sampling,
            turn=partial(self._driver.turn, key),
            needs_tokens=spec.needs_tokens,
            policy_version=self._policy_version,
        )
        started = perf_counter()
        outcome = None
        try:
            async with self._slots, _limit(spec.seconds, "the agent"):
                outcome = await run_agent(spec.agent, task, session, self._driver, key)
            answered = perf_counter()
            async with _limit(spec.seconds, "the reward"):
                reward = await reward_of(task, outcome, spec.reward)
            times = {
                "agent": answered - started,
                "calls": session.seconds,
                "reward": perf_counter() - answered,
            }
            samples = session.recorder.samples()
            rollout = Rollout(
                task_id=task.id,
                index=key[1],
                samples=samples,
                reward=reward if spec.shape is None else reward + spec.shape(session.replies),
                trace=outcome.trace,
                metrics={
                    **{name: float(value) for name, value in outcome.metrics.items()},
                    "unshaped_reward": reward,
                    "calls": float(session.usage.calls),
                    "rows": float(len(samples)),
                    "prompt_tokens": float(session.usage.prompt_tokens),
                    "sampled_tokens": float(session.usage.completion_tokens),
                    **{f"time/{name}": value for name, value in times.items()},
                },
                record=dict(outcome.record),
            )
            error = None
        except (Exception, SystemExit, asyncio.CancelledError) as raised:
            if not is_failure(raised):
                raise
            error = raised
            failed_by = "machine" if outcome is not None else who_failed(error, session)
            value = spec.failure_reward if failed_by == "policy" else None
            rollout = Rollout(
                task_id=task.id,
                index=key[1],
                samples=() if value is None else session.recorder.samples(),
                reward=0.0 if value is None else value,
                status="failed",
                failed_by=failed_by,
                is_penalised=value is not None,
                error=str(error) if isinstance(error, MemagentError) else error_line(error),
                trace=session.trace(task, None),
                record={"traceback": "".join(traceback.format_exception(error))},
            )
        return _Attempt(rollout=rollout, usage=session.usage, error=error)


async def run_agent(
    agent: Agent, task: Any, session: Session, driver: Driver, key: RolloutKey
) -> Outcome:
    """The outcome of an agent, with a trace. Raises ConfigError when the agent returns something else."""
    driver.enter(key)
    try:
        outcome: object = await agent(task, Client(session))
    finally:
        driver.leave(key)
    checked = check_outcome(outcome)
    if not session.usage.calls:
        raise ConfigError("the agent returned without a call of the client")
    trace = session.trace(task, checked.answer) if checked.trace is None else checked.trace
    if not isinstance(trace, Trace) or trace.answer != checked.answer:
        raise ConfigError("the trace of an outcome must be a Trace that ends with its answer")
    return replace(checked, trace=trace)


async def reward_of(task: AgentTask, outcome: Outcome, reward: Reward | None) -> float:
    """The reward of an outcome: the agent's own if it returned one."""
    if outcome.reward is not None:
        return checked_reward(outcome.reward, "the agent")
    if reward is None:
        raise ConfigError(
            "the agent returns no reward; name a reward, or return Outcome(reward=NUMBER)"
        )
    return await reward(task, outcome)


@asynccontextmanager
async def _limit(seconds: float | None, what: str) -> AsyncIterator[None]:
    """Raise EngineError when the body takes longer."""
    timer = asyncio.timeout(seconds)
    try:
        async with timer:
            yield
    except TimeoutError:
        if not timer.expired():  # raised by the agent itself
            raise
        raise EngineError(f"{what} took longer than {seconds:g} s") from None


def who_failed(error: BaseException, session: Session) -> FailedBy:
    """Who made an agent raise.

    The policy: a prompt that outgrew the window, an empty answer, or an error of the agent's own code
    after a reply. The machine: an engine, a connection, a time limit, a worker process, a wrong setting, or
    any error before the first reply.
    """
    if not session.usage.calls:
        return "machine"
    if isinstance(error, PromptTooLong | EmptyAnswer):
        return "policy"
    is_machine = isinstance(error, MemagentError | MemoryError | ImportError | SystemExit)
    return "machine" if is_machine or _is_outage(error) else "policy"


def _is_outage(error: BaseException | None) -> bool:
    """Whether an engine, a tool or a worker process cannot be reached or has ended."""
    library = type(error).__module__.partition(".")[0]
    return isinstance(error, EngineError | OSError) or library in NETWORK_LIBRARIES

"""Drivers and the pool: when calls are sent, and that slow work delays no other rollout."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from memagent.errors import ConfigError, EngineError
from memagent.plugins import load_function
from memagent.rl.agents.client import Client, all_or_none
from memagent.rl.agents.offload import WorkerPool, offload
from memagent.rl.rollouts.drivers import Lockstep, RolloutKey, open_driver
from memagent.rl.types import Outcome, Rollout
from memagent.types import Message
from tests.support.collecting import collecting
from tests.support.jobs import Job, jobs
from tests.support.processes import is_running, kill_after
from tests.support.sizes import sized
from tests.support.timing import settle, wait_until
from tests.support.token_engine import TokenScript, TokenTakingScript, random_reply


async def turns(task: Job, client: Client) -> Outcome:
    """As many turns as the task says, in one conversation; the last reply counts."""
    messages: list[Any] = [{"role": "user", "content": f"{task.id} begins"}]
    for number in range(task.num_turns):
        reply = await client.chat.completions.create(messages=messages)
        messages += [reply.choices[0].message, {"role": "user", "content": f"turn {number}"}]
    return Outcome(answer=messages[-2].content, reward=float(len(messages)))


async def branches(task: Job, client: Client) -> Outcome:
    """Conversations at the same time, of different lengths."""

    async def branch(number: int) -> str:
        messages: list[Any] = [{"role": "user", "content": f"{task.id} branch {number}"}]
        for _ in range(number + 1):
            reply = await client.chat.completions.create(messages=messages)
            messages += [reply.choices[0].message, {"role": "user", "content": "more"}]
        return str(messages[-2].content)

    said = await asyncio.gather(*(branch(number) for number in range(3)))
    return Outcome(answer=" ".join(said), reward=1.0)


def uneven(messages: Sequence[Message]) -> float:
    """Seconds that differ from call to call, so that free calls come back in any order."""
    return 0.002 * (crc32(str(messages).encode()) % 5)


def without_times(rollout: Rollout) -> dict[str, Any]:
    metrics = {k: v for k, v in rollout.metrics.items() if not k.startswith("time/")}
    return {
        "id": (rollout.task_id, rollout.index),
        "samples": sorted(rollout.samples, key=lambda sample: sample.ids),
        "reward": rollout.reward,
        "metrics": metrics,
        "answer": rollout.answer,
    }


@pytest.mark.parametrize("agent", [turns, branches])
@pytest.mark.parametrize("engine_class", [TokenScript, TokenTakingScript])
async def test_lockstep_and_free_produce_the_same_rollouts(
    agent: Any, engine_class: type[TokenScript]
) -> None:
    found = {}
    for driver, concurrency in (("free", 64), ("free", 3), ("lockstep", 64), ("lockstep", 5)):
        engine = engine_class(random_reply, delay=uneven)
        groups = await collecting(
            jobs(5), agent, engine, group_size=3, driver=driver, seed=9, concurrency=concurrency
        ).all()
        found[driver, concurrency] = [
            without_times(rollout) for group in groups for rollout in group.rollouts
        ]
    first, *others = found.values()
    assert len(first) == 15
    assert len({rollout["answer"] for rollout in first}) == 15
    assert all(other == first for other in others)


async def test_another_seed_gives_other_rollouts() -> None:
    answers = set()
    for seed in (1, 2):
        (group,) = await collecting(
            jobs(1), turns, TokenScript(random_reply), group_size=2, seed=seed
        ).all()
        answers |= {rollout.answer for rollout in group.rollouts}
    assert len(answers) == 4


async def test_lockstep_sends_every_turn_of_the_batch_together() -> None:
    engine = TokenScript(random_reply, delay=uneven)
    collection = collecting(jobs(4), turns, engine, group_size=2, driver="lockstep")
    await collection.all()
    driver = collection._attempts._driver
    assert isinstance(driver, Lockstep)
    # jobs have 1, 2, 3 and 4 turns, and two rollouts each
    assert driver.batches == [8, 6, 4, 2]
    assert engine.most_at_once == 8


async def test_free_calls_do_not_wait() -> None:
    order: list[str] = []

    async def agent(task: Job, client: Client) -> Outcome:
        outcome = await turns(task, client)
        order.append(task.id)
        return outcome

    slow_first = [Job(id="slow", num_turns=6), Job(id="quick", num_turns=1)]
    await collecting(slow_first, agent, TokenScript(random_reply), group_size=1).all()
    assert order == ["quick", "slow"]


async def test_no_more_rollouts_run_at_once_than_allowed() -> None:
    engine = TokenScript(random_reply, delay=lambda messages: 0.001)
    await collecting(jobs(6), turns, engine, group_size=4, concurrency=5).all()
    assert engine.most_at_once == 5


A, B, C = (0, 0), (0, 1), (1, 0)


async def call(driver: Lockstep, rollout: RolloutKey) -> None:
    """A call that has its reply as soon as it may leave."""
    async with driver.turn(rollout):
        pass


def entered(*rollouts: RolloutKey, engine: Any = None) -> Lockstep:
    driver = Lockstep(engine)
    for rollout in rollouts:
        driver.enter(rollout)
    return driver


async def test_a_rollout_that_fails_or_is_cancelled_delays_no_batch() -> None:
    driver = entered(A, B, C)
    waiting = {rollout: asyncio.ensure_future(call(driver, rollout)) for rollout in (A, B)}
    await settle()
    assert not any(task.done() for task in waiting.values())
    waiting[A].cancel()
    driver.leave(A)
    driver.leave(C)
    await asyncio.wait_for(waiting[B], 60)
    assert driver.batches == [1]


async def test_a_batch_waits_for_a_rollout_that_enters_at_the_same_moment() -> None:
    driver = entered(A)
    first = asyncio.ensure_future(call(driver, A))
    await asyncio.sleep(0)  # all that were live wait now, and the batch is about to leave
    driver.enter(B)
    await settle()
    assert not first.done()
    await asyncio.gather(first, call(driver, B))
    assert driver.batches == [2]


async def test_a_waiting_call_of_a_finished_rollout_does_not_count_for_another() -> None:
    driver = entered(A, B, C)
    behind = asyncio.ensure_future(call(driver, A))
    await asyncio.sleep(0)
    driver.leave(A)
    second = asyncio.ensure_future(call(driver, B))
    await settle()
    assert not behind.done()
    assert not second.done()
    await asyncio.gather(behind, second, call(driver, C))
    assert driver.batches == [3]


async def test_a_batch_waits_for_calls_in_flight() -> None:
    """A rollout makes two calls at once and continues with the first; the next batch holds both."""
    driver = entered(A)
    reply = asyncio.Event()

    async def slow() -> None:
        async with driver.turn(A):
            await reply.wait()

    async def quick() -> None:
        await call(driver, A)
        await call(driver, A)

    both = asyncio.gather(slow(), quick())
    await settle()
    assert driver.batches == [2]
    reply.set()
    await both
    assert driver.batches == [2, 1]


class Holding:
    """Notes what comes while it is held, and what comes at other times."""

    def __init__(self) -> None:
        self.held: list[list[str]] = []
        self.others: list[str] = []
        self.fresh: list[bool] = []
        self._num_holds = 0

    @contextmanager
    def hold(self, *, fresh: bool = False) -> Iterator[None]:
        self._num_holds += 1
        self.held.append([])
        self.fresh.append(fresh)
        yield
        self._num_holds -= 1

    def submit(self, name: str) -> None:
        (self.held[-1] if self._num_holds else self.others).append(name)


async def test_calls_reach_a_held_engine_in_the_order_of_tasks() -> None:
    engine = Holding()
    driver = entered(C, B, A, engine=engine)

    async def ask(rollout: RolloutKey, name: str) -> None:
        async with driver.turn(rollout):
            engine.submit(name)

    async def two(rollout: RolloutKey, name: str) -> None:
        await asyncio.gather(ask(rollout, f"{name}1"), ask(rollout, f"{name}2"))
        await ask(rollout, f"{name}3")
        driver.leave(rollout)

    await asyncio.gather(two(C, "c"), two(A, "a"), two(B, "b"))
    assert engine.held == [["a1", "a2", "b1", "b2", "c1", "c2"], ["a3", "b3", "c3"]]
    assert engine.fresh == [True, False]
    assert engine.others == []
    await settle()
    engine.submit("later")
    assert engine.others == ["later"]


async def test_calls_that_a_refused_call_cancels_are_cancelled_before_the_engine_starts() -> None:
    engine = Holding()
    driver = entered(A, engine=engine)

    async def refused() -> None:
        async with driver.turn(A):
            raise EngineError("too long")

    async def taken_back() -> None:
        async with driver.turn(A):
            try:
                await asyncio.sleep(60)
            finally:
                engine.submit("taken back")

    with pytest.raises(EngineError, match="too long"):
        await all_or_none([taken_back(), refused()])  # type: ignore[list-item]
    await settle()
    assert engine.held == [["taken back"]]


async def test_a_slow_reward_delays_no_other_rollout(tmp_path: Path) -> None:
    """One reward waits in its process until all other groups are done."""
    file, done = tmp_path / "rewards.py", tmp_path / "done"
    file.write_text(
        "import os, time\n"
        "def score(task, outcome):\n"
        f"    while task.id == 'job0' and not os.path.exists({str(done)!r}):\n"
        "        time.sleep(0.01)\n"
        "    return 1.0\n"
    )
    score = load_function(f"{file}:score", what="reward", parameters=("task", "outcome"))

    async def reward(task: Any, outcome: Outcome) -> float:
        return float(await offload(score, task, outcome))

    async def agent(task: Job, client: Client) -> Outcome:
        return Outcome(answer=(await turns(task, client)).answer)

    for driver in ("free", "lockstep"):
        finished: list[str] = []
        with WorkerPool(2) as pool:
            await asyncio.gather(*(pool.run(time.sleep, 0.3) for _ in range(2)))  # both are there
            async with collecting(
                jobs(4),
                agent,
                TokenScript(random_reply),
                group_size=1,
                driver=driver,  # type: ignore[arg-type]
                reward=reward,
                pool=pool,
                concurrency=1,
            ) as groups:
                async for group in groups:
                    finished.append(group.task_id)
                    if len(finished) == 3:
                        done.touch()
        assert finished[-1] == "job0"  # it began first, and the others ran one by one
        done.unlink()


async def test_the_event_loop_runs_while_a_function_computes() -> None:
    with WorkerPool(1) as pool:
        worker = await pool.run(os.getpid)
        pool.use()
        os.kill(worker, signal.SIGSTOP)
        computing = asyncio.ensure_future(offload(sum, range(1000)))
        await settle()
        assert not computing.done()
        os.kill(worker, signal.SIGCONT)
        assert await computing == 499500


async def test_functions_of_a_users_file_run_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("FACTOR = 3\n")
    file = tmp_path / "tools.py"
    file.write_text(
        "import os\nfrom beside import FACTOR\n"
        "def tripled(x):\n    return FACTOR * x, os.getpid()\n"
        "def broken():\n    raise ValueError('no good')\n"
    )
    tripled = load_function(f"{file}:tripled", what="tool", parameters=("x",))
    broken = load_function(f"{file}:broken", what="tool", parameters=())
    with WorkerPool(1) as pool:
        value, process = await pool.run(tripled, 14)
        assert value == 42
        assert process != os.getpid()
        with pytest.raises(ValueError, match="no good"):
            await pool.run(broken)


async def test_a_lambda_is_refused_and_a_dead_worker_is_replaced() -> None:
    with WorkerPool(1) as pool:
        with pytest.raises(ConfigError, match="cannot be sent to another process"):
            await pool.run(lambda: 1)
        with pytest.raises(EngineError, match="a worker process died"):
            await pool.run(os._exit, 1)
        assert await pool.run(abs, -3) == 3


async def test_workers_killed_at_whatever_moment_fail_their_own_functions_only() -> None:
    rng, killed = random.Random(1), set()
    with WorkerPool(2) as pool:
        await pool.run(abs, -3)
        assert pool._executor is not None
        workers = pool._executor._workers
        for _ in range(sized(2, 20)):
            running = [pool.run(sum, range(number, 2_000_000)) for number in range(6)]
            victim = next(one.process for one in workers.values() if one.process.is_alive())
            killed.add(victim.pid)
            timer = kill_after(rng.uniform(0, 0.4), lambda victim=victim: [victim.pid])
            results = await asyncio.gather(*running, return_exceptions=True)
            timer.join()
            failed = [one for one in results if not isinstance(one, int)]
            assert all("a worker process died" in str(one) for one in failed)
            assert len(failed) <= 1
            wait_until(lambda victim=victim: not victim.is_alive())
            assert await pool.run(abs, -3) == 3
    assert len(killed) == sized(2, 20)
    assert not any(map(is_running, killed))


async def test_a_function_that_hangs_does_not_keep_the_pool_from_closing() -> None:
    pool = WorkerPool(1)
    await pool.run(os.getpid)
    hanging = asyncio.ensure_future(pool.run(time.sleep, 600))
    await asyncio.sleep(0.1)
    hanging.cancel()
    pool.close()  # or the time limit of the tests ends this one


async def test_without_a_pool_functions_run_in_a_thread() -> None:
    assert await offload(abs, -2) == 2


def test_an_unknown_driver_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="there is no driver 'lockstepp'; did you mean lockstep"):
        open_driver("lockstepp", TokenScript(random_reply))

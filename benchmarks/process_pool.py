"""Rewards that compute for long: in the pool of processes against in the driver.

    python -m benchmarks.process_pool [--cluster] [--rewards 64] [--seconds 0.2]

While 64 rewards of 200 ms CPU each are computed, a probe measures how late the driver's event loop is, and calls
of a simulated engine go on: 32 at a time, 50 ms each. `offload` is what agents, tools and rewards call. With
--cluster the processes are those of a Ray cluster that is started on this machine, one actor per node.

Printed: the delay of the event loop (median, 99th percentile, largest), the calls that finished per second while
rewards were computed, as a share of those without rewards, and the ratios of the two ways.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass

from memagent.rl.agents.offload import WorkerPool, offload

PROBE_SECONDS = 0.005
CALLS, CALL_SECONDS = 32, 0.05
IDLE_SECONDS = 3.0


def reward(cpu_seconds: float) -> float:
    """Computes for so much CPU time, as a symbolic check of a formula does."""
    end = time.process_time() + cpu_seconds
    total = 0
    while time.process_time() < end:
        total += sum(number * number for number in range(2000))
    return float(total > 0)


@dataclass(frozen=True)
class Measured:
    """One way."""

    seconds: float
    delays: list[float]
    """How late the event loop was, each time, in seconds."""
    calls_per_second: float

    def delay(self, share: float) -> float:
        """A percentile of the delays, in milliseconds."""
        return sorted(self.delays)[min(int(share * len(self.delays)), len(self.delays) - 1)] * 1e3


async def measured(work: Awaitable[object]) -> Measured:
    """The event loop while some work is done."""
    delays: list[float] = []
    num_calls = 0

    async def probe() -> None:
        while True:
            due = time.perf_counter() + PROBE_SECONDS
            await asyncio.sleep(PROBE_SECONDS)
            delays.append(time.perf_counter() - due)

    async def call() -> None:
        nonlocal num_calls
        while True:
            await asyncio.sleep(CALL_SECONDS)
            num_calls += 1

    others = [
        asyncio.ensure_future(probe()),
        *(asyncio.ensure_future(call()) for _ in range(CALLS)),
    ]
    started = time.perf_counter()
    await asyncio.sleep(0)
    await work
    await asyncio.sleep(0)
    seconds = time.perf_counter() - started
    for task in others:
        task.cancel()
    return Measured(seconds, delays or [seconds], num_calls / seconds)


async def in_driver(cpu_seconds: float) -> float:
    """What a reward costs without a pool."""
    return reward(cpu_seconds)


async def many(
    one: Callable[[float], Awaitable[float]], num: int, cpu_seconds: float
) -> list[float]:
    """All rewards at once, as they arrive when rollouts finish."""
    return await asyncio.gather(*(one(cpu_seconds) for _ in range(num)))


async def in_pool(cpu_seconds: float) -> float:
    """Through `offload`, by a name that other processes can import."""
    from benchmarks import process_pool

    return await offload(process_pool.reward, cpu_seconds)


def open_pool(stack: ExitStack, *, on_cluster: bool) -> WorkerPool:
    """Processes of this machine, or of a cluster on it."""
    if not on_cluster:
        return stack.enter_context(WorkerPool())
    from memagent.cluster import open_cluster

    cluster = stack.enter_context(open_cluster(object_store_gb=0.2))
    return stack.enter_context(WorkerPool.on_cluster(cluster))


async def compare(num: int, cpu_seconds: float, *, on_cluster: bool) -> None:
    """Both ways in one run."""
    with ExitStack() as stack:
        pool = open_pool(stack, on_cluster=on_cluster)
        pool.use()
        await many(in_pool, pool.num_workers, 0.01)  # the processes start
        idle = await measured(asyncio.sleep(IDLE_SECONDS))
        pooled = await measured(many(in_pool, num, cpu_seconds))
    driver = await measured(many(in_driver, num, cpu_seconds))
    print(f"{num} rewards of {cpu_seconds * 1e3:.0f} ms CPU")
    print(
        "                 delay of the loop in ms: median     p99     max   calls/s   of idle   seconds"
    )
    for name, one in (("no rewards", idle), ("in the pool", pooled), ("in the driver", driver)):
        print(
            f"{name:>14}   {one.delay(0.5):30.1f} {one.delay(0.99):7.1f} {one.delay(1.0):7.0f} "
            f"{one.calls_per_second:9.0f} {one.calls_per_second / idle.calls_per_second:9.0%} "
            f"{one.seconds:9.1f}"
        )
    print(
        f"in the driver against in the pool: p99 delay {driver.delay(0.99) / pooled.delay(0.99):.0f}x, "
        f"calls {driver.calls_per_second / pooled.calls_per_second:.3f}x"
    )


def main() -> None:
    """Parse options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cluster", action="store_true", help="processes of a Ray cluster")
    parser.add_argument("--rewards", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.2, help="CPU time of each")
    options = parser.parse_args()
    asyncio.run(compare(options.rewards, options.seconds, on_cluster=options.cluster))


if __name__ == "__main__":
    main()

"""Time in tests, on machines that may be busy with something else.

    wait_until(path.exists)                              # returns as soon as it is true
    await eventually(lambda: engine.load.num_running)    # the same in an event loop
    assert growth(work, 1_000, 10_000) < 30              # 10 times the input, at most 30 times the work
    assert cpu_seconds(load) < 5 * cpu_seconds(read)     # relative to something simpler

Costs are CPU time of this process, the best of several runs: other processes hardly change it. Bounds are
relative, because machines differ.
"""

import asyncio
import re
import time
from collections.abc import Callable

PATIENCE = 240.0
"""Seconds to wait for something that takes milliseconds on an idle machine."""
SHORTEST = 1e-3
"""Seconds that count for anything shorter, so that ratios are not those of the clock's resolution."""
IF_SLOW = re.compile(
    r"(opening|loading) |section \d+ of |[\d,]+ of (about )?[\d,]+ (items|sections)(,|$)"
)
"""Lines that commands print only where a step takes long."""


def wait_until(is_true: Callable[[], object], *, seconds: float = PATIENCE) -> None:
    """Wait until a condition holds; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, f"still not true after {seconds} s: {is_true}"
        time.sleep(0.003)


async def eventually(is_true: Callable[[], object], *, seconds: float = PATIENCE) -> None:
    """`wait_until` in an event loop, whose other tasks run meanwhile."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, f"still not true after {seconds} s: {is_true}"
        await asyncio.sleep(0.002)


async def settle(num_turns: int = 50) -> None:
    """Let the tasks of this event loop run until they wait for something outside it."""
    for _ in range(num_turns):
        await asyncio.sleep(0)


def cpu_seconds(work: Callable[[], object], *, repeats: int = 3) -> float:
    """CPU time of a function: the best of several calls."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return max(min(times), SHORTEST)


def growth(work: Callable[[int], object], small: int, large: int, *, repeats: int = 3) -> float:
    """How many times more CPU time a function takes for a `large` than for a `small` size."""
    few = cpu_seconds(lambda: work(small), repeats=repeats)
    return cpu_seconds(lambda: work(large), repeats=repeats) / few

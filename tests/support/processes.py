"""Processes of tests, by their ids: what runs, who started it, and its end.

kill(pid, after=rng.uniform(0, 0.5))         # at a random moment; one that has ended is none of ours
wait_until(lambda: not any(map(is_running, pids)))
"""

import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def is_running(process_id: int) -> bool:
    """Whether a process runs; one that has ended and waits to be noticed does not."""
    with suppress(OSError):
        stat = Path(f"/proc/{process_id}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] not in "ZX"
    return False


def children(process_id: int) -> list[int]:
    """The processes that a process has started, with theirs."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{process_id}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return [*found, *(deeper for child in found for deeper in children(child))]


def one_of(process_ids: list[int], rng: random.Random) -> list[int]:
    """One of them, if there are any."""
    return rng.sample(process_ids, min(1, len(process_ids)))


def marked(mark: str) -> list[int]:
    """The processes that run with a variable, given as NAME=VALUE, in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return list(filter(is_running, found))


def kill(process_id: int) -> None:
    """Kill a process, unless it has ended."""
    with suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGKILL)


def kill_after(seconds: float, chosen: Callable[[], list[int]]) -> threading.Timer:
    """Kill processes that are chosen then."""
    timer = threading.Timer(seconds, lambda: [kill(one) for one in chosen()])
    timer.start()
    return timer

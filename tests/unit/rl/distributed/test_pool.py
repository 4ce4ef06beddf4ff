"""Functions in processes of all nodes of a cluster; processes and actors that die are replaced."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from memagent.errors import ConfigError, DataError
from memagent.processes import WorkerDied
from memagent.rl.agents.offload import offload
from memagent.rl.distributed.pool import ClusterPool
from tests.support.ray_nodes import ray_nodes


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_nodes(2) as cluster:
        yield cluster


def double(number: int) -> int:
    return 2 * number


def refuse(text: str) -> None:
    raise DataError(text)


def parent_of(number: int) -> int:
    return os.getppid()


def die_once(marker: str) -> str:
    """Ends its process the first time."""
    path = Path(marker)
    if not path.exists():
        path.write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def linger(marker: str) -> str:
    """Waits for long the first time."""
    import time

    path = Path(marker)
    if not path.exists():
        path.write_text("")
        time.sleep(60)
    return "done"


async def test_functions_run_on_all_nodes_and_faults_cost_no_result(
    cluster: Any, tmp_path: Path
) -> None:
    notes: list[str] = []
    pool = ClusterPool(1, on_note=notes.append)
    try:
        pool.use()
        assert await offload(double, 21) == 42
        with pytest.raises(DataError, match=r"^no such thing$"):
            await offload(refuse, "no such thing")
        with pytest.raises(ConfigError, match="cannot be sent to another process"):
            await offload(lambda: 1)
        actors = await asyncio.gather(*(offload(parent_of, number) for number in range(8)))
        assert len(set(actors)) == 2, "one actor on each node"

        assert await offload(die_once, str(tmp_path / "worker")) == "done"
        assert [note.split(";")[0].split()[:2] for note in notes] == [["worker", "processes"]]
        with pytest.raises(WorkerDied, match="died in 3 attempts"):
            await offload(die)

        notes.clear()
        marker = tmp_path / "actor"
        running = asyncio.ensure_future(offload(linger, str(marker)))
        while not marker.exists():
            await asyncio.sleep(0.05)
        for actor in pool.actors:
            ray.kill(actor)
        assert await asyncio.wait_for(running, 60) == "done"
        assert any("are replaced" in note for note in notes)
    finally:
        pool.close()

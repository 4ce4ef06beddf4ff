"""Functions in processes of all nodes of a cluster; processes that die are replaced."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from memagent.cluster import Cluster, open_cluster
from memagent.errors import ClusterError, ConfigError, DataError
from memagent.rl.agents.offload import WorkerPool, offload
from tests.support.ray_nodes import ray_nodes


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_nodes(2), open_cluster("auto") as joined:
        yield joined


def double(number: int) -> int:
    return 2 * number


def refuse(text: str) -> None:
    raise DataError(text)


def meet(folder: str, number: int) -> str:
    """Waits for another process; the node of this one."""
    Path(folder, str(number)).touch()
    while len(list(Path(folder).iterdir())) < 2:
        time.sleep(0.05)
    return str(ray.get_runtime_context().get_node_id())


def die_once(marker: str) -> str:
    """Ends its process the first time."""
    path = Path(marker)
    if not path.exists():
        path.write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def test_functions_run_on_all_nodes_and_faults_cost_no_result(
    cluster: Cluster, tmp_path: Path
) -> None:
    notes: list[str] = []
    with WorkerPool.on_cluster(cluster, 4, on_note=notes.append) as pool:
        pool.use()
        assert await offload(double, 21) == 42
        with pytest.raises(DataError, match=r"^no such thing$"):
            await offload(refuse, "no such thing")
        with pytest.raises(ConfigError, match="cannot be sent to another process"):
            await offload(lambda: 1)
        (tmp_path / "met").mkdir()
        met = [offload(meet, str(tmp_path / "met"), number) for number in range(2)]
        assert len(set(await asyncio.gather(*met))) == 2, "processes of both nodes"

        assert await offload(die_once, str(tmp_path / "worker")) == "done"
        await asyncio.sleep(0)
        assert [note.split(";")[0] for note in notes] == ["a worker process of the cluster died"]
        with pytest.raises(ClusterError, match="4 workers died at one function"):
            await offload(die)
        assert await offload(double, 21) == 42, "the others go on"

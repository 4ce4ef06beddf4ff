"""Training with engine replicas and worker processes on two nodes, which are killed, sleep, and run ahead."""

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from memagent.cluster_workers import ClusterExecutor
from memagent.rl.distributed.replicas import ReplicaEngine
from memagent.rl.trainer import Trainer
from memagent.tracking import read_metrics
from tests.support.cluster_runs import assert_same_training, train
from tests.support.ray_nodes import running_nodes
from tests.support.tiny_training import OFFLOADED, tiny_run

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    with running_nodes(2, num_cpus=3) as cluster:
        yield cluster


def on_cluster(files: Path, nodes: Any, **settings: Any) -> dict[str, Any]:
    cluster = {"address": nodes.address, "trainer_ranks": 2, "engine_replicas": 2, **settings}
    return tiny_run(files, cluster=cluster)


def test_a_replica_and_workers_that_are_killed_change_nothing_but_the_notes(
    nodes: Any, files: Path, alone: Path, tmp_path: Path
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(OFFLOADED)
    config = on_cluster(files, nodes)
    config["agent"]["reward"] = f"{reward}:score"

    def kill(trainer: Trainer, step: int) -> None:
        if step == 1:
            engine = trainer.setup.engine
            assert isinstance(engine, ReplicaEngine)
            pid = engine.pids[1]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        if step == 2:
            pool = trainer._pool._executor
            assert isinstance(pool, ClusterExecutor)
            for worker in pool._workers:
                if worker.actor is not None:
                    ray.kill(worker.actor)

    watch = train(config, tmp_path / "run", kill)
    assert_same_training(tmp_path / "run", alone)
    deaths = [re.sub(r" [0-9a-f]+$", "", note.partition(" died")[0]) for note in watch.notes]
    assert deaths[0] == "engine replica"
    assert "a worker process of the cluster" in deaths


def test_colocated_replicas_sleep_while_the_ranks_train(
    nodes: Any, files: Path, alone: Path, tmp_path: Path
) -> None:
    watch = train(on_cluster(files, nodes, placement="colocated"), tmp_path / "run")
    assert_same_training(tmp_path / "run", alone)
    assert watch.notes == []


def test_all_weights_are_trained_while_replicas_run_ahead_and_one_is_killed(
    nodes: Any, files: Path, tmp_path: Path
) -> None:
    config = on_cluster(files, nodes)
    config |= {"steps": 6, "warm_start": None, "validation": None}
    config["rollout"] = {"prompts": 3, "group_size": 4, "asynchronous": True}
    config["objective"] = {"max_staleness": 2}
    config["logging"]["rollouts"] = 1000

    def kill(trainer: Trainer, step: int) -> None:
        engine = trainer.setup.engine
        assert isinstance(engine, ReplicaEngine)
        if step == 2 and engine.pids[0] is not None:
            os.kill(engine.pids[0], signal.SIGKILL)

    watch = train(config, tmp_path / "run", kill)
    assert watch.steps == [1, 2, 3, 4, 5, 6]
    records = read_metrics(tmp_path / "run")
    assert all(record["staleness_max"] <= 2 for record in records)
    assert sum(record["num_failed"] for record in records) == 0
    taken = Counter(
        json.loads(line)["task_id"]
        for path in (tmp_path / "run" / "samples").iterdir()
        for line in path.read_bytes().splitlines()
    )
    dropped = sum(record["num_dropped"] for record in records)
    assert len(taken) == 18
    assert set(taken.values()) == {4}, "each rollout is trained on once"
    assert dropped == 0

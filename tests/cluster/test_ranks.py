"""Trainer ranks on two nodes train as one process does, whatever happens to them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from memagent.errors import ClusterError
from memagent.rl.distributed.ranks import RankGroup
from memagent.rl.trainer import Trainer
from memagent.rl.weights.checkpoint import list_checkpoints
from tests.support.broken_gpu import REASON, fail
from tests.support.cluster_runs import assert_same_training, cancel, train
from tests.support.ray_nodes import add_node, running_nodes
from tests.support.tiny_training import tiny_run

LORA = {"lora_rank": 4}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Two nodes with two CPUs each."""
    with running_nodes(2) as cluster:
        yield cluster


def on_cluster(files: Path, nodes: Any, **settings: Any) -> dict[str, Any]:
    """The same run on a cluster."""
    cluster = {"address": nodes.address, "trainer_ranks": 2, **settings}
    return tiny_run(files, cluster=cluster)


def ranks_of(trainer: Trainer) -> RankGroup:
    backend = trainer.setup.backend
    assert isinstance(backend, RankGroup)
    return backend


def test_two_ranks_and_two_replicas_on_two_nodes_train_as_one_process_does(
    nodes: Any, files: Path, alone: Path, tmp_path: Path
) -> None:
    watch = train(on_cluster(files, nodes, engine_replicas=2), tmp_path / "run")
    assert_same_training(tmp_path / "run", alone)
    assert watch.notes == []
    newest = list_checkpoints(tmp_path / "run")[-1]
    assert len(list((newest / "optimizer").glob("*.safetensors"))) == 2, "a shard of each rank"
    assert not ray.is_initialized(), "the run has left the cluster"


@pytest.mark.cluster
def test_two_ranks_train_an_adapter_as_one_process_does(
    nodes: Any, files: Path, tmp_path: Path
) -> None:
    config = on_cluster(files, nodes)
    config["model"] = {**config["model"], **LORA}
    train({**config, "cluster": None}, tmp_path / "alone")
    train(config, tmp_path / "run")
    assert_same_training(tmp_path / "run", tmp_path / "alone")


@pytest.mark.cluster
@pytest.mark.parametrize(
    "change", ["cluster.trainer_ranks=1", "cluster.trainer_ranks=3", "cluster.address=none"]
)
def test_a_checkpoint_of_two_ranks_resumes_on_another_number_and_in_one_process(
    change: str, nodes: Any, files: Path, alone: Path, tmp_path: Path
) -> None:
    def stop(trainer: Trainer, step: int) -> None:
        if step == 2:
            cancel(trainer, step)

    train(on_cluster(files, nodes), tmp_path / "run", stop)
    assert list_checkpoints(tmp_path / "run")[-1].name == "step-000002"
    watch = train({}, tmp_path / "run", changes=[change])
    assert watch.steps == [3]
    assert_same_training(tmp_path / "run", alone)


@pytest.mark.cluster
def test_a_rank_that_ends_restarts_all_of_them_from_the_newest_checkpoint(
    nodes: Any, files: Path, alone: Path, tmp_path: Path
) -> None:
    killed: list[int] = []

    def kill_once(trainer: Trainer, step: int) -> None:
        if step in (1, 2) and step not in killed:
            killed.append(step)
            ray.kill(ranks_of(trainer).actors[1])

    watch = train(on_cluster(files, nodes), tmp_path / "run", kill_once)
    assert watch.steps == [1, 1, 2, 1, 2, 3], "the checkpoint before was that of the warm start"
    assert [note.partition(";")[0] for note in watch.notes] == [
        "one of 2 trainer ranks has ended"
    ] * 2
    assert watch.notes[0].endswith("from warm-000006")
    assert_same_training(tmp_path / "run", alone)


def break_learner(rank: Any) -> None:
    rank._learner.update = fail


@pytest.mark.cluster
def test_a_rank_whose_gpu_fails_restarts_all_of_them_from_the_newest_checkpoint(
    nodes: Any, files: Path, alone: Path, tmp_path: Path
) -> None:
    broken: list[int] = []

    def break_once(trainer: Trainer, step: int) -> None:
        if not broken:
            broken.append(step)
            ray.get(ranks_of(trainer).actors[1].__ray_call__.remote(break_learner))

    watch = train(on_cluster(files, nodes), tmp_path / "run", break_once)
    assert broken == [1]
    assert [note.partition(";")[0] for note in watch.notes] == [
        f"a GPU of 2 trainer ranks has failed ({REASON})"
    ]
    assert_same_training(tmp_path / "run", alone)


@pytest.mark.cluster
def test_ranks_that_keep_ending_stop_the_run(
    nodes: Any, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(trainer: Trainer, step: int) -> None:
        ray.kill(ranks_of(trainer).actors[0])

    monkeypatch.setattr("memagent.rl.trainer.MAX_RESTARTS", 1)
    config = on_cluster(files, nodes)
    with pytest.raises(ClusterError, match="2 times, without a finished step between"):
        train({**config, "steps": 2}, tmp_path / "run", kill)


@pytest.mark.cluster
def test_a_cluster_that_is_too_small_is_reported_within_the_time(
    nodes: Any, files: Path, tmp_path: Path
) -> None:
    config = on_cluster(files, nodes, trainer_ranks=9, wait_seconds=1)
    with pytest.raises(ClusterError, match=r"9 trainer ranks need 9 CPU; free .* 4 of 4 CPU"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@contextmanager
def replica_and_ranks() -> Iterator[Any]:
    """A node with room for an engine replica only, and one where both ranks go."""
    with running_nodes(1, num_cpus=1) as nodes:
        add_node(nodes, num_cpus=2)
        yield nodes


@pytest.mark.cluster
def test_a_node_that_leaves_is_waited_for(files: Path, alone: Path, tmp_path: Path) -> None:
    with replica_and_ranks() as nodes:
        removed: list[int] = []

        def replace_node(trainer: Trainer, step: int) -> None:
            if step == 2 and not removed:
                removed.append(step)
                nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)
                loop = asyncio.get_running_loop()
                loop.call_later(8.0, partial(add_node, nodes, num_cpus=2))

        config = on_cluster(files, nodes, wait_seconds=120)
        watch = train(config, tmp_path / "run", replace_node)
        assert any("need 2 CPU" in note for note in watch.notes), "the wait is noted"
        assert_same_training(tmp_path / "run", alone)


@pytest.mark.cluster
def test_a_node_that_stays_away_stops_the_run_which_can_be_resumed(
    files: Path, alone: Path, tmp_path: Path
) -> None:
    with replica_and_ranks() as nodes:

        def remove_node(trainer: Trainer, step: int) -> None:
            if step == 2:
                nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)

        config = on_cluster(files, nodes, wait_seconds=2)
        with pytest.raises(ClusterError, match="2 trainer ranks need 2 CPU"):
            train(config, tmp_path / "run", remove_node)
        add_node(nodes, num_cpus=2)
        watch = train({}, tmp_path / "run", changes=["cluster.wait_seconds=60"])
        assert watch.steps == [1, 2, 3], "step 2 was not in a checkpoint yet"
        assert_same_training(tmp_path / "run", alone)

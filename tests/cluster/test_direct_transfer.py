"""Weights that go straight from ranks to replicas, while replicas are killed."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from memagent.cluster import Cluster
from memagent.rl.backend import RanksLost
from memagent.rl.distributed.replicas import (
    EmbeddedModel,
    EmbeddedReplica,
    OpenReplica,
    ReplicaEngine,
    ReplicaSync,
    open_replicas,
)
from memagent.rl.distributed.weights import Bucket, DirectTransfer, DirectWay, Filled, Route
from memagent.rl.trainer import Trainer
from memagent.tracking import read_metrics
from tests.support.cluster_runs import assert_same_training, train
from tests.support.driver_ranks import DriverRanks
from tests.support.ray_nodes import running_nodes
from tests.support.replica_models import embedded, expected, greedy, named, until
from tests.support.tiny_training import tiny_run

pytestmark = pytest.mark.cluster
WAYS: tuple[DirectWay, ...] = ("broadcast", "ipc")
BUCKET_BYTES = 20_000


class DiesOnce:
    """Opens replicas; the first one that gets weights directly while `marker` exists is killed in the middle."""

    def __init__(self, marker: Path, opener: EmbeddedReplica) -> None:
        self._marker = marker
        self._opener = opener

    def __call__(self) -> EmbeddedModel:
        replica = self._opener()
        receive = replica.receive

        def dying(buckets: Iterator[Filled]) -> Iterator[Filled]:
            yield next(buckets)
            try:
                self._marker.unlink()
            except FileNotFoundError:
                yield from buckets
                return
            os.kill(os.getpid(), signal.SIGKILL)

        async def receive_or_die(buckets: Iterator[Filled], policy_version: int) -> None:
            await receive(dying(buckets), policy_version)

        replica.receive = receive_or_die  # type: ignore[method-assign]
        return replica


@asynccontextmanager
async def two_replicas(
    cluster: Cluster, opener: OpenReplica, notes: list[str]
) -> AsyncIterator[ReplicaEngine]:
    async with open_replicas(
        cluster, opener, num=2, resources={"CPU": 1}, start_seconds=240, on_note=notes.append
    ) as engine:
        yield engine


async def assert_all_sample(engine: ReplicaEngine, model: Path, version: int) -> None:
    """Every replica has the weights of a model and says so."""
    await until(lambda: None not in engine.pids)
    ids = (await expected(model)).completion_ids
    replies = await asyncio.gather(*(greedy(engine) for _ in range(6)))
    assert {(one.policy_version, one.completion_ids) for one in replies} == {(version, ids)}


@pytest.mark.parametrize("way", WAYS)
async def test_a_replica_that_is_killed_during_a_push_costs_that_push_its_way(
    cluster: Cluster, models: tuple[Path, Path], tmp_path: Path, way: DirectWay
) -> None:
    notes: list[str] = []
    marker = tmp_path / "die"
    async with two_replicas(cluster, DiesOnce(marker, embedded(models[0])), notes) as engine:
        ranks: Any = DriverRanks(named(models[1]), num=2)
        transfer = DirectTransfer(ranks, way, seconds=20, bucket_bytes=BUCKET_BYTES)
        sync = ReplicaSync(engine, ranks.ship, transfer=transfer)
        marker.touch()
        pids = engine.pids
        await sync.push(5)
        assert not marker.exists()
        await assert_all_sample(engine, models[1], 5)
        assert len({*pids, *engine.pids}) == 3
        directly = [note for note in notes if "could not be sent directly" in note]
        assert len(directly) == ranks.num_shipped == 1
        assert directly[0].endswith("they go through the object store this time")

        ranks.change(named(models[0]))
        await sync.push(6)
        await assert_all_sample(engine, models[0], 6)
        assert ranks.num_shipped == 1, "the next one is direct again"


async def test_for_a_replaced_replica_the_ranks_ship_again_or_the_next_push_is_waited_for(
    cluster: Cluster, models: tuple[Path, Path]
) -> None:
    notes: list[str] = []
    async with two_replicas(cluster, embedded(models[0]), notes) as engine:
        ranks: Any = DriverRanks(named(models[1]))
        transfer = DirectTransfer(ranks, "broadcast", seconds=20, bucket_bytes=BUCKET_BYTES)
        sync = ReplicaSync(engine, ranks.ship, transfer=transfer)
        await sync.push(3)
        kill_all(engine)
        assert (await greedy(engine)).policy_version == 3
        await assert_all_sample(engine, models[1], 3)
        assert ranks.num_shipped == 1

        await sync.push(4)
        kill_all(engine)
        ranks.change(named(models[0]))
        waiting = asyncio.ensure_future(greedy(engine))
        await until(lambda: sum("died" in note for note in notes) >= 3)
        await asyncio.sleep(8)
        assert not waiting.done()
        await sync.push(5)
        reply = await waiting
        assert reply.policy_version == 5
        assert reply.completion_ids == (await expected(models[0])).completion_ids
        await assert_all_sample(engine, models[0], 5)


class LostRanks(DriverRanks):
    """Ranks that end before they have sent anything."""

    is_lost = True

    async def send(self, routes: Sequence[Route | None], buckets: Sequence[Bucket]) -> str | None:
        if self.is_lost:
            await asyncio.sleep(0.3)
            raise RanksLost("one of 2 trainer ranks has ended")
        return await super().send(routes, buckets)


@pytest.mark.parametrize("way", WAYS)
async def test_replicas_do_not_wait_for_ranks_that_are_lost_and_sample_on(
    cluster: Cluster, models: tuple[Path, Path], way: DirectWay
) -> None:
    notes: list[str] = []
    async with two_replicas(cluster, embedded(models[0]), notes) as engine:
        ranks: Any = LostRanks(named(models[1]), num=2)
        transfer = DirectTransfer(ranks, way, seconds=20, bucket_bytes=BUCKET_BYTES)
        sync = ReplicaSync(engine, ranks.ship, transfer=transfer)
        for is_first in (True, False):
            ranks.is_lost = True
            started = time.monotonic()
            with pytest.raises(RanksLost):
                await sync.push(2)
            assert time.monotonic() - started < 15
            version = 0 if is_first else 1
            await assert_all_sample(engine, models[version], version)
            ranks.is_lost = False
            await sync.push(1)
            await assert_all_sample(engine, models[1], 1)
        assert notes == []


def kill_all(engine: ReplicaEngine) -> None:
    for pid in engine.pids:
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "cluster_settings", [{"placement": "separate"}, {"placement": "colocated"}], ids=WAYS
)
def test_training_is_that_of_one_process(cluster_settings: dict[str, Any], tmp_path: Path) -> None:
    train(tiny_run(tmp_path), tmp_path / "alone")
    with running_nodes(2, num_cpus=3) as nodes:
        settings = {"address": nodes.address, "trainer_ranks": 2, "engine_replicas": 2}
        config = tiny_run(tmp_path, cluster={**settings, **cluster_settings})
        watch = train(config, tmp_path / "run")
    assert_same_training(tmp_path / "run", tmp_path / "alone")
    assert watch.notes == []


def test_replicas_run_ahead_and_one_is_killed_while_all_weights_are_sent_directly(
    tmp_path: Path,
) -> None:
    config = tiny_run(tmp_path, steps=5, warm_start=None, validation=None)
    config["rollout"] = {"prompts": 3, "group_size": 4, "asynchronous": True}
    config["objective"] = {"max_staleness": 2}

    def kill(trainer: Trainer, step: int) -> None:
        engine = trainer.setup.engine
        assert isinstance(engine, ReplicaEngine)
        if step == 2 and engine.pids[0] is not None:
            os.kill(engine.pids[0], signal.SIGKILL)

    with running_nodes(2, num_cpus=3) as nodes:
        config["cluster"] = {
            "address": nodes.address,
            "trainer_ranks": 2,
            "engine_replicas": 2,
        }
        watch = train(config, tmp_path / "run", kill)
    records = read_metrics(tmp_path / "run")
    assert watch.steps == [1, 2, 3, 4, 5]
    assert all(record["staleness_max"] <= 2 for record in records)
    assert sum(record["num_failed"] for record in records) == 0
    assert any("died" in note for note in watch.notes)

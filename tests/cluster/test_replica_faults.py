"""Engine replicas that sleep, whose GPU fails, that never get ready, and that cannot be replaced."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from memagent.cluster import Cluster
from memagent.errors import ClusterError, ConfigError, EngineError
from memagent.rl.distributed.replicas import (
    EmbeddedReplica,
    OpenReplica,
    Replica,
    ReplicaEngine,
    open_replicas,
)
from memagent.rl.distributed.weights import ship
from tests.support.broken_gpu import REASON, BrokenAtFirst
from tests.support.ray_nodes import ray_nodes
from tests.support.replica_models import embedded, expected, greedy, named, until
from tests.support.tiny_models import make_tiny_adapter

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_nodes(2):
        yield Cluster(wait_seconds=20, on_note=lambda text: None, is_local=False)


async def test_adapters_are_published_and_sleeping_replicas_wake_with_their_weights(
    cluster: Cluster, models: tuple[Path, Path], tmp_path: Path
) -> None:
    adapters = [make_tiny_adapter(models[0], tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    opener = embedded(models[0], adapter=str(adapters[0]))
    async with open_replicas(cluster, opener, num=1, resources={"CPU": 1}) as engine:
        first = await greedy(engine)
        assert first.completion_ids == (await expected(models[0], adapters[0])).completion_ids
        await engine.publish(ship(named(models[0], adapters[1])), 3)
        await engine.sleep()
        with pytest.raises(EngineError, match="sleeps while the ranks train"):
            await greedy(engine)
        await engine.wake()
        second = await greedy(engine)
        assert second.completion_ids == (await expected(models[0], adapters[1])).completion_ids
        assert second.policy_version == 3
        await engine.publish(ship(named(models[0], adapters[0])), 4)
        assert (await greedy(engine)).completion_ids == first.completion_ids


async def test_a_replica_whose_gpu_fails_is_replaced_and_its_calls_go_to_the_others(
    cluster: Cluster, models: tuple[Path, Path], tmp_path: Path
) -> None:
    notes: list[str] = []
    opener = BrokenAtFirst(marker=tmp_path / "opened", opener=embedded(models[0]))
    async with open_replicas(
        cluster, opener, num=1, resources={"CPU": 1}, start_seconds=120, on_note=notes.append
    ) as engine:
        broken = engine.pids
        await engine.publish(ship(named(models[1])), 5)
        reply = await greedy(engine)
        assert reply.completion_ids == (await expected(models[1])).completion_ids
        assert (reply.policy_version, reply.num_attempts) == (5, 2)
        assert engine.pids != broken
    assert notes[0].startswith("engine replica 0 died (the local model failed: ")
    assert REASON in notes[0]
    assert notes[1:] == ["engine replica 0 is back"]


async def test_a_replica_that_died_before_the_others_slept_is_started_when_they_wake(
    cluster: Cluster, models: tuple[Path, Path]
) -> None:
    notes: list[str] = []
    async with open_replicas(
        cluster, embedded(models[0]), num=2, resources={"CPU": 1}, on_note=notes.append
    ) as engine:
        await engine.publish(ship(named(models[1])), 5)
        first, second = engine.pids
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await engine.sleep()
        assert engine.pids == [None, second]
        await asyncio.sleep(10)  # longer than a start takes
        assert engine.pids == [None, second], "the ranks have the GPUs"
        assert len(notes) == 1
        await engine.wake()
        await until(lambda: None not in engine.pids)
        replies = await asyncio.gather(*(greedy(engine) for _ in range(4)))
        assert {one.policy_version for one in replies} == {5}


async def test_a_replica_that_starts_while_the_others_sleep_sleeps_too(
    cluster: Cluster, models: tuple[Path, Path]
) -> None:
    async with open_replicas(cluster, embedded(models[0]), num=2, resources={"CPU": 1}) as engine:
        await engine.publish(ship(named(models[1])), 5)
        first, _ = engine.pids
        assert first is not None
        os.kill(first, signal.SIGKILL)
        while None not in engine.pids:  # a call to it notices
            await asyncio.gather(*(greedy(engine) for _ in range(4)))
        await engine.sleep()
        await asyncio.sleep(10)
        assert engine.pids[0] is None, "it is not used before the others wake"
        await engine.wake()
        await until(lambda: None not in engine.pids)
        replies = await asyncio.gather(*(greedy(engine) for _ in range(4)))
        assert {one.policy_version for one in replies} == {5}


class Never:
    """An engine that never gets ready."""

    def __call__(self) -> Replica:
        time.sleep(600)
        raise AssertionError


class Wrong:
    """An engine that cannot be opened."""

    def __call__(self) -> Replica:
        raise ConfigError("no such model")


@pytest.mark.parametrize(
    ("opener", "seconds", "error", "message"),
    [
        (
            Never(),
            3,
            EngineError,
            r"replica \d was not ready within 3 s; .* `cluster.start_seconds`",
        ),
        (Wrong(), 60, ConfigError, r"^engine replica \d: no such model$"),
    ],
)
async def test_a_replica_that_never_gets_ready_is_an_error_in_time_and_leaves_nothing_behind(
    cluster: Cluster, opener: OpenReplica, seconds: float, error: type[Exception], message: str
) -> None:
    import ray

    started = time.monotonic()
    with pytest.raises(error, match=message):
        async with open_replicas(
            cluster, opener, num=2, resources={"CPU": 1}, start_seconds=seconds
        ):
            raise AssertionError("it cannot be ready")
    assert time.monotonic() - started < 40
    await until(lambda: ray.available_resources().get("CPU") == cluster.total("CPU"))


async def test_a_replica_that_cannot_be_replaced_ends_the_calls_with_its_reason(
    cluster: Cluster, models: tuple[Path, Path], tmp_path: Path
) -> None:
    notes: list[str] = []
    opener = OnlyOnce(tmp_path / "opened", embedded(models[0]))
    async with open_replicas(
        cluster, opener, num=1, resources={"CPU": 1}, start_seconds=120, on_note=notes.append
    ) as engine:
        assert isinstance(engine, ReplicaEngine)
        (pid,) = engine.pids
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        left = r"^no engine replica is left: engine replica 0: the model was removed$"
        with pytest.raises(ClusterError, match=left):
            await greedy(engine)
        assert notes[1:] == [
            f"start {number} of 3 failed: engine replica 0: the model was removed"
            for number in (1, 2, 3)
        ]


class OnlyOnce:
    """Opens a replica the first time."""

    def __init__(self, marker: Path, opener: EmbeddedReplica) -> None:
        self._marker = marker
        self._opener = opener

    def __call__(self) -> Replica:
        if self._marker.exists():
            raise ConfigError("the model was removed")
        self._marker.write_text("")
        return self._opener()

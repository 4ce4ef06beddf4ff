"""Engine replicas on a cluster of two nodes: their weights, their versions, their deaths."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memagent.cluster import Cluster
from memagent.engines.local.loading import load
from memagent.errors import PromptTooLong
from memagent.rl.distributed.replicas import ReplicaEngine, ReplicaSync, open_replicas
from memagent.rl.distributed.weights import DirectTransfer, DirectWay, ship
from memagent.types import Completion, Sampling
from tests.support.driver_ranks import DriverRanks
from tests.support.ray_nodes import ray_nodes
from tests.support.replica_models import (
    LONG,
    MESSAGES,
    embedded,
    expected,
    greedy,
    named,
    two_models,
    until,
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_nodes(2):
        yield Cluster(wait_seconds=20, on_note=lambda text: None, is_local=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return two_models(tmp_path_factory.mktemp("models"))


async def test_replicas_sample_from_what_was_published_also_after_one_was_killed(
    cluster: Cluster, models: tuple[Path, Path]
) -> None:
    notes: list[str] = []
    opened = open_replicas(
        cluster,
        embedded(models[0]),
        num=2,
        resources={"CPU": 1},
        start_seconds=240,
        on_note=notes.append,
    )
    async with opened as engine:
        assert engine.served_window == load(str(models[0])).window
        first = await greedy(engine)
        assert first.completion_ids == (await expected(models[0])).completion_ids
        assert (first.policy_version, first.token_versions) == (0, None)
        with pytest.raises(PromptTooLong, match="lower `window`"):
            await engine.complete(MESSAGES, Sampling(max_tokens=10**6))

        async def buckets() -> list[Any]:
            return ship(named(models[1]), bucket_bytes=20_000)

        sync = ReplicaSync(engine, buckets)
        running = [asyncio.ensure_future(engine.complete(MESSAGES, LONG)) for _ in range(8)]
        await asyncio.sleep(0.1)
        await sync.push(7)
        assert sync.policy_version == 7
        spanning = await asyncio.gather(*running)
        assert {one.policy_version for one in spanning} <= {0, 7}
        assert any(set(one.token_versions or ()) == {0, 7} for one in spanning)
        second = await greedy(engine)
        assert second.policy_version == 7
        assert second.completion_ids == (await expected(models[1])).completion_ids
        assert second.completion_ids != first.completion_ids

        running = [asyncio.ensure_future(engine.complete(MESSAGES, LONG)) for _ in range(12)]
        await asyncio.sleep(0.1)
        pids = engine.pids
        assert pids[0] is not None
        os.kill(pids[0], signal.SIGKILL)
        replies = await asyncio.gather(*running)
        assert len({one.completion_ids for one in replies}) == 1, "the same seed, the same reply"
        assert any(one.num_attempts == 2 for one in replies)
        await until(lambda: None not in engine.pids)
        assert engine.pids[1] == pids[1]
        assert engine.pids[0] != pids[0]
        assert notes[0].startswith("engine replica 0 died (")
        assert notes[0].endswith("its unfinished replies are sampled again")
        assert notes[1:] == ["engine replica 0 is back"]
        for one in await asyncio.gather(*(greedy(engine) for _ in range(4))):
            assert (one.policy_version, one.completion_ids) == (7, second.completion_ids)

        await send_directly(engine, models, first, second)
        assert len(notes) == 2


async def send_directly(
    engine: ReplicaEngine, models: tuple[Path, Path], first: Completion, second: Completion
) -> None:
    """Both ways, from ranks in this process, with several buckets."""
    ways: tuple[DirectWay, ...] = ("broadcast", "ipc")
    for version, way in enumerate(ways, start=8):
        ranks: Any = DriverRanks(named(models[version % 2]), num=2)
        transfer = DirectTransfer(ranks, way, seconds=30, bucket_bytes=20_000)
        sync = ReplicaSync(engine, ranks.ship, transfer=transfer)
        await sync.push(version)
        expected_ids = (first, second)[version % 2].completion_ids
        for one in await asyncio.gather(*(greedy(engine) for _ in range(4))):
            assert (one.policy_version, one.completion_ids) == (version, expected_ids)
        assert ranks.num_shipped == 0

"""Everything of a run that is on a cluster: joined or started, the ranks placed, the engine kept up to date.

async with open_distributed(config, run_dir, source, on_note) as ranks:      # of `ranks.cluster`
    async with open_cluster_engine(config, ranks, source, trained, on_note) as (engine, sync):
        ...
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from memagent.cluster import Bundle, Cluster, open_cluster
from memagent.engines.base import split_spec
from memagent.rl.backend import TrainerBackend
from memagent.rl.distributed.ranks import COLOCATED_SHARE, RankGroup
from memagent.rl.distributed.replicas import (
    EmbeddedReplica,
    OpenReplica,
    ReplicaEngine,
    ReplicaSync,
    open_replicas,
    place_replicas,
)
from memagent.rl.distributed.vllm_replica import ADAPTER_CONFIG, VllmReplica
from memagent.rl.distributed.weights import DirectTransfer, direct_way
from memagent.rl.settings import TrainConfig
from memagent.rl.weights.checkpoint import save_adapter_config
from memagent.rl.weights.models import Trained
from memagent.rl.weights.sync import WeightSync


@asynccontextmanager
async def open_distributed(
    config: TrainConfig, run_dir: Path, source: str, on_note: Callable[[str], None]
) -> AsyncIterator[RankGroup]:
    """Join or start the cluster of a config, and start its trainer ranks. All of it ends with the block."""
    with _joined(config, on_note) as cluster:
        ranks = RankGroup(cluster, config, run_dir, source)
        try:
            await ranks.restart()
            yield ranks
        finally:
            ranks.close()


@asynccontextmanager
async def try_cluster(
    config: TrainConfig, on_note: Callable[[str], None] = lambda text: None
) -> AsyncIterator[TrainConfig]:
    """Join the cluster of a config and reserve all places of the run for a moment.

    Yields the config of a run with one rank and one replica there: enough to see that nodes can load the model.
    """
    settings = config.cluster
    assert settings is not None
    with _joined(config, on_note) as cluster:
        ranks = RankGroup(cluster, config, Path(), "")
        try:
            await ranks.reserve()
            if config.has_replicas and settings.placement == "separate":
                num = settings.engine_replicas
                needed = [_replica_bundle(config, on_gpu=ranks.on_gpu)] * num
                cluster.release(await place_replicas(cluster, needed))
        finally:
            ranks.close()
        one = {"trainer_ranks": 1, "engine_replicas": 1}
        if settings.placement == "colocated":
            one["tensor_parallel_size"] = 1
        yield config.model_copy(update={"cluster": settings.model_copy(update=one)})


@contextmanager
def _joined(config: TrainConfig, on_note: Callable[[str], None]) -> Iterator[Cluster]:
    settings = config.cluster
    assert settings is not None
    with open_cluster(
        settings.address,
        wait_seconds=settings.wait_seconds,
        min_cpus=settings.trainer_ranks + settings.engine_replicas,
        on_note=on_note,
    ) as cluster:
        yield cluster


def _replica_bundle(config: TrainConfig, *, on_gpu: bool) -> Bundle:
    """What an engine replica reserves."""
    settings = config.cluster
    assert settings is not None
    resources: Bundle = {"CPU": 1}
    if on_gpu:
        is_colocated = settings.placement == "colocated"
        resources["GPU"] = COLOCATED_SHARE if is_colocated else settings.tensor_parallel_size
    return resources


@asynccontextmanager
async def open_cluster_engine(
    config: TrainConfig,
    ranks: RankGroup,
    source: str,
    trained: Trained,
    on_note: Callable[[str], None],
) -> AsyncIterator[tuple[ReplicaEngine, ReplicaSync]]:
    """The engine replicas of a run, and how they get the weights of its ranks.

    `trained` is the model in the driver, whose tokenizer continues conversations.
    """
    settings = config.cluster
    assert settings is not None
    resources = _replica_bundle(config, on_gpu=ranks.on_gpu)
    way = direct_way(config, on_gpu=ranks.on_gpu)
    is_colocated = settings.placement == "colocated"
    async with open_replicas(
        ranks.cluster,
        _opener(config, source, trained, on_gpu=ranks.on_gpu, takes_buckets=way is not None),
        num=settings.engine_replicas,
        resources=resources,
        options=partial(ranks.beside, resources=resources) if is_colocated else None,
        codec=trained.loaded.vocabulary if config.rollout.engine is None else None,
        start_seconds=settings.start_seconds,
        on_note=on_note,
    ) as engine:
        transfer = None if way is None else DirectTransfer(ranks, way)
        yield (
            engine,
            ReplicaSync(engine, ranks.ship, transfer=transfer, is_colocated=is_colocated),
        )


def _opener(
    config: TrainConfig, source: str, trained: Trained, *, on_gpu: bool, takes_buckets: bool
) -> OpenReplica:
    """What starts the engine of a replica on its node."""
    rollout, settings = config.rollout, config.cluster
    assert settings is not None
    if rollout.engine is None:
        device = {"device": "cuda" if on_gpu else "cpu"}
        return EmbeddedReplica(
            model=config.model.model_copy(update=device),
            source=str(Path(source).resolve()) if Path(source).exists() else source,
            seed=config.seed,
            engine_settings=rollout.engine_settings,
        )
    values = {
        **rollout.engine_settings,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "data_parallel_size": 1,
        "start_seconds": settings.start_seconds,
    }
    if settings.placement == "colocated":
        values["vllm_args"] = f"--enable-sleep-mode {values.get('vllm_args') or ''}".strip()
    return VllmReplica(
        model=split_spec(rollout.engine)[1],
        adapter_config=_adapter_config(trained),
        num_versions=config.num_versions,
        takes_buckets=takes_buckets,
        engine_settings=values,
    )


def _adapter_config(trained: Trained) -> str | None:
    """The adapter_config.json of the adapter in training; None where all weights are trained."""
    if not trained.has_adapter:
        return None
    with TemporaryDirectory() as folder:
        save_adapter_config(trained.model, Path(folder))
        return (Path(folder) / ADAPTER_CONFIG).read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class DriverCopy(WeightSync):
    """Gives the weights of the ranks to the model in the driver, which an engine there runs on or reads."""

    backend: TrainerBackend
    trained: Trained
    inner: WeightSync
    """Gives the weights of `trained` to the engine."""

    @property
    def policy_version(self) -> int:
        """The version of the weights that sample replies."""
        return self.inner.policy_version

    async def push(self, policy_version: int) -> None:
        """Fetch the weights, then make the engine sample from them."""
        weights = await self.backend.weights()
        with torch.no_grad():
            for name, parameter in self.trained.parameters:
                parameter.copy_(weights[name])
        await self.inner.push(policy_version)

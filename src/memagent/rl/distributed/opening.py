"""Everything of a run that is on a cluster: joined or started, the ranks placed, the engine kept up to date.

async with open_distributed(config, run_dir, source, on_note) as distributed:
    distributed.backend         the trainer ranks
    distributed.cluster         for what else runs there
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from memagent.cluster import Cluster, open_cluster
from memagent.rl.backend import TrainerBackend
from memagent.rl.distributed.rank_group import RankGroup, open_ranks
from memagent.rl.settings import TrainConfig
from memagent.rl.weights.models import Trained
from memagent.rl.weights.sync import WeightSync


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributed:
    """What a run has on a cluster."""

    cluster: Cluster
    backend: RankGroup


@asynccontextmanager
async def open_distributed(
    config: TrainConfig, run_dir: Path, source: str, on_note: Callable[[str], None]
) -> AsyncIterator[Distributed]:
    """Join or start the cluster of a config, and start its trainer ranks. All of it ends with the block."""
    settings = config.cluster
    assert settings is not None
    num_cpus = settings.trainer_ranks * settings.cpus_per_rank
    num_cpus += settings.engine_replicas * settings.cpus_per_replica
    with open_cluster(
        settings.address,
        connect_seconds=settings.connect_seconds,
        wait_seconds=settings.wait_seconds,
        min_cpus=num_cpus,
        object_store_gb=settings.object_store_gb,
        on_note=on_note,
    ) as cluster:
        async with open_ranks(cluster, config, run_dir, source) as backend:
            yield Distributed(cluster=cluster, backend=backend)


class DriverCopy:
    """Gives the weights of the ranks to the model in the driver, which an engine there runs on or reads."""

    def __init__(self, backend: TrainerBackend, trained: Trained, inner: WeightSync) -> None:
        """`inner` gives the weights of `trained` to the engine."""
        self._backend = backend
        self._trained = trained
        self._inner = inner

    @property
    def policy_version(self) -> int:
        """The version of the weights that sample replies."""
        return self._inner.policy_version

    async def push(self, policy_version: int) -> None:
        """Fetch the weights, then make the engine sample from them."""
        weights = await self._backend.weights()
        with torch.no_grad():
            for name, parameter in self._trained.parameters:
                parameter.copy_(weights[name])
        await self._inner.push(policy_version)

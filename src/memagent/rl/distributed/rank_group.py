"""The trainer ranks of a run, as the loop sees them: a backend whose calls are made on all ranks at once.

    async with open_ranks(RankGroup(cluster, config, run_dir, source)) as backend:
        await backend.update(groups, policy_version=12)

    driver ── groups, once, into the object store ──▶ rank 0, rank 1, ...   each packs all, and runs its share
           ◀── metrics of the first rank

The driver computes nothing. A rank that ends takes the others with it: the call raises `RanksLost`, and
`restart` restarts all ranks, waiting for nodes within `cluster.wait_seconds`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    ObjectStoreFullError,
    OutOfDiskError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.placement_group import PlacementGroup

from memagent.cluster import Bundle, Cluster, full_store, full_store_errors, in_bundle
from memagent.engines.local.engine import is_gpu_failure
from memagent.engines.replicas import first_line
from memagent.errors import ClusterError, MemagentError
from memagent.rl.backend import RanksLost, TrainerBackend, to_its_end
from memagent.rl.distributed.buckets import Bucket, TensorSpec
from memagent.rl.distributed.ranks import RankSpec, TrainerRank
from memagent.rl.distributed.transfer import Route
from memagent.rl.settings import TrainConfig
from memagent.rl.update.learner import Ranks

GRACE_SECONDS = 10.0
"""After one rank has failed, how long the others may take to tell why."""
COLOCATED_SHARE = 0.5
"""Share of its GPU that a rank reserves where an engine replica has the rest."""
NETWORK = ("gloo", "nccl", "connection", "broken pipe", "socket", "store")
"""Words in errors of a rank that lost another one."""


@asynccontextmanager
async def open_ranks(group: RankGroup) -> AsyncIterator[RankGroup]:
    """The ranks of a run on a cluster, started. They end with the block."""
    try:
        await group.restart()
        yield group
    finally:
        group.close()


class RankGroup(TrainerBackend):
    """Trainer ranks on a cluster; see `TrainerBackend`."""

    def __init__(self, cluster: Cluster, config: TrainConfig, run_dir: Path, source: str) -> None:
        assert config.cluster is not None
        self._cluster = cluster
        self._settings = config.cluster
        self.on_gpu = cluster.has_gpus and not (config.model.device or "cuda").startswith("cpu")
        self._told: dict[str, Any] = {
            "config": config,
            "source": str(Path(source).resolve()) if Path(source).exists() else source,
            "run_dir": str(run_dir.resolve()),
            "on_gpu": self.on_gpu,
        }
        self.actors: list[Any] = []
        """Handles of the ranks, in order."""
        self.num_changes = 0
        """How often the weights have changed, or are about to."""
        self.placement: PlacementGroup | None = None
        """Where the ranks are; with `colocated` each bundle has room for an engine replica."""

    async def reserve(self) -> PlacementGroup:
        """Reserve a place for each rank."""
        num = self._settings.trainer_ranks
        bundle: Bundle = {"CPU": 2 if self._settings.placement == "colocated" else 1}
        if self.on_gpu:
            bundle["GPU"] = 1
        self.placement = await self._cluster.place(
            [bundle] * num, what=f"{num} trainer ranks", set_by="`cluster.trainer_ranks`"
        )
        return self.placement

    async def restart(self) -> None:
        """Start all ranks, in place of those there were. The weights are those of the start."""
        self.close()
        self.num_changes += 1
        placement = await self.reserve()
        num = self._settings.trainer_ranks
        rank_class: Any = ray.remote(TrainerRank)
        needed = self._rank_resources()
        self.actors = [
            rank_class.options(**in_bundle(placement, number, needed)).remote()
            for number in range(num)
        ]
        (meeting,) = await self._gather([self.actors[0].meet.remote()])
        specs = [
            RankSpec(ranks=Ranks(rank=number, num=num), meeting=meeting, **self._told)
            for number in range(num)
        ]
        facts = await self._gather(
            [actor.start.remote(spec) for actor, spec in zip(self.actors, specs, strict=True)]
        )
        self.facts = facts[0]

    def close(self) -> None:
        """End the ranks and give their places back."""
        for actor in self.actors:
            with suppress(Exception):  # the cluster may be gone
                ray.kill(actor)
        self.actors = []
        if self.placement is not None:
            self._cluster.release(self.placement)
            self.placement = None

    # --- weights for replicas ---------------------------------------------------------------------

    async def announce(self) -> tuple[str, list[TensorSpec]]:
        """Where replicas find the first rank, and what weights it has."""
        (announced,) = await self._gather([self.actors[0].announce.remote()])
        found: tuple[str, list[TensorSpec]] = announced
        return found

    async def send(self, routes: Sequence[Route | None], buckets: Sequence[Bucket]) -> str | None:
        """Have the ranks send the weights, each on its route; None, or why not all were sent."""
        pairs = zip(self.actors, routes, strict=True)
        calls = [actor.send.remote(route, buckets) for actor, route in pairs]
        reasons: list[str | None] = await to_its_end(self._gather(calls))
        return next((reason for reason in reasons if reason is not None), None)

    async def ship(self) -> list[Any]:
        """Have the first rank put the weights into the object store; references to them."""
        calls = [actor.ship.remote() for actor in self.actors]
        results = await to_its_end(self._gather(calls))
        references: list[Any] = results[0]
        return references

    def beside(self, number: int, resources: Bundle) -> dict[str, Any]:
        """Options of an actor that shares the bundle of a rank."""
        if self.placement is None:
            raise RanksLost("the trainer ranks are not there")
        return in_bundle(self.placement, number, resources)

    # --- calls on all ranks -----------------------------------------------------------------------

    async def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        self.num_changes += method in ("load", "fit", "update")
        sent = [_sent(one) for one in arguments]
        calls = [actor.call.remote(method, *sent, **options) for actor in self.actors]
        results = await to_its_end(self._gather(calls))
        return results[0]

    async def _gather(self, calls: Sequence[Any]) -> list[Any]:
        """The results of a call on all ranks."""
        running = [asyncio.wrap_future(call.future()) for call in calls]
        _, waiting = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        if waiting:  # one has failed: the others wait for it, or have noticed
            await asyncio.wait(waiting, timeout=GRACE_SECONDS)
        errors = [one.exception() for one in running if one.done() and one.exception()]
        for one in running:
            one.cancel()
        if errors:
            raise worst_of(errors, num_ranks=len(calls))
        return [one.result() for one in running]

    # --- places -----------------------------------------------------------------------------------

    def _rank_resources(self) -> Bundle:
        resources: Bundle = {"CPU": 1}
        if self.on_gpu:
            is_colocated = self._settings.placement == "colocated"
            resources["GPU"] = COLOCATED_SHARE if is_colocated else 1
        return resources


def _sent(value: Any) -> Any:
    """An argument as all ranks get it: whole paths, and a reference to the samples of a step."""
    if isinstance(value, Path):
        return value.resolve()
    if not isinstance(value, Sequence):
        return value
    with full_store_errors("the samples of a step"):
        return ray.put(list(value))


def worst_of(errors: Sequence[BaseException | None], *, num_ranks: int) -> BaseException:
    """Which of the errors of ranks tells what happened."""
    causes = [one.cause if isinstance(one, RayTaskError) else one for one in errors]
    if any(isinstance(one, RayActorError) for one in causes):
        return RanksLost(f"one of {num_ranks} trainer ranks has ended")
    for cause in causes:
        if isinstance(cause, MemagentError):
            return cause
    cause = next((one for one in causes if one is not None), None)
    if isinstance(cause, ObjectStoreFullError | OutOfDiskError):
        return ClusterError(full_store("what a rank returns"))
    if broken := next((one for one in causes if one is not None and is_gpu_failure(one)), None):
        return RanksLost(f"a GPU of {num_ranks} trainer ranks has failed ({first_line(broken)})")
    is_network = any(word in str(cause).lower() for word in NETWORK)
    if isinstance(cause, RayError) or (isinstance(cause, RuntimeError) and is_network):
        return RanksLost(f"the {num_ranks} trainer ranks have lost each other")
    assert cause is not None
    return cause

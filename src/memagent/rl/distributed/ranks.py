"""Trainer ranks: processes with a shard of the model each, whose learners make every call together.

    ranks = RankGroup(cluster, config, run_dir, source)      # a `TrainerBackend`
    await ranks.restart()
    await ranks.update(groups, policy_version=12)

    driver ── groups, once, into the object store ──▶ rank 0, rank 1, ...   each packs all, and runs its share
           ◀── metrics of the first rank

    TrainerRank (a Ray actor)
      meet   the first rank opens the place where the ranks find each other
      start  join_group (nccl on GPUs, gloo on CPUs) ──▶ open_learner: the model ──▶ FSDP2 shards ──▶ Learner
      call   a method of the learner; only the first rank returns its result

FSDP2 shards each layer by itself, and the rest (embeddings, norm, head) together. Weights are gathered layer by
layer for a forward or backward pass, and dropped after it. The driver computes nothing. A rank that ends takes the
others with it: the call raises `RanksLost`, and `restart` restarts all ranks, waiting for nodes within
`cluster.wait_seconds`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from memagent.cluster import Bundle, Cluster, full_store, full_store_errors, in_bundle
from memagent.engines.local.engine import is_gpu_failure
from memagent.engines.replicas import first_line
from memagent.errors import ClusterError, MemagentError, RunError
from memagent.rl.backend import ModelFacts, RanksLost, TrainerBackend, to_its_end
from memagent.rl.distributed.weights import (
    Bucket,
    Route,
    TensorSpec,
    WeightSender,
    open_store,
    ship,
    specs_of,
    use_loopback,
)
from memagent.rl.settings import TrainConfig
from memagent.rl.update.learner import Learner, Ranks, open_policy
from memagent.rl.update.policy import Policy, decoder_of
from memagent.rl.weights.models import Trained, open_model

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

COLLECTIVE_SECONDS = 1800.0
"""How long a rank may wait for the others in one operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """What a rank gets at its start."""

    ranks: Ranks
    config: TrainConfig
    source: str
    """The model to load; all nodes must see it."""
    run_dir: str
    on_gpu: bool
    meeting: str
    """HOST:PORT of the first rank."""


class TrainerRank:
    """One process of training. It ends with the program that started it."""

    def __init__(self) -> None:
        self._store: TCPStore | None = None
        self._learner: Learner | None = None
        self._sender = WeightSender()
        self._on_gpu = False

    def meet(self) -> str:
        """Open the place where the ranks find each other; its HOST:PORT."""
        host = _own_address()
        self._store = open_store(host)
        return f"{host}:{self._store.port}"

    def start(self, spec: RankSpec) -> ModelFacts:
        """Join the group and load the model."""
        if not Path(spec.run_dir).is_dir():
            raise RunError(
                f"a node of the cluster has no {spec.run_dir}; put the run into a folder that all nodes share"
            )
        self._on_gpu = spec.on_gpu
        is_sharded = spec.ranks.num > 1 or _is_offloaded(spec.config)
        if is_sharded:
            join_group(spec, self._store)
        self._learner = open_learner(spec, is_sharded=is_sharded)
        kind = "GPUs" if spec.on_gpu else "CPUs"
        num = "1 rank" if spec.ranks.num == 1 else f"{spec.ranks.num} ranks"
        return ModelFacts.of(self._learner.trained, device=f"{num} on {kind}")

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Make a call of the learner together with the other ranks."""
        assert self._learner is not None, "start comes first"
        result = getattr(self._learner, method)(*arguments, **options)
        return result if self._learner.ranks.is_first else None

    def announce(self) -> tuple[str, list[TensorSpec]]:
        """Where replicas find this rank to get weights directly, and what weights there are."""
        assert self._learner is not None, "start comes first"
        return self._sender.meet(_own_address()), specs_of(self._learner.trained.parameters)

    def send(self, route: Route | None, buckets: Sequence[Bucket]) -> str | None:
        """Send the weights to replicas, together with the other ranks; None, or why not all were sent."""
        assert self._learner is not None, "start comes first"
        device = "cuda" if self._on_gpu else "cpu"
        return self._sender.send(self._learner.each_weight(), buckets, route, device)

    def ship(self) -> list[Any] | None:
        """Put the weights into the object store, together with the other ranks; references of the first."""
        assert self._learner is not None, "start comes first"
        weights = self._learner.weights()
        return ship(weights.items()) if self._learner.ranks.is_first else None


def _own_address() -> str:
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())  # type: ignore[no-untyped-call]


def join_group(spec: RankSpec, store: TCPStore | None = None) -> None:
    """Join the torch.distributed group of the ranks; the first one has the store where they meet."""
    assert spec.config.cluster is not None
    host, _, port = spec.meeting.rpartition(":")
    limit = timedelta(seconds=COLLECTIVE_SECONDS)
    use_loopback(host)
    if spec.on_gpu:
        torch.cuda.set_device(0)  # Ray shows each rank its own
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if spec.on_gpu else "gloo",
        store=store or TCPStore(host, int(port), is_master=False, timeout=limit),
        rank=spec.ranks.rank,
        world_size=spec.ranks.num,
        timeout=limit,
    )


def open_learner(spec: RankSpec, *, is_sharded: bool) -> Learner:
    """The learner of a rank. One with a shard of the model has joined the group before."""
    config, device = spec.config, "cuda" if spec.on_gpu else "cpu"
    # what is sharded is loaded into CPU memory, and layer by layer moved to the GPU
    settings = config.model.model_copy(update={"device": "cpu" if is_sharded else device})
    dtype = torch.bfloat16 if spec.on_gpu else torch.float32
    trained = open_model(settings, spec.source, seed=config.seed, dtype=dtype)
    policy = open_policy(config, trained, device=device)
    if is_sharded:
        mesh = init_device_mesh(device, (spec.ranks.num,))
        trained = shard(policy, trained, mesh, offload=spec.on_gpu and _is_offloaded(config))
    return Learner(config, trained, policy=policy, ranks=spec.ranks)


def shard(policy: Policy, trained: Trained, mesh: DeviceMesh, *, offload: bool) -> Trained:
    """Shard the model of a policy with FSDP2, in place; the same model with its sharded parameters."""
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
    if any(parameter.dtype == torch.bfloat16 for _, parameter in trained.parameters):
        options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy()
    for layer in decoder_of(trained.model).layers:
        fully_shard(layer, **options)
    fully_shard(policy, **options)
    named = trained.model.named_parameters()
    return replace(trained, parameters=tuple((n, p) for n, p in named if p.requires_grad))


def _is_offloaded(config: TrainConfig) -> bool:
    return config.cluster is not None and config.cluster.offload


# --- all ranks, as the loop sees them -------------------------------------------------------------

GRACE_SECONDS = 10.0
"""After one rank has failed, how long the others may take to tell why."""
COLOCATED_SHARE = 0.5
"""Share of its GPU that a rank reserves where an engine replica has the rest."""
NETWORK = ("gloo", "nccl", "connection", "broken pipe", "socket", "store")
"""Words in errors of a rank that lost another one."""


class RankGroup(TrainerBackend):
    """Trainer ranks on a cluster; see `TrainerBackend`."""

    def __init__(self, cluster: Cluster, config: TrainConfig, run_dir: Path, source: str) -> None:
        assert config.cluster is not None
        self.cluster = cluster
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
        self.placement = await self.cluster.place(
            [bundle] * num, what=f"{num} trainer ranks", set_by="`cluster.trainer_ranks`"
        )
        return self.placement

    async def restart(self) -> None:
        """Start all ranks, in place of those there were. The weights are those of the start."""
        import ray

        self.close()
        self.num_changes += 1
        placement = await self.reserve()
        num = self._settings.trainer_ranks
        rank_class: Any = ray.remote(TrainerRank)
        needed: Bundle = {"CPU": 1}
        if self.on_gpu:
            needed["GPU"] = COLOCATED_SHARE if self._settings.placement == "colocated" else 1
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
        import ray

        for actor in self.actors:
            with suppress(Exception):  # the cluster may be gone
                ray.kill(actor)
        self.actors = []
        if self.placement is not None:
            self.cluster.release(self.placement)
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


def _sent(value: Any) -> Any:
    """An argument as all ranks get it: whole paths, and a reference to the samples of a step."""
    if isinstance(value, Path):
        return value.resolve()
    if not isinstance(value, Sequence):
        return value
    import ray

    with full_store_errors("the samples of a step"):
        return ray.put(list(value))


def worst_of(errors: Sequence[BaseException | None], *, num_ranks: int) -> BaseException:
    """Which of the errors of ranks tells what happened."""
    from ray.exceptions import (
        ObjectStoreFullError,
        OutOfDiskError,
        RayActorError,
        RayError,
        RayTaskError,
    )

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

"""A trainer rank: a process with a shard of the model, which makes every call of its learner with the others.

    TrainerRank (a Ray actor)
      meet   the first rank opens the place where the ranks find each other
      start  join_group (nccl on GPUs, gloo on CPUs) ──▶ open_learner: the model ──▶ FSDP2 shards ──▶ Learner
      call   a method of the learner; only the first rank returns its result

FSDP2 shards each layer by itself, and the rest (embeddings, norm, head) together. Weights are gathered layer by
layer for a forward or backward pass, and dropped after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from memagent.errors import RunError
from memagent.rl.backend import ModelFacts
from memagent.rl.distributed.buckets import Bucket, TensorSpec, specs_of
from memagent.rl.distributed.transfer import Route, WeightSender, ship
from memagent.rl.distributed.weight_group import use_loopback
from memagent.rl.settings import TrainConfig
from memagent.rl.update.learner import Learner, Ranks, open_policy
from memagent.rl.update.policy import Policy, decoder_of
from memagent.rl.weights.models import Trained, open_model

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
        from ray.util import get_node_ip_address

        host = str(get_node_ip_address())  # type: ignore[no-untyped-call]
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
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
        from ray.util import get_node_ip_address

        assert self._learner is not None, "start comes first"
        meeting = self._sender.meet(str(get_node_ip_address()))  # type: ignore[no-untyped-call]
        return meeting, specs_of(self._learner.trained.parameters)

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
    trained = _opened(config, spec, on_cpu=is_sharded)
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


def _opened(config: TrainConfig, spec: RankSpec, *, on_cpu: bool) -> Trained:
    """The model; what is sharded is loaded into CPU memory, and layer by layer moved to the GPU."""
    device = "cuda" if spec.on_gpu and not on_cpu else "cpu"
    settings = config.model.model_copy(update={"device": device})
    dtype = torch.bfloat16 if spec.on_gpu else torch.float32
    return open_model(settings, spec.source, seed=config.seed, dtype=dtype)

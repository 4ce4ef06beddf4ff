"""Seconds to publish weights from a trainer to engine replicas, by each way, as ratios in one run.

    python -m benchmarks.weight_transfer [--gb 0.5] [--replicas 2] [--repeats 3]      on CPUs
    python -m benchmarks.weight_transfer --gpu --gb 4                                  one GPU, without Ray

On CPUs: the object store of a Ray cluster on this machine, as a push took it before; broadcast in a group with gloo; and
ipc, shared memory here. Each replica is a process that copies all weights into its own parameters. With --gpu the trainer and
one replica share a GPU: CUDA IPC against the way through the memory of the machine (GPU to CPU, shared memory, CPU to GPU).

Printed: seconds of a push (the fastest of the repeats, the first one left out), GB per second, and the ratio to the first way.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from memagent.rl.distributed.weights import (
    Bucket,
    Filled,
    SharedBuffer,
    TensorSpec,
    WeightSender,
    buffer_bytes,
    fill,
    opened,
    specs_of,
    split,
    tensors,
)

TENSOR_MB = 32
Weights = list[tuple[str, torch.Tensor]]


def make_weights(gb: float, device: str) -> Weights:
    """Matrices of a model of some size, in bfloat16."""
    num = max(1, round(gb * 1000 / TENSOR_MB))
    side = TENSOR_MB * 1_000_000 // 2 // 4000
    return [
        (f"layer.{number}", torch.randn(side, 4000, device=device).to(torch.bfloat16))
        for number in range(num)
    ]


def show(gb: float, seconds: dict[str, float]) -> None:
    """The table."""
    first = next(iter(seconds.values()))
    print("way                       seconds   GB/s   ratio")
    for name, one in seconds.items():
        print(f"{name:24} {one:8.3f} {gb / one:6.2f} {first / one:6.1f}x")


# --- on a cluster of this machine -----------------------------------------------------------------


class Copying:
    """A replica without an engine; also what opens it."""

    is_alive = True
    device = torch.device("cpu")

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = specs

    def __call__(self) -> Any:
        from benchmarks.driver_scaling import NullEngine

        self.engine = NullEngine()
        self._own = {
            spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
            for spec in self._specs
        }
        return self

    def _copy(self, weights: Any) -> None:
        for name, value in weights:
            self._own[name].copy_(value)

    async def load(self, buckets: Sequence[Any], policy_version: int) -> None:
        """Copy from the object store."""
        from memagent.rl.distributed.weights import shipped

        await asyncio.to_thread(self._copy, shipped(buckets))

    async def receive(self, buckets: Any, policy_version: int) -> None:
        """Copy what is sent."""
        await asyncio.to_thread(self._copy, tensors(buckets))

    async def aclose(self) -> None:
        """Nothing to end."""


class Sending:
    """A trainer rank that only sends. It runs as a Ray actor."""

    def __init__(self, gb: float) -> None:
        self._weights = make_weights(gb, "cpu")
        self._sender = WeightSender()

    def announce(self) -> tuple[str, list[TensorSpec]]:
        """As a trainer rank."""
        return self._sender.meet("127.0.0.1"), specs_of(self._weights)

    def send(self, route: Any, buckets: Sequence[Bucket]) -> str | None:
        """As a trainer rank."""
        return self._sender.send(iter(self._weights), buckets, route, "cpu")

    def ship(self) -> list[Any]:
        """As a trainer rank."""
        from memagent.rl.distributed.weights import ship

        return ship(self._weights)


class SendingRanks:
    """Ranks as the driver sees them: one for each replica, as colocated ones are."""

    on_gpu = False
    num_changes = 0

    def __init__(self, actors: list[Any]) -> None:
        self.actors = actors

    async def announce(self) -> tuple[str, list[TensorSpec]]:
        """Of the first."""
        found: tuple[str, list[TensorSpec]] = await self.actors[0].announce.remote()
        return found

    async def send(self, routes: Sequence[Any], buckets: Sequence[Bucket]) -> str | None:
        """All at once."""
        pairs = zip(self.actors, routes, strict=True)
        reasons = await asyncio.gather(*(one.send.remote(route, buckets) for one, route in pairs))
        return next((reason for reason in reasons if reason), None)

    async def ship(self) -> list[Any]:
        """Of the first."""
        found: list[Any] = await self.actors[0].ship.remote()
        return found


async def on_cluster(gb: float, num: int, repeats: int) -> dict[str, float]:
    """Every way to replicas of a Ray cluster that is started on this machine."""
    import ray

    from memagent.cluster import open_cluster
    from memagent.rl.distributed.replicas import ReplicaSync, open_replicas
    from memagent.rl.distributed.weights import DirectTransfer

    seconds = {}
    with open_cluster(min_cpus=2 * num, object_store_gb=2.5 * gb + 0.2) as cluster:
        rank_class: Any = ray.remote(Sending)
        ranks: Any = SendingRanks([rank_class.remote(gb) for _ in range(num)])
        _, specs = await ranks.announce()
        async with open_replicas(cluster, Copying(specs), num=num, resources={"CPU": 1}) as engine:
            for way in ("object_store", "broadcast", "ipc"):
                transfer = None
                if way != "object_store":
                    transfer = DirectTransfer(ranks, way, seconds=300)  # type: ignore[arg-type]
                sync = ReplicaSync(engine, ranks.ship, transfer=transfer)
                seconds[way] = await _fastest(sync, repeats)
    return seconds


async def _fastest(sync: Any, repeats: int) -> float:
    taken = []
    for version in range(repeats + 1):
        started = time.perf_counter()
        await sync.push(version)
        taken.append(time.perf_counter() - started)
    return min(taken[1:])  # the first opens connections


# --- two processes on one GPU ---------------------------------------------------------------------


def copy_on_gpu(specs: list[TensorSpec], buckets: list[Bucket], handles: Any, done: Any) -> None:
    """The process of a replica: a copy of each bucket, from wherever its buffer is."""
    own = {
        spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device="cuda")
        for spec in specs
    }
    while (handle := handles.get()) is not None:
        flat = opened(handle)
        for bucket in buckets:
            if bucket is not buckets[0]:
                handles.get()
            for name, value in tensors([Filled(bucket, flat[: bucket.num_bytes])]):
                own[name].copy_(value)
            torch.cuda.synchronize()
            done.put(None)
        del flat
        torch.cuda.ipc_collect()


def on_gpu(gb: float, repeats: int) -> dict[str, float]:
    """From one process to another on the same GPU."""
    weights = make_weights(gb, "cuda")
    specs = specs_of(weights)
    buckets = split(specs)
    context = multiprocessing.get_context("spawn")
    handles, done = context.Queue(), context.Queue()
    replica = context.Process(target=copy_on_gpu, args=(specs, buckets, handles, done))
    replica.start()

    def push(device: str) -> None:
        shared: Any = SharedBuffer(buffer_bytes(buckets), device)
        for _ in fill(weights, buckets, shared.flat):
            torch.cuda.synchronize()
            handles.put(shared.handle)
            done.get()
        shared.close()

    ways: dict[str, Callable[[], None]] = {
        "memory of the machine": lambda: push("cpu"),
        "ipc": lambda: push("cuda"),
    }
    seconds = {}
    for name, way in ways.items():
        taken = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            way()
            taken.append(time.perf_counter() - started)
        seconds[name] = min(taken[1:])
    handles.put(None)
    replica.join()
    return seconds


def main() -> None:
    """Parse options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gb", type=float, default=0.5, help="size of the weights")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gpu", action="store_true", help="two processes on one GPU, without Ray")
    options = parser.parse_args()
    if options.gpu:
        show(options.gb, on_gpu(options.gb, options.repeats))
    else:
        print(f"{options.gb:g} GB to {options.replicas} replicas on this machine")
        show(options.gb, asyncio.run(on_cluster(options.gb, options.replicas, options.repeats)))


if __name__ == "__main__":
    main()

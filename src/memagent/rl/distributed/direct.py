"""A push of weights straight from ranks to replicas, as the driver directs it.

    transfer = DirectTransfer(ranks, "broadcast")
    result = await transfer.send({0: actor, 1: actor}, 12)     # replicas by their number
    result.reason                                              # why the ranks could not send all, or None
    await transfer.ship_again()                                # the same weights through the object store, if they are still there

    transfer_of(config, on_gpu=True)                           # which way a run takes; ConfigError where none works

The first rank and the replicas make a new group when one of them is another than the last time, or when the last push
failed. After `MAX_FAILURES` failures in a row the way is given up.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from memagent.errors import ClusterError, ConfigError
from memagent.rl.distributed.buckets import BUCKET_BYTES, Bucket, split
from memagent.rl.distributed.rank_group import RankGroup
from memagent.rl.distributed.transfer import BroadcastRoute, IpcRoute, Received, Route
from memagent.rl.distributed.weight_group import GroupSpec
from memagent.rl.settings import TrainConfig

DirectWay = Literal["broadcast", "ipc"]
MAX_FAILURES = 3
"""Pushes that fail one after the other before the object store is used for good."""


def transfer_of(config: TrainConfig, *, on_gpu: bool) -> DirectWay | None:
    """How weights get to the replicas of a run; None: through the object store."""
    settings = config.cluster
    assert settings is not None
    is_vllm = config.rollout.engine is not None
    if settings.weight_transfer == "auto":
        # CPUs share memory with the object store; the adapters of vLLM are files
        if not on_gpu or not config.has_replicas or (is_vllm and config.has_adapter):
            return None
        return "ipc" if settings.placement == "colocated" else "broadcast"
    if settings.weight_transfer == "object_store":
        return None
    if is_vllm and not on_gpu:
        raise ConfigError(
            f"`cluster.weight_transfer={settings.weight_transfer}` needs GPUs where vLLM samples; set it to auto"
        )
    return settings.weight_transfer


class TransferResult(NamedTuple):
    """What became of a push."""

    reason: str | None
    """Why the ranks could not send everything."""
    received: Sequence[Received | BaseException]
    """By replica, in the order they were given."""


class DirectTransfer:
    """The direct way of a run."""

    def __init__(
        self,
        ranks: RankGroup,
        way: DirectWay,
        *,
        seconds: float = 60.0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`seconds` is how long one side may wait for the other with a bucket."""
        self._ranks = ranks
        self._way = way
        self._seconds = seconds
        self._bucket_bytes = bucket_bytes
        self._members: list[Any] = []
        """The first rank and the replicas of the group that is there."""
        self._meeting = ""
        self._buckets: list[Bucket] = []
        self._name = ""
        self._num_sent: int | None = None
        """Changes of the weights that were in them when they were sent."""
        self._num_failures = 0

    @property
    def is_usable(self) -> bool:
        """Whether it is worth trying."""
        return self._num_failures < MAX_FAILURES

    async def send(self, replicas: Mapping[int, Any], policy_version: int) -> TransferResult:
        """Send the weights of the ranks to replicas, and wait until both sides are done."""
        await self._meet([self._ranks.actors[0], *replicas.values()])
        self._num_sent = self._ranks.num_changes
        push = secrets.token_hex(8)
        actors = list(replicas.values())
        to = [self._receiver(push, member) for member in range(1, len(actors) + 1)]
        receiving = [
            actor.receive.remote(route, self._buckets, policy_version)
            for actor, route in zip(actors, to, strict=True)
        ]
        routes = [self._sender(push, rank, replicas) for rank in range(len(self._ranks.actors))]
        is_sent = False
        received: Sequence[Received | BaseException] = ()
        try:
            reason = await self._ranks.send(routes, self._buckets)
            is_sent = reason is None
        finally:
            if not is_sent:
                self._members = []
                for actor in actors:
                    actor.abandon.remote(to[0].key)
            received = await asyncio.gather(*receiving, return_exceptions=True)
        self._count(is_complete=reason is None and all(map(_is_taken, received)))
        return TransferResult(reason, received)

    async def ship_again(self) -> list[Any] | None:
        """The weights that were sent last, in the object store; None if the ranks have others by now."""
        if self._num_sent != self._ranks.num_changes:
            return None
        try:
            return await self._ranks.ship()
        except ClusterError:  # the ranks are gone: new ones push again
            return None

    async def _meet(self, members: list[Any]) -> None:
        """Have a group of these members; theirs is the old one if nobody has changed."""
        if list(map(id, self._members)) == list(map(id, members)):
            return
        self._meeting, specs = await self._ranks.announce()
        self._buckets = split(specs, bucket_bytes=self._bucket_bytes)
        self._members, self._name = members, secrets.token_hex(8)

    def _count(self, *, is_complete: bool) -> None:
        self._num_failures = 0 if is_complete else self._num_failures + 1
        if not is_complete:
            self._members = []

    def _sender(self, push: str, rank: int, replicas: Mapping[int, Any]) -> Route | None:
        """What a rank does."""
        if self._way == "broadcast":
            return self._in_group(0) if rank == 0 else None
        if rank not in replicas:  # nobody is beside it
            return None
        return IpcRoute(push=push, seconds=self._seconds, replica=replicas[rank])

    def _receiver(self, push: str, member: int) -> Route:
        if self._way == "broadcast":
            return self._in_group(member)
        return IpcRoute(push=push, seconds=self._seconds)

    def _in_group(self, member: int) -> BroadcastRoute:
        group = GroupSpec(
            name=self._name,
            meeting=self._meeting,
            size=len(self._members),
            on_gpu=self._ranks.on_gpu,
            seconds=self._seconds,
        )
        return BroadcastRoute(group=group, member=member)


def _is_taken(one: Received | BaseException) -> bool:
    return isinstance(one, Received) and one.error is None

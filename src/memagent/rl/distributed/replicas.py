"""Engine replicas of a run: copies of an engine on a cluster that get new weights while they run.

    async with open_replicas(cluster, opener, num=4, resources={"GPU": 1, "CPU": 1}) as engine:
        sync = ReplicaSync(engine, lambda: ship(trained.parameters))
        await sync.push(12)                          # all replicas sample from version 12 now

Every completion carries the version of the weights that its replica had. A replica that is replaced gets the newest
weights before its first call. One that is not ready within `start_seconds` is an error at the start; later, the
others go on without it, and when none is left for `wait_seconds` the run stops and can be resumed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Protocol

from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup

from memagent.cluster import Bundle, Cluster, OnClusterNote, in_bundle
from memagent.engines.replicas import Options, ReplicatedEngine, _Place
from memagent.errors import EngineError
from memagent.rl.distributed.replica import OpenReplica, TrainedReplica
from memagent.types import Completion, Message, Sampling

START_SECONDS = 600.0
"""How long a replica may take to be ready: its model is loaded, its server answers."""


class TextCodec(Protocol):
    """A tokenizer with a chat template, as a loaded model has."""

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@asynccontextmanager
async def open_replicas(
    cluster: Cluster,
    opener: OpenReplica,
    *,
    num: int,
    resources: Bundle,
    options: Options | None = None,
    codec: TextCodec | None = None,
    start_seconds: float = START_SECONDS,
    on_note: OnClusterNote = lambda text: None,
) -> AsyncIterator[ReplicaEngine]:
    """Start `num` replicas, spread over the nodes, each with these resources; they end with the block.

    With `options` they run where those say, and nothing is reserved. With a `codec` the engine also takes
    prompts of tokens, so that conversations continue the sampled ones.
    """
    async with AsyncExitStack() as stack:
        if options is None:
            group = await place_replicas(cluster, [resources] * num)
            stack.callback(cluster.release, group)
            options = partial(in_bundle, group, resources=resources)
        kind = ReplicaEngine if codec is None else TokenReplicaEngine
        engine = kind(
            opener,
            num,
            options,
            start_seconds=start_seconds,
            wait_seconds=cluster.wait_seconds,
            on_note=on_note,
        )
        if isinstance(engine, TokenReplicaEngine):
            engine.codec = codec
        stack.push_async_callback(engine.aclose)
        await engine.start()
        yield engine


async def place_replicas(cluster: Cluster, bundles: Sequence[Bundle]) -> PlacementGroup:
    """Reserve places for replicas, spread over the nodes."""
    return await cluster.place(
        bundles,
        what=f"{len(bundles)} engine replicas",
        set_by="`cluster.engine_replicas`",
        strategy="SPREAD",
    )


class ReplicaEngine(ReplicatedEngine):
    """Several replicas behind one engine, with weights that change."""

    replica_class = TrainedReplica
    to_raise = "`cluster.start_seconds`"
    _weights: tuple[Sequence[Any], int] | None = None
    """The newest weights and their version, for replicas that are replaced."""

    @property
    def policy_version(self) -> int:
        """As it was published last; 0 before."""
        return 0 if self._weights is None else self._weights[1]

    async def publish(self, buckets: Sequence[Any], policy_version: int) -> None:
        """Give all replicas new weights; calls in progress go on. Replicas that are replaced get them too."""
        self._weights = (buckets, policy_version)
        ready = [place for place in self._places if place.is_ready]
        await asyncio.gather(*(self._load(place) for place in ready))
        if not any(place.is_ready for place in self._places):
            await self._one_ready()

    async def sleep(self) -> None:
        """Free the memory of the devices. No call may be in progress."""
        await self._all("sleep")

    async def wake(self) -> None:
        """Take it again."""
        await self._all("wake")

    async def _prepare(self, place: _Place) -> None:
        loaded = None
        while loaded is not self._weights:  # newer ones may be published meanwhile
            loaded = self._weights
            assert loaded is not None
            if not await place.actor.load.remote(*loaded):
                raise EngineError(f"{self._name(place)} ended while it took its weights")

    async def _load(self, place: _Place) -> None:
        assert self._weights is not None
        actor = place.actor
        try:
            if not await actor.load.remote(*self._weights):
                self._lost(place, actor, EngineError("its engine has ended"))
        except RayActorError as error:
            self._lost(place, actor, error)
        except RayError as error:
            raise self._told(place, "cannot take the weights", error) from None


class TokenReplicaEngine(ReplicaEngine):
    """Also takes prompts of tokens; they are encoded here, by the tokenizer of the model."""

    codec: TextCodec | None = None

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation, ready for the reply."""
        assert self.codec is not None
        return self.codec.prompt_ids(messages)

    def decode(self, ids: Sequence[int]) -> str:
        """Tokens as text without special tokens."""
        assert self.codec is not None
        return self.codec.decode(ids)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """One reply to a prompt of tokens."""
        return await self._call("generate", tuple(prompt_ids), sampling, ())


class ReplicaSync:
    """Publishes new weights to replicas, through the object store."""

    def __init__(
        self,
        engine: ReplicaEngine,
        ship: Callable[[], Awaitable[Sequence[Any]]],
        *,
        is_colocated: bool = False,
    ) -> None:
        """`ship` puts the current weights into the object store. Colocated replicas share GPUs with the ranks."""
        self._engine = engine
        self._ship = ship
        self._is_colocated = is_colocated

    @property
    def policy_version(self) -> int:
        """As it was published last."""
        return self._engine.policy_version

    async def push(self, policy_version: int) -> None:
        """Calls in progress go on with the new weights. Colocated replicas wake."""
        buckets = await self._ship()
        if self._is_colocated:
            await self._engine.wake()
        await self._engine.publish(buckets, policy_version)

    async def release(self) -> None:
        """Colocated replicas sleep until the next `push`."""
        if self._is_colocated:
            await self._engine.sleep()

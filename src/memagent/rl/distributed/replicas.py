"""Engine replicas of a run: copies of an engine on a cluster that get new weights while they run.

    async with open_replicas(cluster, opener, num=4, resources={"GPU": 1, "CPU": 1}) as engine:
        sync = ReplicaSync(engine, ranks.ship, transfer=DirectTransfer(ranks, "broadcast"))
        await sync.push(12)                          # all replicas sample from version 12 now

A push goes straight from the ranks to the replicas, or through the object store: without a `transfer`, and when a direct
push fails. After a direct one there is no copy of the weights in the object store; a replica that is replaced has
another one put its weights there, or the ranks if they have not changed since, or it waits for the next push.

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
from memagent.rl.distributed.direct import DirectTransfer
from memagent.rl.distributed.replica import OpenReplica, TrainedReplica
from memagent.rl.distributed.transfer import Received
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


class _Published:
    """Weights that replicas have, or are getting."""

    def __init__(self, version: int, buckets: Sequence[Any] | None = None) -> None:
        self.version = version
        self.buckets = buckets
        """In the object store; None if they are not there."""
        self.is_sent = False
        """Whether they were sent directly, and every replica that is ready has all of them."""


class ReplicaEngine(ReplicatedEngine):
    """Several replicas behind one engine, with weights that change."""

    replica_class = TrainedReplica
    to_raise = "`cluster.start_seconds`"
    _published: _Published | None = None
    """The newest weights, for replicas that are replaced."""
    _transfer: DirectTransfer | None = None
    """How the last weights were sent, if that was directly."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._exchange = asyncio.Lock()
        """Held while weights are given to replicas or read from one."""
        self._awake = asyncio.Event()
        """Not set while the replicas sleep: none is started then, because ranks use the GPUs."""
        self._awake.set()

    @property
    def policy_version(self) -> int:
        """As it was published last; 0 before."""
        return 0 if self._published is None else self._published.version

    async def publish(self, buckets: Sequence[Any], policy_version: int) -> None:
        """Give all replicas new weights; calls in progress go on. Replicas that are replaced get them too."""
        async with self._exchange:
            await self._load_all(buckets, policy_version)
        await self._await_one()

    async def push(
        self,
        policy_version: int,
        ship: Callable[[], Awaitable[Sequence[Any]]],
        transfer: DirectTransfer,
    ) -> None:
        """As `publish`, straight from the ranks; through the object store if that fails."""
        async with self._exchange:
            if not await self._transferred(transfer, policy_version):
                await self._load_all(await ship(), policy_version)
        await self._await_one()

    async def sleep(self) -> None:
        """Free the memory of the devices. No call may be in progress."""
        self._awake.clear()
        await self._all("sleep")

    async def wake(self) -> None:
        """Take it again."""
        await self._all("wake")
        self._awake.set()

    async def _replace(self, place: _Place) -> None:
        await self._awake.wait()
        await super()._replace(place)

    async def _prepare(self, place: _Place, limit: asyncio.Timeout) -> None:
        if not self._awake.is_set():  # the others have fallen asleep while it started
            await self._sleeping(place, limit)
        loaded = None
        while loaded is not self._published:  # newer ones may be published meanwhile
            loaded = self._published
            assert loaded is not None
            buckets = await self._stored(loaded)
            if buckets is None:
                await self._newer_than(loaded, limit)
                continue
            try:
                reason = await place.actor.load.remote(buckets, loaded.version)
            except RayError:
                if (
                    loaded.is_sent
                ):  # who put them there may be gone: the next attempt needs another copy
                    loaded.buckets = None
                raise
            if reason is not None:
                raise EngineError(f"{self._name(place)} ended while it took its weights: {reason}")

    async def _stored(self, published: _Published) -> Sequence[Any] | None:
        """Weights in the object store; those that were sent directly are put there by who has them."""
        async with self._exchange:
            if published.buckets is None and published is self._published and published.is_sent:
                published.buckets = await self._shared()
        return published.buckets

    async def _shared(self) -> Sequence[Any] | None:
        assert self._transfer is not None
        for place in [place for place in self._places if place.is_ready]:
            actor = place.actor
            try:
                buckets: Sequence[Any] | None = await actor.share.remote()
            except RayActorError as error:
                self._lost(place, actor, error)
                continue
            if buckets is not None:
                return buckets
        return await self._transfer.ship_again()

    async def _sleeping(self, place: _Place, limit: asyncio.Timeout) -> None:
        """Have a new replica sleep until the others wake, however long the ranks train."""
        async with suspended(limit):
            reason = await place.actor.sleep.remote()
            await self._awake.wait()
            reason = reason or await place.actor.wake.remote()
        if reason is not None:
            raise EngineError(f"{self._name(place)} ended while it slept: {reason}")

    async def _newer_than(self, published: _Published, limit: asyncio.Timeout) -> None:
        """Wait for the next push, however long the ranks train."""
        async with suspended(limit), self._changed:
            await self._changed.wait_for(lambda: self._published is not published)

    async def _announce(self, published: _Published) -> None:
        """From now on these are the newest weights."""
        self._published = published
        async with self._changed:
            self._changed.notify_all()

    async def _await_one(self) -> None:
        """At least one replica must be there."""
        if not any(place.is_ready for place in self._places):
            await self._one_ready()

    async def _transferred(self, transfer: DirectTransfer, policy_version: int) -> bool:
        """Send weights directly to all replicas that are ready; whether all that are left have them."""
        ready = [(place, place.actor) for place in self._places if place.is_ready]
        if not ready or not transfer.is_usable:
            return False
        published = _Published(policy_version)
        self._transfer = transfer
        await self._announce(published)
        actors = {place.number: actor for place, actor in ready}
        result = await transfer.send(actors, policy_version)
        reasons = [result.reason]
        for (place, actor), received in zip(ready, result.received, strict=True):
            reasons.append(self._heard(place, actor, received))
        failures = [reason for reason in reasons if reason is not None]
        published.is_sent = not failures
        if failures:
            next_time = "this time" if transfer.is_usable else "from now on"
            self._on_note(
                f"weights could not be sent directly ({failures[0]}); they go through the object store {next_time}"
            )
        return published.is_sent

    def _heard(self, place: _Place, actor: Any, received: Received | BaseException) -> str | None:
        """Why a replica that is left has not all weights."""
        if isinstance(received, RayActorError):
            self._lost(place, actor, received)
            return None
        if isinstance(received, BaseException):
            return str(self._told(place, "cannot take the weights", EngineError(str(received))))
        if not received.is_alive:
            self._lost(place, actor, EngineError(received.error or "its engine has ended"))
            return None
        return received.error

    async def _load_all(self, buckets: Sequence[Any], policy_version: int) -> None:
        """Give all replicas that are ready weights in the object store."""
        await self._announce(_Published(policy_version, buckets))
        ready = [place for place in self._places if place.is_ready]
        await asyncio.gather(*(self._load(place, buckets, policy_version) for place in ready))

    async def _load(self, place: _Place, buckets: Sequence[Any], policy_version: int) -> None:
        actor = place.actor
        try:
            reason = await actor.load.remote(buckets, policy_version)
            if reason is not None:
                self._lost(place, actor, EngineError(reason))
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


@asynccontextmanager
async def suspended(limit: asyncio.Timeout) -> AsyncIterator[None]:
    """Time in the block does not count."""
    due, loop = limit.when(), asyncio.get_running_loop()
    limit.reschedule(None)
    started = loop.time()
    yield
    limit.reschedule(None if due is None else due + loop.time() - started)


class ReplicaSync:
    """Publishes new weights to replicas."""

    def __init__(
        self,
        engine: ReplicaEngine,
        ship: Callable[[], Awaitable[Sequence[Any]]],
        *,
        transfer: DirectTransfer | None = None,
        is_colocated: bool = False,
    ) -> None:
        """`ship` puts the current weights into the object store; with a `transfer` they are sent directly.

        Colocated replicas share GPUs with the ranks.
        """
        self._engine = engine
        self._ship = ship
        self._transfer = transfer
        self._is_colocated = is_colocated

    @property
    def policy_version(self) -> int:
        """As it was published last."""
        return self._engine.policy_version

    async def push(self, policy_version: int) -> None:
        """Calls in progress go on with the new weights. Colocated replicas wake."""
        if self._transfer is not None and self._transfer.is_usable:
            await self._wake()
            await self._engine.push(policy_version, self._ship, self._transfer)
            return
        buckets = await self._ship()
        await self._wake()
        await self._engine.publish(buckets, policy_version)

    async def release(self) -> None:
        """Colocated replicas sleep until the next `push`."""
        if self._is_colocated:
            await self._engine.sleep()

    async def _wake(self) -> None:
        if self._is_colocated:
            await self._engine.wake()

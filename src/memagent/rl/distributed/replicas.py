"""Engine replicas of a run: copies of an engine on a cluster that get new weights while they run.

    async with open_replicas(cluster, opener, num=4, resources={"GPU": 1, "CPU": 1}) as engine:
        sync = ReplicaSync(engine, ranks.ship, transfer=DirectTransfer(ranks, "broadcast"))
        await sync.push(12)                          # all replicas sample from version 12 now

    TrainedReplica(EmbeddedReplica(...))     on a node: the model in the actor's process, on its GPU or CPU
    TrainedReplica(VllmReplica(...))         on a node: a vLLM server that the actor starts on its GPUs (`vllm_replica.py`)

An opener is sent to the node and called there. What it returns has an engine, takes new weights, and frees its
memory while it sleeps, for ranks that share the GPU.

A push goes straight from the ranks to the replicas, or through the object store: without a `transfer`, and when a direct
push fails. After a direct one there is no copy of the weights in the object store: for a replica that is replaced the
ranks put them there if they have not changed since, else it waits for the next push.

Every completion carries the version of the weights that its replica had. A replica that is replaced gets the newest
weights before its first call. One that is not ready within `start_seconds` is an error at the start; later, the
others go on without it, and when none is left for `wait_seconds` the run stops and can be resumed.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memagent.cluster import Bundle, Cluster, OnClusterNote, in_bundle
from memagent.config import LocalConfig
from memagent.engines.base import BaseEngine
from memagent.engines.local.engine import LocalEngine, is_gpu_failure
from memagent.engines.replicas import (
    EngineReplica,
    HostedEngine,
    Options,
    ReplicaReply,
    ReplicatedEngine,
    _Place,
    first_line,
)
from memagent.errors import EngineError
from memagent.rl.distributed.weights import (
    Bucket,
    BufferHandle,
    DirectTransfer,
    Filled,
    Received,
    Route,
    WeightReceiver,
    shipped,
    tensors,
)
from memagent.rl.settings import ModelSettings
from memagent.rl.weights.models import MergedCopy, Trained, open_model
from memagent.rl.weights.sync import WeightSync
from memagent.types import Completion, Message, Sampling, TokenEngine

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

START_SECONDS = 600.0
"""How long a replica may take to be ready: its model is loaded, its server answers."""


class Replica(HostedEngine, Protocol):
    """An engine that takes weights."""

    @property
    def device(self) -> torch.device:
        """Where it wants weights that are sent to it."""
        ...

    async def load(self, buckets: Sequence[Any], policy_version: int) -> None:
        """Sample from these weights from now on; calls in progress go on."""
        ...

    async def receive(self, buckets: Iterator[Filled], policy_version: int) -> None:
        """As `load`, with weights that arrive bucket by bucket on `device`.

        If they do not arrive to the end, nothing is sampled before the next `load` or `receive`.
        """
        ...

    async def sleep(self) -> None:
        """Free the memory of the device. No call may be in progress."""
        ...

    async def wake(self) -> None:
        """Take the memory again."""
        ...


OpenReplica = Callable[[], Replica]
"""Opens a replica, on its node."""


class TrainedReplica(EngineReplica):
    """Runs as a Ray actor."""

    _hosted: Replica | None

    def __init__(self, opener: OpenReplica) -> None:
        super().__init__(opener)
        self._receiver = WeightReceiver()
        self._receiving = asyncio.Lock()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> ReplicaReply:
        """One reply to a prompt of tokens."""
        return await self._reply(lambda engine: _generated(engine, prompt_ids, sampling))

    async def load(self, buckets: Sequence[Any], policy_version: int) -> str | None:
        """Take new weights; None, or why the engine has ended."""
        return await self._why_ended(self._opened.load(buckets, policy_version))

    async def receive(
        self, route: Route, buckets: Sequence[Bucket], policy_version: int
    ) -> Received:
        """Take new weights that ranks send."""
        hosted = self._opened
        async with self._receiving:
            arriving = self._receiver.received(route, buckets, hosted.device)
            try:
                await hosted.receive(arriving, policy_version)
            except Exception as error:
                return Received(error=first_line(error), is_alive=hosted.is_alive)
            finally:
                arriving.close()
        return Received()

    async def deliver(self, push: str, handle: BufferHandle, seconds: float) -> str | None:
        """The rank beside this replica has filled a buffer of a push; None, or why it was not copied."""
        return await self._receiver.deliver(push, handle, seconds)

    async def abandon(self, key: str) -> None:
        """The ranks send nothing more of a push; `key` is that of its route."""
        self._receiver.abandon(key)

    async def sleep(self) -> str | None:
        """Free the device; None, or why the engine has ended."""
        return await self._why_ended(self._opened.sleep())

    async def wake(self) -> str | None:
        """Take the device again; None, or why the engine has ended."""
        return await self._why_ended(self._opened.wake())

    async def _why_ended(self, working: Awaitable[None]) -> str | None:
        """Wait for some work; an error that leaves the engine alive is raised."""
        try:
            await working
        except Exception as error:
            if self._opened.is_alive:
                raise
            return first_line(error)
        return None

    @property
    def _opened(self) -> Replica:
        assert self._hosted is not None, "the driver starts a replica first"
        return self._hosted


async def _generated(
    engine: BaseEngine, prompt_ids: Sequence[int], sampling: Sampling
) -> Completion:
    if not isinstance(engine, TokenEngine):
        raise EngineError(f"{engine.model} takes no prompts of tokens")
    return await engine.generate(prompt_ids, sampling)


# --- the model in the actor's process -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedReplica:
    """Opens the model of a run in the actor; its own copy of the weights."""

    model: ModelSettings
    source: str
    """The model, at the same place on all nodes."""
    seed: int
    engine_settings: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> EmbeddedModel:
        trained = open_model(self.model, self.source, seed=self.seed)
        return EmbeddedModel(trained, LocalConfig.parse(dict(self.engine_settings)))


class EmbeddedModel:
    """A local engine on its own copy of the weights, with the adapter merged in if there is one."""

    def __init__(self, trained: Trained, config: LocalConfig) -> None:
        self._trained = trained
        self._config = config
        self.device = trained.model.device
        self._merged = MergedCopy(trained.loaded) if trained.has_adapter else None
        loaded = trained.loaded if self._merged is None else self._merged.loaded
        self._loaded = loaded
        self._engine: LocalEngine | None = LocalEngine(loaded, config)
        self._version = 0
        self._is_partial = False
        """Whether some weights are new and some are not: nothing is sampled then."""
        self._holding = ExitStack()
        self._is_broken = False
        """Whether the GPU has failed: this process cannot use it any more."""

    @property
    def is_alive(self) -> bool:
        """False after an error of the GPU."""
        return not self._is_broken and (self._engine is None or self._engine.is_alive)

    @property
    def engine(self) -> LocalEngine:
        """Raises EngineError while it sleeps."""
        if self._engine is None:
            raise EngineError("the engine replica sleeps while the ranks train")
        return self._engine

    async def load(self, buckets: Sequence[Any], policy_version: int) -> None:
        """Copy the weights between two steps of the engine; calls in progress go on with them."""
        with self._noting_failures():
            await asyncio.to_thread(self.take, shipped(buckets), policy_version)

    async def receive(self, buckets: Iterator[Filled], policy_version: int) -> None:
        """The same with weights that arrive; see `Replica`."""
        with self._noting_failures():
            await asyncio.to_thread(self.take, tensors(buckets), policy_version)

    def take(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Copy weights by name. After an error nothing is sampled until all weights were taken."""
        parameters = dict(self._trained.parameters)
        coming = iter(weights)
        first = next(coming, None)  # until it is there, nothing has changed
        if first is None:
            return
        if not self._is_partial:
            self._holding.enter_context(self.engine.hold())
        self._is_partial = True
        with self.engine.changing_weights(policy_version), torch.no_grad():
            for name, value in chain([first], coming):
                parameters[name].copy_(value)
            if self._merged is not None:
                self._merged.refresh()
            if self.device.type == "cuda":
                torch.cuda.synchronize()  # the engine computes in a stream of its own
        self._version, self._is_partial = policy_version, False
        self._holding.close()

    async def sleep(self) -> None:
        """Drop the KV cache and move the weights to the CPU."""
        await self.aclose()
        with self._noting_failures():
            self._move(torch.device("cpu"))
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    async def wake(self) -> None:
        """The weights are those from before; the cache is empty."""
        if self._engine is not None:
            return
        with self._noting_failures():
            self._move(self.device)
            self._engine = LocalEngine(self._loaded, self._config)
            self._engine.weights_changed(self._version)
        if self._is_partial:
            self._holding.enter_context(self._engine.hold())

    async def aclose(self) -> None:
        """Stop the engine's thread."""
        self._is_broken = not self.is_alive
        engine, self._engine = self._engine, None
        self._holding.close()
        if engine is not None:
            await engine.aclose()

    @contextmanager
    def _noting_failures(self) -> Iterator[None]:
        """Note errors of the GPU outside of the engine."""
        try:
            yield
        except Exception as error:
            self._is_broken = self._is_broken or is_gpu_failure(error)
            raise

    def _move(self, device: torch.device) -> None:
        for model in (self._trained.model, self._loaded.model):
            model.to(device)  # type: ignore[arg-type]


# --- in the driver --------------------------------------------------------------------------------


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
        """Held while weights are given to replicas, or put into the object store for one."""
        self._awake = asyncio.Event()
        """Cleared while replicas sleep: the ranks use the GPUs, so no replica may start."""
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
        transfer: DirectTransfer | None,
    ) -> None:
        """As `publish`, straight from the ranks; through the object store without a `transfer`, and if that fails."""
        async with self._exchange:
            if transfer is None or not await self._transferred(transfer, policy_version):
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
        from ray.exceptions import RayError

        if not self._awake.is_set():  # the others have fallen asleep while it started
            await self._sleeping(place, limit)
        loaded = None
        while loaded is not self._published:  # newer ones may be published meanwhile
            loaded = self._published
            assert loaded is not None
            buckets = await self._stored(loaded)
            if buckets is None:
                async with suspended(limit), self._changed:  # however long the ranks train
                    while self._published is loaded:
                        await self._changed.wait()
                continue
            try:
                reason = await place.actor.load.remote(buckets, loaded.version)
            except RayError:
                if loaded.is_sent:  # the ranks that put them there may be gone
                    loaded.buckets = None
                raise
            if reason is not None:
                raise EngineError(f"{self._name(place)} ended while it took its weights: {reason}")

    async def _stored(self, published: _Published) -> Sequence[Any] | None:
        """Weights in the object store; those that were sent directly are put there by the ranks, as long as they have them."""
        async with self._exchange:
            if published.buckets is None and published is self._published and published.is_sent:
                assert self._transfer is not None
                published.buckets = await self._transfer.ship_again()
        return published.buckets

    async def _sleeping(self, place: _Place, limit: asyncio.Timeout) -> None:
        """Have a new replica sleep until the others wake, however long the ranks train."""
        async with suspended(limit):
            reason = await place.actor.sleep.remote()
            await self._awake.wait()
            reason = reason or await place.actor.wake.remote()
        if reason is not None:
            raise EngineError(f"{self._name(place)} ended while it slept: {reason}")

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
        from ray.exceptions import RayActorError

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
        from ray.exceptions import RayActorError, RayError

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


@dataclass(frozen=True, slots=True)
class ReplicaSync(WeightSync):
    """Publishes new weights to replicas."""

    engine: ReplicaEngine
    ship: Callable[[], Awaitable[Sequence[Any]]]
    """Puts the current weights into the object store."""
    transfer: DirectTransfer | None = None
    """Sends them directly; None where they go through the object store."""
    is_colocated: bool = False
    """Whether the replicas share GPUs with the ranks."""

    @property
    def policy_version(self) -> int:
        """As it was published last."""
        return self.engine.policy_version

    async def push(self, policy_version: int) -> None:
        """Calls in progress go on with the new weights. Colocated replicas wake."""
        if self.is_colocated:
            await self.engine.wake()
        await self.engine.push(policy_version, self.ship, self.transfer)

    async def release(self) -> None:
        """Colocated replicas sleep until the next `push`."""
        if self.is_colocated:
            await self.engine.sleep()

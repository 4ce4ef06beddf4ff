"""Engine replicas on a cluster as one engine: calls go to the least busy one, a dead one is replaced.

    complete ──▶ balance ──▶ replica 1 (actor on node 1)
                   │     ──▶ replica 2 (actor on node 2)    died: a line, a new actor, the newest weights
                   └─ a call that was there is sampled again at another one, with the same seed

    async with open_replicas(cluster, opener, num=4, resources={"GPU": 1, "CPU": 1}) as engine:
        sync = ReplicaSync(engine, lambda: ship(trained.parameters))
        await sync.push(12)                          # all replicas sample from version 12 now

Every completion carries the version of the weights that its replica had. A replica that is not ready within
`start_seconds` is an error at the start; later, the others go on without it, and when none is left for
`wait_seconds` the run stops and can be resumed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError

from memagent.cluster import Bundle, Cluster, OnClusterNote, in_bundle
from memagent.engines.balance import Balancer, prefix_keys
from memagent.engines.base import BaseEngine
from memagent.engines.retry import Failure
from memagent.errors import ClusterError, EngineError, MemagentError
from memagent.rl.distributed.replica import OpenReplica, ReplicaActor, ReplicaFacts, ReplicaReply
from memagent.types import Completion, Message, Sampling

START_SECONDS = 600.0
"""How long a replica may take to be ready: its model is loaded, its server answers."""
MAX_STARTS = 3
"""How often a replica that died is started again in a row."""
MAX_CALLS_AT_ONCE = 4096
"""Calls that one actor holds; its engine decides how many it computes."""


class TextCodec(Protocol):
    """A tokenizer with a chat template, as a loaded model has."""

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


Options = Callable[[int], Mapping[str, Any]]
"""Where the actor of a replica runs, by its number; asked again when it is replaced."""


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
            what = f"{num} engine replicas"
            group = await cluster.place(
                [resources] * num,
                what=what,
                set_by="`cluster.engine_replicas`",
                strategy="SPREAD",
            )
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


class _Place:
    """A replica as the driver sees it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.actor: Any = None
        self.is_ready = False
        self.replacing: asyncio.Task[None] | None = None
        self.facts: ReplicaFacts | None = None


class ReplicaEngine(BaseEngine):
    """Several replicas behind one engine."""

    def __init__(
        self,
        opener: OpenReplica,
        num: int,
        options: Options,
        *,
        start_seconds: float = START_SECONDS,
        wait_seconds: float = 300.0,
        on_note: OnClusterNote = lambda text: None,
    ) -> None:
        """`start` starts them."""
        self.model = self.tokenizer = ""
        self._opener = opener
        self._options = options
        self._places = [_Place(number) for number in range(num)]
        self._balancer = Balancer(len(self._places))
        self._start_seconds = start_seconds
        self._wait_seconds = wait_seconds
        self._on_note = on_note
        self._weights: tuple[Sequence[Any], int] | None = None
        """The newest weights and their version, for replicas that are replaced."""
        self._changed = asyncio.Condition()
        self._last_error: MemagentError | None = None
        self._is_closed = False

    @property
    def policy_version(self) -> int:
        """Of the newest weights that were published."""
        return 0 if self._weights is None else self._weights[1]

    @property
    def pids(self) -> list[int | None]:
        """The process of each replica's actor; None while it is replaced."""
        return [
            place.facts.pid if place.is_ready and place.facts is not None else None
            for place in self._places
        ]

    async def start(self) -> None:
        """Start all replicas side by side. Raises EngineError when one is not ready in time."""
        starts = [asyncio.ensure_future(self._start(place)) for place in self._places]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for task in starts:
                task.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            raise
        facts = self._places[0].facts
        assert facts is not None
        self.model, self.tokenizer = facts.model, facts.tokenizer
        self.served_window, self.reading_defaults = facts.served_window, facts.reading_defaults

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """One reply, of the least busy replica."""
        return await self._call("complete", messages, sampling, prefix_keys(messages))

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

    async def aclose(self) -> None:
        """End all replicas."""
        self._is_closed = True
        for place in self._places:
            if place.replacing is not None:
                place.replacing.cancel()
        tasks = [place.replacing for place in self._places if place.replacing is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._all("aclose"), 20.0)
        for place in self._places:
            self._kill(place)

    # --- calls ---------------------------------------------------------------------------------

    async def _call(
        self, method: str, prompt: Any, sampling: Sampling, prefixes: Sequence[bytes]
    ) -> Completion:
        num_attempts = 1
        while True:
            place = await self._choose(prefixes)
            actor = place.actor
            self._balancer.begin(place.number, prefixes)
            try:
                reply: ReplicaReply = await _awaited(
                    getattr(actor, method).remote(prompt, sampling)
                )
            except RayActorError as error:
                self._lost(place, actor, error)
                num_attempts += 1
                continue
            finally:
                self._balancer.end(place.number)
            if reply.is_dead:
                self._lost(place, actor, reply.error or EngineError("its engine has ended"))
                num_attempts += 1
                continue
            if reply.error is not None:
                raise reply.error
            assert reply.completion is not None
            self._balancer.succeeded(place.number)
            if num_attempts == 1:
                return reply.completion
            return replace(reply.completion, num_attempts=num_attempts)

    async def _choose(self, prefixes: Sequence[bytes]) -> _Place:
        """The replica for a call, waiting for one to be ready."""
        while True:
            away = [place.number for place in self._places if not place.is_ready]
            if len(away) == len(self._places):
                await self._one_ready()
                continue
            number = self._balancer.choose(prefixes, tried=away)
            if number is not None:
                return self._places[number]
            # all that are ready are set aside after a death: they are new
            return next(place for place in self._places if place.is_ready)

    async def _one_ready(self) -> None:
        """Wait for a replica, up to `wait_seconds` plus the time that one may take to start."""
        seconds = self._wait_seconds + self._start_seconds
        try:
            async with asyncio.timeout(seconds), self._changed:
                while not any(place.is_ready for place in self._places):
                    if not any(place.replacing for place in self._places):
                        raise self._last_error or ClusterError("no engine replica is left")
                    await self._changed.wait()
        except TimeoutError:
            raise ClusterError(
                f"no engine replica came back within {seconds:.0f} s; resume the run when its nodes are "
                "there again, or raise `cluster.wait_seconds`"
            ) from None

    # --- replicas ------------------------------------------------------------------------------

    async def _start(self, place: _Place) -> None:
        """Start the actor of a place, and give it the newest weights."""
        actor: Any = ray.remote(ReplicaActor)
        place.actor = actor.options(
            max_concurrency=MAX_CALLS_AT_ONCE, max_restarts=0, **self._options(place.number)
        ).remote(self._opener)
        name = f"engine replica {place.number}"
        try:
            async with asyncio.timeout(self._start_seconds):
                place.facts = await place.actor.start.remote()
                loaded = None
                while loaded is not self._weights:  # newer ones may be published meanwhile
                    loaded = self._weights
                    assert loaded is not None
                    if not await place.actor.load.remote(*loaded):
                        raise EngineError(f"{name} ended while it took its weights")
        except TimeoutError:
            self._kill(place)
            raise EngineError(
                f"{name} was not ready within {self._start_seconds:g} s; look at the logs of its node, or "
                "raise `cluster.start_seconds`"
            ) from None
        except RayError as error:
            self._kill(place)
            cause = getattr(error, "cause", None)
            if isinstance(cause, MemagentError):
                raise type(cause)(f"{name}: {cause}") from None
            raise EngineError(f"{name} did not start: {_last_line(error)}") from None
        except BaseException:
            self._kill(place)
            raise
        place.is_ready = True
        async with self._changed:
            self._changed.notify_all()

    def _lost(self, place: _Place, actor: Any, error: Exception) -> None:
        """A replica died. The first call that notices has it replaced."""
        if place.actor is not actor or not place.is_ready or self._is_closed:
            return
        place.is_ready = False
        self._balancer.failed(place.number, Failure(kind="unreachable", reason="it died"))
        self._on_note(
            f"engine replica {place.number} died ({_last_line(error)}); it is replaced, and its unfinished "
            "replies are sampled again"
        )
        self._kill(place)
        place.replacing = asyncio.ensure_future(self._replace(place))

    async def _replace(self, place: _Place) -> None:
        for number in range(1, MAX_STARTS + 1):
            try:
                await self._start(place)
            except MemagentError as error:
                self._last_error = error
                self._on_note(f"start {number} of {MAX_STARTS} failed: {error}")
                continue
            self._balancer.succeeded(place.number)
            self._on_note(f"engine replica {place.number} is back")
            break
        place.replacing = None
        async with self._changed:
            self._changed.notify_all()

    async def _load(self, place: _Place) -> None:
        assert self._weights is not None
        actor = place.actor
        try:
            if not await actor.load.remote(*self._weights):
                self._lost(place, actor, EngineError("its engine has ended"))
        except RayActorError as error:
            self._lost(place, actor, error)
        except RayError as error:
            cause = getattr(error, "cause", None)
            raise (
                cause
                if isinstance(cause, MemagentError)
                else EngineError(
                    f"engine replica {place.number} cannot take the weights: {_last_line(error)}"
                )
            ) from None

    async def _all(self, method: str) -> None:
        """Call a method of all replicas that are ready."""
        ready = [(place, place.actor) for place in self._places if place.is_ready]
        calls = (getattr(actor, method).remote() for _, actor in ready)
        results = await asyncio.gather(*(_awaited(call) for call in calls), return_exceptions=True)
        for (place, actor), result in zip(ready, results, strict=True):
            if isinstance(result, RayActorError):
                self._lost(place, actor, result)
            elif isinstance(result, BaseException) and not self._is_closed:
                raise result

    def _kill(self, place: _Place) -> None:
        actor, place.actor, place.is_ready = place.actor, None, False
        if actor is not None:
            with suppress(Exception):  # the cluster may be gone
                ray.kill(actor)


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


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__


async def _awaited(reference: Any) -> Any:
    """The result of an actor's method; a call that is cancelled here is cancelled there."""
    try:
        return await reference
    except asyncio.CancelledError:
        ray.cancel(reference)
        raise

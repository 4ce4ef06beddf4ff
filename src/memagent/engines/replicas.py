"""Copies of an engine on all nodes of a cluster, as one engine.

    complete ──▶ choose ──▶ node 1: EngineReplica ──▶ engine (local:MODEL, vllm:MODEL ...)
       driver      │    ──▶ node 2: EngineReplica ──▶ engine        died: a line, a new actor
                   └─ the least busy one; prompts with a common prefix go to the same one

    with open_cluster("10.0.0.1:6379") as cluster:
        engine = await open_replicas(cluster, choose_engine("local:smollm2-135m", {}))
        await engine.complete(messages, sampling)

A replica has its own GPUs: one for a local model, `tensor_parallel_size` for vLLM; without GPUs in the cluster it
has a CPU. One that dies, or whose engine ends, is started again, and its calls go to the others meanwhile. Models
and adapters given as paths must be at the same place on all nodes; those with short names are pulled on each.

Not here: engines that get new weights while they run (`rl/distributed`, built on this), endpoints that run already
(`balance.py`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from memagent.cluster import Bundle, Cluster, OnClusterNote, full_store_errors, in_bundle
from memagent.engines.balance import Balancer, prefix_keys
from memagent.engines.base import BaseEngine, EngineChoice
from memagent.engines.limit import Failure
from memagent.errors import ClusterError, EngineError, MemagentError
from memagent.types import Completion, Message, Sampling

START_SECONDS = 1800.0
"""How long a replica may take to load its model."""
CLOSE_SECONDS = 30.0
"""How long replicas may take to end what they started."""
MAX_STARTS = 3
"""How often a replica that died is started again in a row."""
MAX_ATTEMPTS = 5
"""Replicas that may be lost under one call: it may be what ends them."""
MAX_CALLS_AT_ONCE = 4096
"""Calls that one actor holds; the engine in it queues them."""
ON_GPUS = ("local", "vllm")
"""Kinds of engines that compute themselves."""
Options = Callable[[int], Mapping[str, Any]]
"""Where the actor of a replica runs, by its number; asked again when it is replaced."""


# --- on a node ------------------------------------------------------------------------------------


class HostedEngine(Protocol):
    """An engine in the process of a replica."""

    @property
    def engine(self) -> BaseEngine:
        """Samples replies."""
        ...

    @property
    def is_alive(self) -> bool:
        """False when the engine has ended by itself: the replica is of no use any more."""
        ...

    async def aclose(self) -> None:
        """End what was started."""
        ...


OpenHosted = Callable[[], HostedEngine | BaseEngine]
"""Opens the engine of a replica, alone or with more. It is sent to the node and called there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """What the driver needs to know of a replica."""

    model: str
    tokenizer: str
    served_window: int | None
    reading_defaults: Mapping[str, Any] = field(default_factory=dict)
    pid: int = 0
    """The process of the actor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReply:
    """A completion, or why there is none. Errors travel as values: Ray would wrap them."""

    completion: Completion | None = None
    error: Exception | None = None
    is_dead: bool = False
    """Whether the engine has ended: the call is for another replica."""


class EngineReplica:
    """An engine on some node. It runs as a Ray actor."""

    def __init__(self, opener: OpenHosted) -> None:
        self._opener = opener
        self._hosted: HostedEngine | BaseEngine | None = None

    async def start(self) -> ReplicaFacts | MemagentError:
        """Open the engine."""
        try:
            self._hosted = await asyncio.to_thread(self._opener)
        except MemagentError as error:
            return error
        engine = self._engine
        return ReplicaFacts(
            model=engine.model,
            tokenizer=engine.tokenizer,
            served_window=engine.served_window,
            reading_defaults=dict(engine.reading_defaults),
            pid=os.getpid(),
        )

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> ReplicaReply:
        """One reply to a conversation."""
        return await self._reply(lambda engine: engine.complete(messages, sampling))

    async def aclose(self) -> None:
        """End the engine: a server that it started ends with it."""
        if self._hosted is not None:
            await self._hosted.aclose()

    @property
    def _engine(self) -> BaseEngine:
        assert self._hosted is not None, "the driver starts a replica first"
        return self._hosted if isinstance(self._hosted, BaseEngine) else self._hosted.engine

    async def _reply(self, call: Callable[[BaseEngine], Awaitable[Completion]]) -> ReplicaReply:
        try:
            return ReplicaReply(completion=await call(self._engine))
        except Exception as error:
            return ReplicaReply(error=error, is_dead=not (self._hosted and self._hosted.is_alive))


# --- in the driver --------------------------------------------------------------------------------


async def open_replicas(
    cluster: Cluster,
    choice: EngineChoice,
    *,
    num: int | None = None,
    start_seconds: float = START_SECONDS,
    on_note: OnClusterNote = lambda text: None,
) -> ReplicatedEngine:
    """Start replicas on a cluster, by default as many as it has GPUs for, else one on each node."""
    resources = replica_resources(cluster, choice)
    if num is None:
        room = int(cluster.total("GPU") // resources["GPU"]) if "GPU" in resources else 0
        num = max(1, room or cluster.num_nodes)
    what = f"{num} replicas of {choice.spec}"
    group = await cluster.place([resources] * num, what=what, strategy="SPREAD")
    engine = ReplicatedEngine(
        choice.open,
        num,
        partial(in_bundle, group, resources=resources),
        what=f"replica {{}} of {choice.spec}",
        start_seconds=start_seconds,
        wait_seconds=cluster.wait_seconds,
        on_note=on_note,
        on_close=partial(cluster.release, group),
    )
    try:
        await engine.start()
    except BaseException:
        await engine.aclose()
        raise
    return engine


def replica_resources(cluster: Cluster, choice: EngineChoice) -> Bundle:
    """What a replica reserves."""
    is_on_cpu = str(choice.settings.get("device") or "").startswith("cpu")
    if cluster.has_gpus and choice.kind in ON_GPUS and not is_on_cpu:
        return {"GPU": float(choice.settings.get("tensor_parallel_size") or 1), "CPU": 1.0}
    return {"CPU": 1.0}


class _Place:
    """A replica as the driver sees it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.actor: Any = None
        self.is_ready = False
        self.replacing: asyncio.Task[None] | None = None
        self.facts: ReplicaFacts | None = None


class ReplicatedEngine(BaseEngine):
    """Replicas on a cluster behind one engine."""

    replica_class: type[EngineReplica] = EngineReplica
    """What runs on a node."""
    to_raise: str = ""
    """The setting that gives a replica more time to start, if there is one."""

    def __init__(
        self,
        opener: OpenHosted,
        num: int,
        options: Options,
        *,
        what: str = "engine replica {}",
        start_seconds: float = START_SECONDS,
        wait_seconds: float = 300.0,
        on_note: OnClusterNote = lambda text: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`start` starts them. `what` names one in messages, with its number."""
        self.model = self.tokenizer = ""
        self.num_replicas = num
        self._opener = opener
        self._options = options
        self._what = what
        self._places = [_Place(number) for number in range(num)]
        self._balancer = Balancer(num)
        self._start_seconds = start_seconds
        self._wait_seconds = wait_seconds
        self._on_note = on_note
        self._on_close = on_close
        self._changed = asyncio.Condition()
        self._last_error: MemagentError | None = None
        self._is_closed = False

    @property
    def actors(self) -> list[Any]:
        """Handles of the replicas, in order; None for one that is being started."""
        return [place.actor if place.is_ready else None for place in self._places]

    @property
    def pids(self) -> list[int | None]:
        """The process of each replica's actor; None while it is replaced."""
        return [
            place.facts.pid if place.is_ready and place.facts is not None else None
            for place in self._places
        ]

    async def start(self) -> None:
        """Start all replicas side by side. Raises ClusterError when one is not ready in time."""
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
        return await self._call("complete", list(messages), sampling, prefix_keys(messages))

    async def aclose(self) -> None:
        """End the replicas and give their places back."""
        self._is_closed = True
        tasks = [place.replacing for place in self._places if place.replacing is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._all("aclose"), CLOSE_SECONDS)
        for place in self._places:
            self._kill(place)
        self._on_close()

    # --- calls ---------------------------------------------------------------------------------

    async def _call(
        self, method: str, prompt: Any, sampling: Sampling, prefixes: Sequence[bytes]
    ) -> Completion:
        from ray.exceptions import RayActorError, RayError

        for num_attempts in range(1, MAX_ATTEMPTS + 1):
            place = await self._choose(prefixes)
            actor = place.actor
            self._balancer.begin(place.number, prefixes)
            try:
                with full_store_errors("a prompt or its reply"):
                    reply: ReplicaReply = await _awaited(
                        getattr(actor, method).remote(prompt, sampling)
                    )
            except RayActorError as error:
                self._lost(place, actor, error)
                continue
            except RayError as error:
                raise EngineError(f"{self._name(place)} failed: {first_line(error)}") from None
            finally:
                self._balancer.end(place.number)
            if reply.is_dead:
                self._lost(place, actor, reply.error or EngineError("its engine has ended"))
                continue
            if reply.error is not None:
                raise reply.error
            assert reply.completion is not None
            self._balancer.succeeded(place.number)
            if num_attempts == 1:
                return reply.completion
            return replace(reply.completion, num_attempts=num_attempts)
        raise EngineError(f"{MAX_ATTEMPTS} engine replicas were lost under one call")

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
                        raise ClusterError(f"no engine replica is left: {self._last_error}")
                    await self._changed.wait()
        except TimeoutError:
            raise ClusterError(
                f"no engine replica came back within {seconds:.0f} s; resume when the nodes of the cluster "
                "are there again"
            ) from None

    async def _all(self, method: str) -> None:
        """Call a method of all replicas that are ready; it returns why the engine has ended, or None."""
        from ray.exceptions import RayActorError, RayError

        ready = [(place, place.actor) for place in self._places if place.is_ready]
        calls = (getattr(actor, method).remote() for _, actor in ready)
        results = await asyncio.gather(*(_awaited(call) for call in calls), return_exceptions=True)
        for (place, actor), result in zip(ready, results, strict=True):
            if isinstance(result, RayActorError):
                self._lost(place, actor, result)
            elif isinstance(result, str):
                self._lost(place, actor, EngineError(result))
            elif isinstance(result, RayError) and not self._is_closed:
                raise self._told(place, f"cannot {method}", result)
            elif isinstance(result, BaseException) and not self._is_closed:
                raise result

    # --- replicas ------------------------------------------------------------------------------

    def _name(self, place: _Place) -> str:
        return self._what.format(place.number)

    async def _start(self, place: _Place) -> None:
        """Start the actor of a place."""
        import ray
        from ray.exceptions import RayError

        actor: Any = ray.remote(self.replica_class)
        place.actor = actor.options(
            max_concurrency=MAX_CALLS_AT_ONCE, max_restarts=0, **self._options(place.number)
        ).remote(self._opener)
        try:
            async with asyncio.timeout(self._start_seconds) as limit:
                facts = await place.actor.start.remote()
                if isinstance(facts, MemagentError):
                    raise type(facts)(f"{self._name(place)}: {facts}")
                place.facts = facts
                await self._prepare(place, limit)
        except TimeoutError:
            self._kill(place)
            more = f", or raise {self.to_raise}" if self.to_raise else ""
            raise ClusterError(
                f"{self._name(place)} was not ready within {self._start_seconds:g} s; look at the logs of its "
                f"node{more}"
            ) from None
        except RayError as error:
            self._kill(place)
            raise self._told(place, "did not start", error) from None
        except BaseException:
            self._kill(place)
            raise
        place.is_ready = True
        async with self._changed:
            self._changed.notify_all()

    async def _prepare(self, place: _Place, limit: asyncio.Timeout) -> None:
        """What a new replica gets before its first call. `limit` is that of its start."""

    def _told(self, place: _Place, what: str, error: Exception) -> MemagentError:
        """What Ray reports of a replica, as an error of one line."""
        cause = getattr(error, "cause", None)
        if isinstance(cause, MemagentError):
            return type(cause)(f"{self._name(place)}: {cause}")
        return EngineError(f"{self._name(place)} {what}: {first_line(error)}")

    def _lost(self, place: _Place, actor: Any, error: Exception) -> None:
        """A replica died. The first call that notices has it replaced."""
        failure = Failure(kind="unreachable", reason=f"it died ({first_line(error)})")
        if self.on_retry is not None and not self._is_closed:
            self.on_retry(failure, 0.0)
        if place.actor is not actor or not place.is_ready or self._is_closed:
            return
        place.is_ready = False
        self._balancer.failed(place.number, failure)
        self._on_note(
            f"{self._name(place)} died ({first_line(error)}); it is replaced, and its unfinished replies are "
            "sampled again"
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
            self._on_note(f"{self._name(place)} is back")
            break
        place.replacing = None
        async with self._changed:
            self._changed.notify_all()

    def _kill(self, place: _Place) -> None:
        actor, place.actor, place.is_ready = place.actor, None, False
        if actor is not None:
            import ray

            with suppress(Exception):  # the cluster may be gone
                ray.kill(actor)


def first_line(error: BaseException) -> str:
    """The first line of a message that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__


async def _awaited(reference: Any) -> Any:
    """The result of an actor's method; a call that is cancelled here is cancelled there."""
    try:
        return await reference
    except asyncio.CancelledError:
        import ray

        ray.cancel(reference)
        raise

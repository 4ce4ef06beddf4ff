"""Copies of an engine on all nodes of a cluster, as one engine.

    complete ──▶ choose ──▶ node 1: EngineReplica ──▶ engine (local:MODEL, vllm:MODEL ...)
       driver      │    ──▶ node 2: EngineReplica ──▶ engine
                   └─ the least busy one; prompts with a common prefix go to the same one

    with open_cluster("10.0.0.1:6379") as cluster:
        engine = await open_replicas(cluster, choose_engine("local:smollm2-135m", {}))
        await engine.complete(messages, sampling)

A replica has its own GPUs: one for a local model, `tensor_parallel_size` for vLLM; without GPUs in the cluster it
has a CPU. One that dies is started again, and its calls go to the others meanwhile. Models and adapters given
as paths must be at the same place on all nodes; those with short names are pulled on each.

Not here: engines that get new weights while they run (`rl/distributed`), endpoints that run already (`balance.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memagent.cluster import Bundle, Cluster, in_bundle
from memagent.engines.balance import Balancer, prefix_keys
from memagent.engines.base import BaseEngine, EngineChoice
from memagent.engines.retry import Failure
from memagent.errors import ClusterError, ConfigError, EngineError, MemagentError
from memagent.types import Completion, Message, Sampling

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

START_SECONDS = 1800.0
"""How long a replica may take to load its model."""
CLOSE_SECONDS = 30.0
"""How long replicas may take to end what they started."""
MAX_CALLS = 1024
"""Calls that a replica works on at once; the engine in it queues them."""
MAX_ATTEMPTS = 3
"""Replicas that may be lost under one call."""
ON_GPUS = ("local", "vllm")
"""Kinds of engines that compute themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What a replica tells of its engine."""

    model: str
    tokenizer: str
    served_window: int | None
    reading_defaults: Mapping[str, Any]


class EngineReplica:
    """An engine on some node. It runs as a Ray actor; errors travel as values."""

    def __init__(self, choice: EngineChoice) -> None:
        self._choice = choice
        self._engine: BaseEngine | None = None

    async def start(self) -> EngineFacts | MemagentError:
        """Open the engine."""
        try:
            self._engine = engine = await asyncio.to_thread(self._choice.open)
        except MemagentError as error:
            return error
        return EngineFacts(
            model=engine.model,
            tokenizer=engine.tokenizer,
            served_window=engine.served_window,
            reading_defaults=dict(engine.reading_defaults),
        )

    async def complete(
        self, messages: Sequence[Message], sampling: Sampling
    ) -> Completion | MemagentError:
        """One reply."""
        assert self._engine is not None, "a replica is started before it is asked"
        try:
            return await self._engine.complete(messages, sampling)
        except MemagentError as error:
            return error

    async def close(self) -> None:
        """Free the engine: a server that it started ends with it."""
        if self._engine is not None:
            await self._engine.aclose()


async def open_replicas(
    cluster: Cluster,
    choice: EngineChoice,
    *,
    num: int | None = None,
    start_seconds: float = START_SECONDS,
    on_note: Callable[[str], None] = lambda text: None,
) -> ReplicatedEngine:
    """Start replicas on a cluster, by default as many as it has GPUs for, else one on each node."""
    resources = replica_resources(cluster, choice)
    if num is None:
        room = int(cluster.total("GPU") // resources["GPU"]) if "GPU" in resources else 0
        num = max(1, room or cluster.num_nodes)
    what = f"{num} replicas of {choice.spec}"
    group = await cluster.place([resources] * num, what=what, strategy="SPREAD")
    engine = ReplicatedEngine(
        cluster, choice, group, resources, num, start_seconds=start_seconds, on_note=on_note
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


class ReplicatedEngine(BaseEngine):
    """Replicas on a cluster behind one engine."""

    limits_itself = False

    def __init__(
        self,
        cluster: Cluster,
        choice: EngineChoice,
        group: PlacementGroup,
        resources: Bundle,
        num: int,
        *,
        start_seconds: float,
        on_note: Callable[[str], None],
    ) -> None:
        """Create it with `open_replicas`."""
        self.num_replicas = num
        self._cluster = cluster
        self._choice = choice
        self._group = group
        self._resources = resources
        self._start_seconds = start_seconds
        self._on_note = on_note
        self._balancer = Balancer(num)
        self._actors: list[Any] = [None] * num
        self._restarts: dict[int, asyncio.Task[None]] = {}

    @property
    def actors(self) -> list[Any]:
        """Handles of the replicas, in order; None for one that is being started."""
        return list(self._actors)

    async def start(self) -> None:
        """Start all replicas."""
        facts = await asyncio.gather(*map(self._start, range(self.num_replicas)))
        first = facts[0]
        self.model, self.tokenizer = first.model, first.tokenizer
        self.served_window = first.served_window
        self.reading_defaults = first.reading_defaults

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """One reply of the replica with the fewest calls."""
        from ray.exceptions import RayError

        prefixes = prefix_keys(messages)
        for _ in range(MAX_ATTEMPTS):
            number, actor = await self._chosen(prefixes)
            self._balancer.begin(number, prefixes)
            try:
                reply = await _awaited(actor.complete.remote(list(messages), sampling))
            except RayError as error:
                self._lose(number, actor, error)
                continue
            finally:
                self._balancer.end(number)
            if isinstance(reply, MemagentError):
                raise reply
            self._balancer.succeeded(number)
            completion: Completion = reply
            return completion
        raise EngineError(
            f"{MAX_ATTEMPTS} replicas of {self._choice.spec} were lost under one call"
        )

    async def aclose(self) -> None:
        """End the replicas and give their places back."""
        import ray

        for task in self._restarts.values():
            task.cancel()
        actors = [actor for actor in self._actors if actor is not None]
        with suppress(Exception):  # the cluster may be gone
            await asyncio.wait_for(
                asyncio.gather(
                    *(_awaited(actor.close.remote()) for actor in actors), return_exceptions=True
                ),
                CLOSE_SECONDS,
            )
        for actor in actors:
            with suppress(Exception):
                ray.kill(actor)
        self._actors = [None] * self.num_replicas
        self._cluster.release(self._group)

    async def _chosen(self, prefixes: Sequence[bytes]) -> tuple[int, Any]:
        """A replica that runs; if none does, the first that is started again."""
        missing = [number for number, actor in enumerate(self._actors) if actor is None]
        number = self._balancer.choose(prefixes, tried=missing)
        while number is None or self._actors[number] is None:
            waiting = [task for task in self._restarts.values() if not task.done()]
            if not waiting:
                raise ClusterError(f"no replica of {self._choice.spec} is left on the cluster")
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            alive = [number for number, actor in enumerate(self._actors) if actor is not None]
            number = alive[0] if alive else None
        return number, self._actors[number]

    def _lose(self, number: int, actor: Any, error: Exception) -> None:
        """Start a replica again that has died, once for all calls that it had."""
        reason = str(error).strip().splitlines()[0]
        failure = Failure(kind="unreachable", reason=reason)
        if self.on_retry is not None:
            self.on_retry(failure, 0.0)
        if self._actors[number] is not actor:
            return
        self._actors[number] = None
        self._on_note(
            f"replica {number + 1} of {self._choice.spec} died; it is started again, and its calls go to "
            "the others"
        )
        self._restarts[number] = asyncio.create_task(self._restart(number))

    async def _restart(self, number: int) -> None:
        try:
            await self._start(number)
        except MemagentError as error:
            self._on_note(f"replica {number + 1} could not be started again: {error}")

    async def _start(self, number: int) -> EngineFacts:
        """Start one replica; what it tells of its engine."""
        import ray
        from ray.exceptions import RayError

        options = in_bundle(self._group, number, self._resources)
        actor: Any = ray.remote(EngineReplica).options(max_concurrency=MAX_CALLS, **options)
        actor = actor.remote(self._choice)
        try:
            facts = await asyncio.wait_for(_awaited(actor.start.remote()), self._start_seconds)
        except TimeoutError:
            ray.kill(actor)
            raise ClusterError(
                f"replica {number + 1} of {self._choice.spec} was not ready within "
                f"{self._start_seconds:.0f} s; see the logs of its node"
            ) from None
        except RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ClusterError(
                f"replica {number + 1} of {self._choice.spec} did not start: {reason}"
            ) from None
        if isinstance(facts, MemagentError):
            ray.kill(actor)
            raise ConfigError(f"a node of the cluster cannot open {self._choice.spec}: {facts}")
        self._actors[number] = actor
        found: EngineFacts = facts
        return found


async def _awaited(reference: Any) -> Any:
    """The value of a Ray reference, for functions of asyncio that take coroutines."""
    return await reference

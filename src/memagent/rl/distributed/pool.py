"""A pool of processes on every node of a cluster, for rewards, tools and tokenising.

    offload ──▶ ClusterPool ──▶ node 1: PoolActor ──▶ processes
       driver       │      ──▶ node 2: PoolActor ──▶ processes      the one with the most free processes
                    └─ an actor that dies is replaced, and its functions run again

    pool = ClusterPool(on_note=print)
    pool.use()                                     # `offload` runs functions on the cluster
    await pool.run(slow_check, answer, tests)

The driver only sends and receives. Functions are named as for a pool on one machine; a file of the user must be
at the same place on all nodes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError

from memagent.cluster import OnClusterNote, full_store_errors, node_ids, on_node
from memagent.errors import ClusterError
from memagent.processes import WorkerDied
from memagent.rl.agents.offload import WorkerPool, checked_work

T = TypeVar("T")

MAX_ATTEMPTS = 3
"""How often a function is run before its worker's death counts as its own doing."""
REFRESH_SECONDS = 30.0
"""How often nodes that have joined are looked for."""
START_SECONDS = 60.0
"""How long the actor of a node may take to start."""


class PoolActor:
    """The processes of one node. It runs as a Ray actor."""

    def __init__(self, num_workers: int | None) -> None:
        self._pool = WorkerPool(num_workers)

    def num_workers(self) -> int:
        """Processes of this node."""
        return self._pool.num_workers

    def pid(self) -> int:
        """The process of the actor."""
        return os.getpid()

    async def run(self, work: Callable[..., Any], arguments: tuple[Any, ...]) -> _Result:
        """What the function returns or raises."""
        try:
            return _Result(value=await self._pool.run(work, *arguments))
        except Exception as error:
            return _Result(error=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """Errors travel as values: Ray would wrap them in its own."""

    value: Any = None
    error: Exception | None = None


@dataclass(slots=True)
class _Node:
    """The actor of a node, as the driver sees it."""

    id: str
    actor: Any
    num_workers: int
    num_running: int = 0

    @property
    def load(self) -> float:
        return self.num_running / self.num_workers


class ClusterPool(WorkerPool):
    """Runs functions in the processes of all nodes."""

    def __init__(
        self, num_workers: int | None = None, *, on_note: OnClusterNote = lambda text: None
    ) -> None:
        """`num_workers` on each node; by default one per core but one. `on_note` gets a line for each fault."""
        super().__init__(num_workers)
        self._given = num_workers
        self._on_note = on_note
        self._nodes: dict[str, _Node] = {}
        self._checked: float | None = None
        """When nodes were last looked for; None has it done before the next function."""
        self._starting = asyncio.Lock()

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """The function's result; what it raises is raised here."""
        work = checked_work(function, arguments)
        for _ in range(MAX_ATTEMPTS):
            node = await self._node()
            node.num_running += 1
            try:
                with full_store_errors("what a function gets or returns"):
                    result: _Result = await node.actor.run.remote(work, arguments)
            except RayActorError:
                self._lost(node)
                continue
            finally:
                node.num_running -= 1
            if isinstance(result.error, WorkerDied):
                self._note_death(node)
                continue
            if result.error is not None:
                raise result.error
            value: T = result.value
            return value
        name = getattr(function, "__name__", "a function")
        raise WorkerDied(f"{name}: a worker process died in {MAX_ATTEMPTS} attempts at it")

    @property
    def actors(self) -> list[Any]:
        """The actors that run, one per node."""
        return [node.actor for node in self._nodes.values()]

    def close(self) -> None:
        """End the actors and their processes."""
        nodes, self._nodes = list(self._nodes.values()), {}
        for node in nodes:
            with suppress(Exception):  # the cluster may be gone
                ray.kill(node.actor)

    def _lost(self, node: _Node) -> None:
        if self._nodes.get(node.id) is node:
            del self._nodes[node.id]
            self._checked = None
            self._note_death(node)

    def _note_death(self, node: _Node) -> None:
        self._on_note(
            f"worker processes of node {node.id[:8]} died; they are replaced, and what they computed is "
            "computed again"
        )

    async def _node(self) -> _Node:
        """The node with the most free processes; missing actors are started first."""
        async with self._starting:
            if self._checked is None or monotonic() - self._checked > REFRESH_SECONDS:
                alive = await asyncio.to_thread(node_ids)
                missing = [one for one in alive if one not in self._nodes]
                await asyncio.gather(*map(self._start, missing))
                self._checked = monotonic()
        if not self._nodes:
            raise ClusterError("no node of the cluster starts worker processes")
        return min(self._nodes.values(), key=lambda node: node.load)

    async def _start(self, node_id: str) -> None:
        actor: Any = ray.remote(PoolActor).options(**on_node(node_id)).remote(self._given)
        try:
            num_workers = await asyncio.wait_for(
                _awaited(actor.num_workers.remote()), START_SECONDS
            )
        except (RayError, TimeoutError) as error:  # the node may have left meanwhile
            ray.kill(actor)
            reason = str(error).strip().splitlines()[-1] if str(error) else "no answer"
            self._on_note(f"node {node_id[:8]} has no worker processes: {reason}")
            return
        self._nodes[node_id] = _Node(node_id, actor, num_workers)


async def _awaited(reference: Any) -> Any:
    return await reference

"""What a rollout costs the driver, with engines that reply at once, and the rate at which the driver is full.

    python -m benchmarks.driver_scaling [--rollouts 512] [--actors]

A rollout of the memory agent reads six sections and answers: seven calls, 64 tokens each, with recorded tokens.
Simulated replicas reply at once, behind the balancer that real replicas have. Measured is the CPU time of the
driver's process, which the load of the machine does not change; one driver has one core, so 1 / time is the rate
at which it is full. With --actors replicas are Ray actors (1 and 2 of them here): each call
then also pays for its way there and back. The last line is `offload`, through the pool of a cluster: what a reward
or tool costs beyond its own time.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memagent.cluster import open_cluster
from memagent.data.example import Example, Passage
from memagent.engines.base import BaseEngine
from memagent.engines.replicas import ReplicaFacts, ReplicaReply
from memagent.rl.agents.api import open_agent
from memagent.rl.agents.offload import WorkerPool, offload
from memagent.rl.distributed.replicas import Replica, ReplicaEngine, open_replicas
from memagent.rl.distributed.weights import Filled
from memagent.rl.rollouts.collect import Collection, RolloutSpec
from memagent.rl.types import AgentTask, Outcome
from memagent.types import Completion, Message, Sampling, Usage

SECTIONS, CHUNK_TOKENS, REPLY_TOKENS = 6, 1000, 64
GROUP_SIZE = 16


class NullEngine(BaseEngine):
    """Replies at once."""

    model = "null"
    tokenizer = "bytes"

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """The same tokens each time."""
        return REPLY

    async def aclose(self) -> None:
        """Nothing to free."""


REPLY = Completion(
    text="known",
    finish_reason="stop",
    usage=Usage(calls=1, prompt_tokens=CHUNK_TOKENS, completion_tokens=REPLY_TOKENS),
    prompt_ids=tuple(range(CHUNK_TOKENS)),
    completion_ids=tuple(range(REPLY_TOKENS)),
    logprobs=(-1.0,) * REPLY_TOKENS,
    policy_version=0,
)


class NullReplica:
    """A replica without a model; also what opens it."""

    is_alive = True
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.engine = NullEngine()

    def __call__(self) -> Replica:
        return self

    async def load(self, buckets: Sequence[Any], policy_version: int) -> None:
        """It has no weights."""

    async def receive(self, buckets: Iterator[Filled], policy_version: int) -> None:
        """It has no weights."""

    def share(self) -> None:
        """It has no weights."""

    async def sleep(self) -> None:
        """It has no memory."""

    async def wake(self) -> None:
        """It has no memory."""

    async def aclose(self) -> None:
        """Nothing to end."""


class SimulatedReplicas(ReplicaEngine):
    """Replicas in this process: what is left is the driver."""

    def __init__(self, num: int) -> None:
        super().__init__(NullReplica(), num, lambda number: {})
        for place in self._places:
            place.actor, place.is_ready = _Handle(), True
            place.facts = ReplicaFacts(model="null", tokenizer="bytes", served_window=None)
        self.model, self.tokenizer = "null", "bytes"

    async def aclose(self) -> None:
        """No actor to end."""


class _Handle:
    """Looks like the handle of an actor."""

    def __init__(self) -> None:
        self.complete = self

    async def remote(self, messages: Sequence[Message], sampling: Sampling) -> ReplicaReply:
        """At once."""
        return ReplicaReply(completion=REPLY)


async def graded(task: AgentTask, outcome: Outcome) -> float:
    """A reward that costs nothing."""
    return 1.0


def tasks(num: int) -> list[Example]:
    """Texts of six sections."""
    passage = Passage(text="word " * (SECTIONS * CHUNK_TOKENS // 5 - 1))
    return [
        Example(id=str(n), task="null", question="Which?", answers=("x",), documents=(passage,))
        for n in range(num)
    ]


@dataclass(frozen=True)
class Cost:
    """Of one rollout."""

    milliseconds: float
    calls: float


async def cost(engine: BaseEngine, num_rollouts: int) -> Cost:
    """Rollouts as a training step collects them."""
    settings = {"chunk_tokens": CHUNK_TOKENS, "memory_tokens": REPLY_TOKENS, "window": 4096}
    spec = RolloutSpec(agent=open_agent("memory", settings), group_size=GROUP_SIZE, reward=graded)
    started = time.process_time()
    async with Collection(tasks(num_rollouts // GROUP_SIZE), engine, spec) as collection:
        groups = await collection.all()
    seconds = time.process_time() - started
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert not [rollout.error for rollout in rollouts if rollout.error]
    calls = sum(rollout.metrics["calls"] for rollout in rollouts)
    return Cost(1e3 * seconds / len(rollouts), calls / len(rollouts))


def line(name: str, found: Cost) -> str:
    """One row of the table."""
    return (
        f"{name:>24}   {found.milliseconds:10.2f}   {found.milliseconds / found.calls:7.2f}   "
        f"{1e3 / found.milliseconds:10.0f}   {1e3 * found.calls / found.milliseconds:8.0f}"
    )


async def measure(num_rollouts: int, *, with_actors: bool) -> None:
    """The table."""
    await cost(SimulatedReplicas(1), GROUP_SIZE)
    print("                replicas   ms/rollout   ms/call   full at rollouts/s, calls/s")
    for num in (1, 2, 8, 64):
        print(line(f"{num} simulated", await cost(SimulatedReplicas(num), num_rollouts)))
    if not with_actors:
        return
    with open_cluster(min_cpus=4, object_store_gb=0.2) as cluster:
        for num in (1, 2):
            async with open_replicas(
                cluster, NullReplica(), num=num, resources={"CPU": 1}
            ) as engine:
                await cost(engine, GROUP_SIZE)
                print(line(f"{num} Ray actors", await cost(engine, num_rollouts)))
        with WorkerPool.on_cluster(cluster) as pool:
            pool.use()
            await offload(len, "warm")
            started = time.process_time()
            await asyncio.gather(*(offload(len, "a reward") for _ in range(num_rollouts)))
            seconds = time.process_time() - started
    print(
        f"offload through the pool of the cluster: {1e3 * seconds / num_rollouts:.2f} ms each, "
        f"{num_rollouts / seconds:.0f}/s"
    )


def main() -> None:
    """Parse options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rollouts", type=int, default=512)
    parser.add_argument("--actors", action="store_true", help="also replicas that are Ray actors")
    options = parser.parse_args()
    asyncio.run(measure(options.rollouts, with_actors=options.actors))


if __name__ == "__main__":
    main()

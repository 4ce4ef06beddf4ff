"""Rollouts of a tiny model with random pauses, for tests of reproducibility.

    python -m tests.support.repeated_rollouts MODEL --threads 2 --jitter 7

prints a fingerprint of all rollouts: their tokens, and their log-probabilities bit for bit. The pauses
depend on `jitter` alone; sampled tokens must not depend on them.
"""

import argparse
import asyncio
import hashlib
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from memagent.config import LocalConfig
from memagent.data.example import Example, Passage
from memagent.rl.agents.api import Agent, open_agent
from memagent.rl.agents.client import Client
from memagent.rl.agents.offload import WorkerPool, offload
from memagent.rl.types import Group, Outcome
from tests.conftest import prose
from tests.support.collecting import collecting

SMALL = {"window": 1000, "chunk_tokens": 90, "memory_tokens": 20, "answer_tokens": 12}
LONGEST_PAUSE = 0.02


def examples(count: int) -> list[Example]:
    """Texts of two and more sections."""
    return [
        Example(
            id=f"text{number}",
            task="test",
            question="Who sold the map?",
            answers=("Anna",),
            documents=(Passage(text=prose(10 + 4 * number, seed=number)),),
        )
        for number in range(count)
    ]


class Pauses:
    """Waits of random length."""

    def __init__(self, seed: int | None) -> None:
        """None: there are none."""
        self._rng = None if seed is None else random.Random(seed)

    def next(self) -> float:
        return self._rng.uniform(0, LONGEST_PAUSE) if self._rng else 0.0


def reading(pauses: Pauses) -> Agent:
    """The memory agent, with a pause before it begins and after it ends."""
    agent = open_agent("memory", SMALL)

    async def paused(task: Example, client: Client) -> Outcome:
        await asyncio.sleep(pauses.next())
        outcome = await agent(task, client)
        await asyncio.sleep(pauses.next())
        return outcome

    return paused


def talking(pauses: Pauses) -> Agent:
    """Two replies at once, then conversations at the same time, with a pause after each round."""

    async def talk(task: Example, client: Client) -> Outcome:
        asked = {"role": "user", "content": task.text()[:400]}
        both = await client.chat.completions.create(messages=[asked], max_tokens=6, n=2)
        await asyncio.sleep(pauses.next())
        threads = [[asked, choice.message] for choice in both.choices]
        for number in range(2 + len(task.text()) % 2):
            for thread in threads:
                thread.append({"role": "user", "content": f"And then, {number}?"})
            replies = await asyncio.gather(
                *(client.chat.completions.create(messages=t, max_tokens=8) for t in threads)
            )
            await asyncio.sleep(pauses.next())
            for thread, reply in zip(threads, replies, strict=True):
                thread.append(reply.choices[0].message)
        return Outcome(answer=threads[0][-1].content)

    return talk


AGENTS = {"reading": reading, "talking": talking}


def slow_score(answer: str, seconds: float) -> float:
    """Runs in a process of the pool."""
    time.sleep(seconds)
    return len(answer) % 7 / 7


async def rollouts(
    engine: Any, agent: str, pool: WorkerPool, *, jitter: int | None, driver: Any = "lockstep"
) -> list[Group]:
    """Groups of an agent on a few texts; `pool` computes their rewards."""
    pauses = Pauses(jitter)

    async def reward(task: Example, outcome: Outcome) -> float:
        return await offload(slow_score, outcome.answer, pauses.next())

    tasks = examples(3)
    return await collecting(
        tasks, AGENTS[agent](pauses), engine, group_size=3, driver=driver, seed=5, reward=reward,
        pool=pool,
    ).all()  # fmt: skip


def plain(groups: Sequence[Group]) -> list[Any]:
    """All of the rollouts but times; floats as they are, to the last bit."""
    return [
        (
            rollout.task_id,
            rollout.index,
            rollout.reward,
            rollout.error,
            [
                (row.ids, row.is_sampled, [logprob.hex() for logprob in row.logprobs])
                for row in rollout.samples
            ],
            {k: v for k, v in rollout.metrics.items() if not k.startswith("time/")},
            dict(rollout.record),
            rollout.trace
            and [(step.kind, step.reply, step.memory) for step in rollout.trace.steps],
        )
        for group in groups
        for rollout in group.rollouts
    ]


async def fingerprints(model: str, *, jitter: int) -> list[str]:
    """One for each agent."""
    from memagent.engines.local.engine import LocalEngine
    from memagent.engines.local.loading import load

    async with LocalEngine(load(model), LocalConfig(cache_gb=0.01)) as engine:
        with WorkerPool(1) as pool:
            groups = [await rollouts(engine, agent, pool, jitter=jitter) for agent in AGENTS]
    return [hashlib.sha256(repr(plain(one)).encode()).hexdigest() for one in groups]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.repeated_rollouts")
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--jitter", type=int, required=True)
    arguments = parser.parse_args()

    import torch

    torch.set_num_threads(arguments.threads)
    found = asyncio.run(fingerprints(arguments.model, jitter=arguments.jitter))
    sys.stdout.write("\n".join(found))


if __name__ == "__main__":
    main()

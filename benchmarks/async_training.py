"""Asynchronous against synchronous training, with engines and a trainer that only take time.

    python -m benchmarks.async_training [--steps 12] [--scale 0.05]

Everything but the model is the package's own code: tasks, the memory agent and its reader, sessions and
recorded tokens, rewards, admission, rows and packs. A simulated engine has a number of slots; a call waits for
one, and takes a time that grows with its prompt and its reply. Replies are as skewed as sampled ones: lengths
are log-normal (median 160 tokens, mean 280, cut at 1,024), and texts have 1 to 8 sections. Trainer and engines
have separate machines, split as one would split them: an update takes as long as the engines need for the
calls of one step when they are never idle.

Printed: groups per second of simulated time for each bound, against the synchronous run; how busy the engines
were; the mean and the largest age of a token.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from memagent.data.example import Example, Passage
from memagent.engines.base import BaseEngine
from memagent.rl.agents.api import open_agent
from memagent.rl.agents.offload import WorkerPool
from memagent.rl.rollouts.step import open_gatherer
from memagent.rl.rollouts.tasks import TasksAhead
from memagent.rl.settings import TrainConfig, parse_config
from memagent.rl.setup import Setup
from memagent.rl.types import AgentTask, Outcome
from memagent.rl.update.metrics import staleness_metrics
from memagent.rl.update.packing import pack
from memagent.rl.update.rows import rows_of
from memagent.types import Completion, Message, Sampling, Usage

PROMPTS, GROUP_SIZE = 8, 8
CHUNK_TOKENS, MAX_SECTIONS = 200, 8
SLOTS = 64
"""Calls that the engines compute at once: the rollouts of a step, as 2,048 on 32 GPUs are 64 each."""
MEDIAN_REPLY, SIGMA, LONGEST_REPLY = 160, 1.05, 1024
SECONDS_PER_TOKEN = 0.02
"""Of a reply: 50 tokens per second and call, as a busy 7B engine has."""
SECONDS_PER_PROMPT_TOKEN = 0.0002


@dataclass
class SimulatedEngine(BaseEngine):
    """Replies of random length that take their time."""

    scale: float
    model: str = "simulated"
    tokenizer: str = "bytes"
    policy_version: int = 0
    busy_seconds: float = 0.0
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(SLOTS))

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """A reply of a length that depends on the seed alone."""
        rng = random.Random(sampling.seed)
        length = min(int(rng.lognormvariate(0, SIGMA) * MEDIAN_REPLY) + 1, LONGEST_REPLY)
        prompt = sum(len(message["content"]) for message in messages) // 4
        seconds = length * SECONDS_PER_TOKEN + prompt * SECONDS_PER_PROMPT_TOKEN
        async with self.slots:
            version = self.policy_version
            await asyncio.sleep(seconds * self.scale)
            self.busy_seconds += seconds
        ids = tuple(rng.randrange(256) for _ in range(length))
        return Completion(
            text=str(rng.randrange(2)),
            finish_reason="stop",
            usage=Usage(calls=1, prompt_tokens=prompt, completion_tokens=length),
            prompt_ids=(1,) * max(prompt, 1),
            completion_ids=ids,
            logprobs=(-1.0,) * length,
            policy_version=version,
            token_versions=None
            if version == self.policy_version
            else spread(version, self, length),
        )

    async def aclose(self) -> None:
        """Nothing to free."""


def spread(version: int, engine: SimulatedEngine, length: int) -> tuple[int, ...]:
    """A reply that spans an update: its second half is of the new weights."""
    return (version,) * (length // 2) + (engine.policy_version,) * (length - length // 2)


class SimulatedSync:
    """Publishes weights that do not exist."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine

    @property
    def policy_version(self) -> int:
        """Of the engine."""
        return self._engine.policy_version

    async def push(self, policy_version: int) -> None:
        """At once."""
        self._engine.policy_version = policy_version


class Texts:
    """Tasks with 1 to 8 sections."""

    def __init__(self, position: int) -> None:
        self.position = position

    def move_to(self, position: int) -> None:
        """Continue at a position."""
        self.position = position

    def draw(self, num: int) -> list[Example]:
        """The next tasks."""
        found = [text_task(self.position + number) for number in range(num)]
        self.position += num
        return found


def text_task(position: int) -> Example:
    """A text of random length."""
    num_sections = random.Random(position).randint(1, MAX_SECTIONS)
    text = "word " * (num_sections * CHUNK_TOKENS // 5 - 1)
    return Example(
        id=f"text/{position}",
        task="text",
        question="Is it so?",
        answers=("1",),
        documents=(Passage(text=text),),
    )


async def coin(task: AgentTask, outcome: Outcome) -> float:
    """1 for one of the two answers."""
    return float(outcome.answer == "1")


def config_of(steps: int, max_staleness: int | None) -> TrainConfig:
    """A run with the paper's shape in small."""
    return parse_config(
        {
            "steps": steps,
            "model": {"source": "simulated", "lora_rank": 8},
            "tasks": [{"tasks": ["small/colours"]}],
            "agent": {"settings": agent_settings()},
            "rollout": {
                "prompts": PROMPTS,
                "group_size": GROUP_SIZE,
                "engine": "openai:simulated",
                "asynchronous": max_staleness is not None,
            },
            "objective": {"max_staleness": max_staleness},
        }
    )


def agent_settings() -> dict[str, Any]:
    """Short sections: the simulated time does not depend on real texts."""
    return {"chunk_tokens": CHUNK_TOKENS, "memory_tokens": LONGEST_REPLY, "window": 8192}


@dataclass(frozen=True)
class Measured:
    """One simulated run."""

    groups_per_second: float
    busy: float
    staleness: float
    staleness_max: float


async def run(steps: int, scale: float, max_staleness: int | None, update: float) -> Measured:
    """Train `steps` steps; an update takes `update` simulated seconds."""
    config = config_of(steps, max_staleness)
    engine = SimulatedEngine(scale)
    setup = cast(
        Setup,
        _SimulatedSetup(
            config=config,
            engine=engine,
            sync=SimulatedSync(engine),
            agent=open_agent("memory", agent_settings()),
            reward=coin,
        ),
    )
    ages: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder, WorkerPool() as pool:
        gatherer = open_gatherer(setup, Path(folder), pool, lambda stats, *, num_wanted: None)
        tasks = TasksAhead(cast(Any, Texts(0)), 2 * PROMPTS)
        started = time.perf_counter()
        for number in range(1, steps + 1):
            found = await gatherer.gather(number, tasks)
            step = rows_of(found.groups, config.objective, policy_version=number - 1)
            assert not step.num_stale
            work = asyncio.to_thread(pack, step.rows, max_tokens=config.update.max_tokens)
            await asyncio.gather(work, asyncio.sleep(update * scale))
            ages.append(staleness_metrics(found.groups, policy_version=number - 1))
            await setup.sync.push(number)
        seconds = (time.perf_counter() - started) / scale
        await gatherer.aclose()
        tasks.close()
    return Measured(
        groups_per_second=steps * PROMPTS / seconds,
        busy=engine.busy_seconds / (seconds * SLOTS),
        staleness=sum(one["staleness"] for one in ages) / len(ages),
        staleness_max=max(one["staleness_max"] for one in ages),
    )


@dataclass(frozen=True)
class _SimulatedSetup:
    """What gathering needs of a Setup."""

    config: TrainConfig
    engine: BaseEngine
    sync: SimulatedSync
    agent: Any
    reward: Any

    def stream(self, position: int) -> Texts:
        """The tasks, from a position on."""
        return Texts(position)


async def compare(steps: int, scale: float) -> None:
    """One line for each bound."""
    first = await run(3, scale, None, 0.0)
    balanced = PROMPTS / first.groups_per_second * first.busy
    print(
        f"an update takes {balanced:.0f} s, as long as engines that are never idle need for a step"
    )
    print("max_staleness   groups/s   against synchronous   engines busy   staleness mean, max")
    base = None
    for bound in (None, 0, 1, 2, 4):
        found = await run(steps, scale, bound, balanced)
        base = base or found.groups_per_second
        name = "synchronous" if bound is None else str(bound)
        print(
            f"{name:>13}   {found.groups_per_second:8.3f}   {found.groups_per_second / base:18.2f}x   "
            f"{found.busy:11.0%}   {found.staleness:12.2f}, {found.staleness_max:.0f}"
        )


def main() -> None:
    """Parse options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=12, help="training steps of each run")
    parser.add_argument("--scale", type=float, default=0.05, help="seconds per simulated second")
    options = parser.parse_args()
    asyncio.run(compare(options.steps, options.scale))


if __name__ == "__main__":
    main()

"""Thousands of requests of random sizes through the server, some cancelled: none stuck, none lost.

    python -m benchmarks.serve_stress                            10,000 requests, a tiny random model
    python -m benchmarks.serve_stress --requests 1000 --seconds 300

Every greedy reply must equal the reply to the same prompt alone. At the end all slots of the cache
must be free, and the process must not have grown. The exit code is 1 when anything of this fails.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from memagent.types import Sampling
from tests.support.tiny_models import WINDOW, make_tiny_model
from tests.support.tiny_server import TinyServer, num_lost_slots, serving_tiny, wait_until_idle

WORDS = [
    "the",
    "miller",
    "sold",
    "a",
    "red",
    "ledger",
    "and",
    "found",
    "an",
    "old",
    "map",
    "of",
    "the",
    "north",
    "gate",
    "in",
    "1874",
]
STUCK_SECONDS = 120.0
"""A request that takes longer is stuck."""
WARM_SHARE = 0.3
"""Memory is compared with what it was after this share of the requests."""
MAX_GROWTH = 1.1
"""More memory at the end than this times as much is a leak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StressPlan:
    """What is asked."""

    num_requests: int
    num_clients: int = 32
    """Requests under way at once."""
    num_prompts: int = 60
    """Different prompts; a reply is compared with the first one, made alone."""
    cancel_share: float = 0.2
    max_seconds: float = 3600.0
    """No new request is made after this time."""
    seed: int = 0


@dataclass(slots=True)
class StressReport:
    """What came of it."""

    num_finished: int = 0
    num_cancelled: int = 0
    num_wrong: int = 0
    seconds: float = 0.0
    megabytes: list[float] = field(default_factory=list)
    """Memory of the process, after the warm-up and at the end."""


class Asked:
    """A prompt with the reply it gets alone."""

    def __init__(self, rng: random.Random, number: int) -> None:
        beginning = WORDS * (number % 3)  # some share a prefix, for the prefix cache
        text = " ".join([*beginning, *rng.choices(WORDS, k=rng.randint(1, 60))])
        self.messages: Any = [{"role": "user", "content": text}]
        self.max_tokens = rng.randint(1, 60)
        self.reply = ""


async def stress(server: TinyServer, plan: StressPlan) -> StressReport:
    """Ask all of it; raises TimeoutError when a request is stuck."""
    rng = random.Random(plan.seed)
    prompts = [Asked(rng, number) for number in range(plan.num_prompts)]
    for asked in prompts:
        alone = await server.engine.complete(asked.messages, Sampling(max_tokens=asked.max_tokens))
        asked.reply = alone.text
    report = StressReport()
    started = time.monotonic()
    numbers = iter(range(plan.num_requests))
    async with openai.AsyncOpenAI(
        base_url=server.base_url, api_key="none", max_retries=0, timeout=STUCK_SECONDS
    ) as client:

        async def work() -> None:
            for number in numbers:
                if time.monotonic() - started > plan.max_seconds:
                    return
                choice = random.Random(plan.seed * 1_000_003 + number)
                async with asyncio.timeout(STUCK_SECONDS):
                    await _one(client, server, choice.choice(prompts), choice, plan, report)
                if number == int(plan.num_requests * WARM_SHARE):
                    report.megabytes.append(_megabytes())

        await asyncio.gather(*(work() for _ in range(plan.num_clients)))
    report.seconds = time.monotonic() - started
    report.megabytes.append(_megabytes())
    return report


async def _one(
    client: openai.AsyncOpenAI,
    server: TinyServer,
    asked: Asked,
    rng: random.Random,
    plan: StressPlan,
    report: StressReport,
) -> None:
    """One request: whole, streamed, or cancelled after a random time."""
    options: Any = {
        "model": server.engine.model,
        "messages": asked.messages,
        "max_tokens": asked.max_tokens,
    }
    ask = _streamed if rng.random() < 0.5 else _whole
    task = asyncio.ensure_future(ask(client, options))
    if rng.random() < plan.cancel_share:
        await asyncio.sleep(rng.random() * 0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if task.done() and task.cancelled():
        report.num_cancelled += 1
        return
    report.num_wrong += await task != asked.reply
    report.num_finished += 1


async def _whole(client: openai.AsyncOpenAI, options: Any) -> str:
    reply = await client.chat.completions.create(**options)
    return reply.choices[0].message.content or ""


async def _streamed(client: openai.AsyncOpenAI, options: Any) -> str:
    async with await client.chat.completions.create(**options, stream=True) as stream:
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def _megabytes() -> float:
    """Memory of this process now, or at its highest where the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 1e6
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main() -> int:
    """Run it and print what came of it; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    plan = StressPlan(
        num_requests=options.requests,
        num_clients=options.clients,
        max_seconds=options.seconds,
        seed=options.seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "llama", "llama")
        with serving_tiny(model, cache_gb=0.002) as server:
            report = asyncio.run(stress(server, plan))
            wait_until_idle(server.engine)
            lost = num_lost_slots(server.engine)
            load = server.engine.load
    done = report.num_finished + report.num_cancelled
    print(f"model            tiny random llama, window {WINDOW}, {load.num_slots} slots")
    print(f"requests         {done} of {plan.num_requests}, {report.num_cancelled} cancelled")
    print(f"seconds          {report.seconds:.0f} ({done / report.seconds:.1f} requests/s)")
    print(f"wrong replies    {report.num_wrong}")
    print(f"slots lost       {lost}")
    print(f"memory           {' -> '.join(f'{value:.0f} MB' for value in report.megabytes)}")
    is_flat = report.megabytes[-1] <= MAX_GROWTH * report.megabytes[0]
    is_right = not report.num_wrong and not lost and done == plan.num_requests
    return 0 if is_right and is_flat else 1


if __name__ == "__main__":
    sys.exit(main())

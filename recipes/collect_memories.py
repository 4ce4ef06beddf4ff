"""Memories that a reader leaves of texts, as tasks of their own: questions to answer from a memory alone.

    python -m recipes.collect_memories --engine local:memagent-1.5b --out data/reader/train_memories.jsonl \
        data/reader/train_spread.jsonl data/reader/train_plain.jsonl

Texts are read as `facts.toml` reads them. Left out are memories that do not hold the answer: nothing is to be learnt from them.
A share of the memories gets lines of other questions, as a text of millions of tokens adds them. Memories that
were written before `--seconds` are over are kept.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from memagent.agent.reader import Reader
from memagent.config import AgentConfig
from memagent.data.example import Example
from memagent.data.formats.files import read_examples, write_examples
from memagent.engines.base import open_engine
from recipes.memories import holds_answer, memory_task

READING = AgentConfig(
    window=4096, chunk_tokens=2048, memory_tokens=512, answer_tokens=256, prompts="add"
)
FOREIGN_SHARE, MAX_FOREIGN = 0.4, 5
"""How often a memory gets lines of other questions, and how many at most."""


class Noted(NamedTuple):
    """What a reader noted of a text."""

    example: Example
    memory: str


async def noted(
    examples: Sequence[Example], reader: Reader, *, concurrency: int, until: float
) -> AsyncIterator[Noted]:
    """The last memory of each text, in the order of reading's end."""
    gate = asyncio.Semaphore(concurrency)

    async def read(example: Example) -> Noted | None:
        async with gate:
            if time.monotonic() > until:
                return None
            memory = ""
            async for step in reader.steps(example.question, example.text()):
                memory = step.memory
            return Noted(example, memory)

    for done in asyncio.as_completed([read(example) for example in examples]):
        if (found := await done) is not None:
            yield found


def tasks(found: Sequence[Noted], seed: int) -> Iterator[Example]:
    """Tasks whose memory holds the answer."""
    lines = sorted({line for one in found for line in one.memory.splitlines() if line.strip()})
    for one in sorted(found, key=lambda one: one.example.id):
        if not holds_answer(one.example, one.memory):
            continue
        answer = one.example.answers[0].lower()
        generator = random.Random(f"{seed}/{one.example.id}")
        own = one.memory.splitlines()
        if generator.random() < FOREIGN_SHARE:
            for line in generator.sample(lines, min(len(lines), generator.randint(1, MAX_FOREIGN))):
                if answer not in line.lower():
                    own.insert(generator.randint(0, len(own)), line)
        memory = "\n".join(dict.fromkeys(own))
        yield memory_task(one.example, memory)


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--engine", required=True)
    parser.add_argument(
        "--cache-gb", type=float, help="on a GPU: of the engine, with merged weights"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num", type=int, help="texts of each file, at most")
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    examples = [
        one for path in arguments.files for one in list(read_examples(path))[: arguments.num]
    ]
    random.Random(arguments.seed).shuffle(examples)
    on_gpu = {"cache_gb": arguments.cache_gb, "merged": True} if arguments.cache_gb else {}
    async with open_engine(arguments.engine, **on_gpu) as engine:
        reader = Reader(engine, config=READING)
        reading = noted(examples, reader, concurrency=arguments.concurrency, until=until)
        found = [one async for one in reading]
    num = write_examples(arguments.out, tasks(found, arguments.seed))
    print(f"{arguments.out}: {num} memories with the answer, of {len(found)} texts")


if __name__ == "__main__":
    asyncio.run(main())

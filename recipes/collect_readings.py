"""Lessons that a reader wrote itself: its right readings of training texts, as conversations for the warm start.

    python -m recipes.collect_readings data/reader/train_short.jsonl data/reader/train_plain.jsonl data/reader/train_natural.jsonl \
        --engine local:memagent-1.5b --out data/answers/readings.jsonl

Each text is read several times with sampled replies. Kept is the first reading that answers rightly and holds all evidence in its
last memory; a text without such a reading is left out. To keep the one with the shortest memory made the reader note less (docs/experiments.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from memagent.agent.reader import Reader
from memagent.agent.trace import Step
from memagent.config import AgentConfig
from memagent.data.example import Example
from memagent.data.formats.files import read_examples
from memagent.documents.document import Document
from memagent.engines.base import open_engine
from memagent.errors import MemagentError
from memagent.eval.records import evidence_scores
from memagent.rewards.verifiers import grade
from memagent.rl.warmstart.conversations import Conversation
from memagent.types import Message
from recipes.questions import write_lines

READING = AgentConfig(
    window=4096,
    chunk_tokens=2048,
    memory_tokens=512,
    answer_tokens=64,
    prompts="add",
    temperature=1.0,
)
CONCURRENCY = 256


async def right_reading(example: Example, reader: Reader, samples: int) -> list[Step] | None:
    """The steps of a right reading with all evidence; None if there is none."""
    document = Document.from_text(example.text())
    for steps in await asyncio.gather(*(read(example, reader, document) for _ in range(samples))):
        if not steps:
            continue
        trace = reader.trace(example.question, document, steps)
        is_right = grade("strict", trace.answer or "", example.answers, example.match).value == 1
        if is_right and evidence_scores(example, trace).retained == 1:
            return steps
    return None


async def read(example: Example, reader: Reader, document: Document) -> list[Step]:
    """One reading; it has no steps where a reply was of no use."""
    try:
        return [step async for step in reader.steps(example.question, document)]
    except MemagentError:
        return []


def conversations(
    example: Example, steps: Sequence[Step], reader: Reader
) -> Iterator[Conversation]:
    """Each step with the prompt that it replied to."""
    reading = reader.reading(example.question, example.text())
    memory = ""
    for step in steps:
        if step.kind == "read":
            chunk = reading.chunks.get(step.index)
            assert chunk is not None, "it was read"
            prompt = reading.section_messages(chunk, memory)
        else:
            prompt = reader.prompts.answer_messages(
                question=example.question,
                memory=memory,
                num_sections=len(steps) - 1,
                answer_tokens=reader.config.answer_tokens,
            )
        said: Message = {"role": "assistant", "content": step.reply}
        yield Conversation(
            id=example.id,
            messages=(*prompt, said),
            task=example.task,
            step=step.index,
            kind=step.kind,
        )
        memory = step.memory


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--engine", required=True)
    parser.add_argument(
        "--cache-gb", type=float, help="on a GPU: of the engine, with merged weights"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num", type=int, help="texts of each file, at most")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    examples = [
        one for path in arguments.files for one in list(read_examples(path))[: arguments.num]
    ]
    random.Random(arguments.seed).shuffle(examples)
    on_gpu: dict[str, Any] = {}
    if arguments.cache_gb:
        on_gpu = {"cache_gb": arguments.cache_gb, "merged": True}
    gate = asyncio.Semaphore(CONCURRENCY)
    async with open_engine(arguments.engine, **on_gpu) as engine:
        reader = Reader(engine, config=READING)

        async def collected(example: Example) -> list[Step] | None:
            async with gate:
                if time.monotonic() > until:
                    return None
                return await right_reading(example, reader, arguments.samples)

        readings = await asyncio.gather(*map(collected, examples))
    found = [(one, steps) for one, steps in zip(examples, readings, strict=True) if steps]
    lines = (
        json.dumps(step.record(), ensure_ascii=False)
        for example, steps in found
        for step in conversations(example, steps, reader)
    )
    num = write_lines(arguments.out, lines)
    print(f"{arguments.out}: {num} conversations of {len(found)} texts, of {len(examples)}")


if __name__ == "__main__":
    asyncio.run(main())

"""What the last step makes of a reading: the same memories, answered in several ways.

    python -m benchmarks.last_step --hotpotqa FOLDER --engine local:memagent-1.5b --device cuda --tokens 112k --num 128
    python -m benchmarks.last_step --hotpotqa FOLDER --tokens 20k --skip 500 --num 300      # questions of no other measurement
    python -m benchmarks.last_step --hotpotqa FOLDER --engine local:memagent-135m --tokens 2k --num 4

Every text is read once. Then the question is answered

    memory       from the last memory, as the plain loop does
    beside       with the paragraphs around what the memory holds beside it (`paragraph_tokens`)
    paragraphs   from those paragraphs in place of the memory
    again        after reading those paragraphs once more, side by side as one section, with an empty memory
    vote         by the answer that most of `--votes` samples from the memory give

The table has each way's score, strict and as the paper scores, and the difference to `memory` on the same questions with its
95 % interval. Records are appended to `--out`; the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memagent.agent.evidence.paragraphs import HEADING
from memagent.agent.memory import ReadingState
from memagent.agent.reader import Reader
from memagent.data.choices import named_sources, source_settings
from memagent.data.example import Example
from memagent.data.tasks.lengths import parse_length
from memagent.data.tasks.registry import open_task
from memagent.documents.document import Chunk, Document
from memagent.engines.base import open_engine
from memagent.errors import MemagentError
from memagent.eval.stats import paired_mean, wilson
from memagent.jsonl import read_lines
from memagent.rewards.verifiers import grade
from memagent.types import Sampling

WAYS = ("memory", "beside", "paragraphs", "again", "vote")
GRADERS = {"strict": "strict", "as the paper": "original_sub_em_boxed"}
PARAGRAPH_TOKENS = 1024
VOTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A text that was read, ready to be answered from."""

    reader: Reader
    example: Example
    memory: str
    paragraphs: str
    """Those around what the memory holds; empty where nothing of it was found in the text."""
    answer_beside: str
    """The reply with both in the prompt."""

    async def answer(self, memory: str, **sampling: Any) -> str:
        """The reply to the answer's prompt with this in the memory's place."""
        messages = self.reader.prompts.answer_messages(
            question=self.example.question,
            memory=memory,
            num_sections=1,
            answer_tokens=self.reader.config.answer_tokens,
        )
        limit = self.reader.config.answer_tokens
        given = {"max_tokens": limit, "temperature": 0.0, **sampling}
        return (await self.reader.engine.complete(messages, Sampling(**given))).text

    async def read_again(self) -> str:
        """The memory after the paragraphs were read as one section; the old one where they add nothing."""
        text = self.paragraphs.removeprefix(f"{HEADING}\n")
        num_tokens = self.reader.tokenizer.count(text)
        chunk = Chunk(index=0, start=0, end=len(text), text=text, num_tokens=num_tokens, places=())
        budget = self.reader.check(self.example.question)
        _, state = await self.reader.read_section(
            self.example.question, 0, chunk, ReadingState(), budget, Document.from_text(text)
        )
        return state.memory or self.memory

    async def vote(self, num: int) -> str:
        """The answer that most samples give; of equally many, the first."""
        samples = [self.answer(self.memory, temperature=1.0, seed=seed) for seed in range(num)]
        return Counter(await asyncio.gather(*samples)).most_common(1)[0][0]


async def read(reader: Reader, example: Example) -> Reading:
    """Read a text and answer with paragraphs beside the memory."""
    steps = [step async for step in reader.steps(example.question, example.text())]
    return Reading(
        reader=reader,
        example=example,
        memory=steps[-1].memory,
        paragraphs=steps[-1].shown,
        answer_beside=steps[-1].reply,
    )


async def answers(reading: Reading, *, votes: int) -> dict[str, str]:
    """The reply of each way."""
    plain = await reading.answer(reading.memory)
    found = {"memory": plain, "beside": reading.answer_beside, "paragraphs": plain, "again": plain}
    if reading.paragraphs:
        found["paragraphs"] = await reading.answer(reading.paragraphs)
        found["again"] = await reading.answer(await reading.read_again())
    return {**found, "vote": await reading.vote(votes)}


def record_of(reading: Reading, replies: dict[str, str]) -> dict[str, Any]:
    """What is kept of a question."""
    example = reading.example
    pieces = [item.text for item in example.evidence]
    return {
        "id": example.id,
        "answers": list(example.answers),
        "replies": replies,
        "scores": {
            way: {
                name: grade(grader, reply, example.answers, example.match).value
                for name, grader in GRADERS.items()
            }
            for way, reply in replies.items()
        },
        "in_memory": all(piece in reading.memory for piece in pieces),
        "in_paragraphs": all(piece in reading.paragraphs for piece in pieces),
    }


def table(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each way."""
    num = len(records)
    shares = {name: sum(one[name] for one in records) for name in ("in_memory", "in_paragraphs")}
    yield f"{num} questions; all evidence is in the memory of {shares['in_memory']}, in the paragraphs of {shares['in_paragraphs']}"
    for way in WAYS:
        cells = []
        for name in GRADERS:
            values = [one["scores"][way][name] for one in records]
            score = wilson(round(sum(values)), num)
            pairs = [
                value - one["scores"]["memory"][name]
                for value, one in zip(values, records, strict=True)
            ]
            change = paired_mean(pairs)
            cells.append(
                f"{name} {100 * score.value:.1f} ({100 * score.low:.1f} to {100 * score.high:.1f}), "
                f"{100 * change.value:+.1f} ({100 * change.low:+.1f} to {100 * change.high:+.1f})"
            )
        yield f"{way:<12}{'; '.join(cells)}"


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of all questions; those in the file are not made again."""
    sources = source_settings("hotpotqa", named_sources([str(options.hotpotqa)]))
    settings: dict[str, Any] = {
        "tokens": parse_length(options.tokens),
        "seed": options.seed,
        "split": "dev",
    }
    task = open_task("hotpotqa", {**settings, "tokenizer": options.tokenizer, **sources})
    known = (
        {one.record["id"]: one.record for one in read_lines(options.out)}
        if options.out.exists()
        else {}
    )
    device = {"device": options.device} if options.device else {}
    gate = asyncio.Semaphore(options.concurrency)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    async with open_engine(options.engine, **device) as engine:
        reader = Reader(engine, paragraph_tokens=options.paragraph_tokens, temperature=0.0)
        with options.out.open("a", encoding="utf-8") as file:

            async def one(index: int) -> dict[str, Any]:
                async with gate:
                    example = await asyncio.to_thread(task.example, index)
                    if example.id in known:
                        return known[example.id]
                    reading = await read(reader, example)
                    record = record_of(reading, await answers(reading, votes=options.votes))
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
                    file.flush()
                    return record

            return list(
                await asyncio.gather(*map(one, range(options.skip, options.skip + options.num)))
            )


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--hotpotqa", type=Path, required=True, help="folder of HotpotQA's files")
    add("--engine", default="local:memagent-1.5b")
    add("--device")
    add("--tokens", default="28k", help="length of the texts")
    add("--tokenizer", default="qwen2.5-coder-1.5b", help="which counts it")
    add("--num", type=int, default=128)
    add("--skip", type=int, default=0, help="questions that are left out at the beginning")
    add("--seed", type=int, default=7)
    add("--paragraph-tokens", type=int, default=PARAGRAPH_TOKENS)
    add("--votes", type=int, default=VOTES)
    add("--concurrency", type=int, default=256)
    add("--out", type=Path, default=Path("runs/last_step.jsonl"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        print(*table(asyncio.run(measure(parse_options(arguments)))), sep="\n")
    except MemagentError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

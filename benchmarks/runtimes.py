"""The answers of one local model through llama.cpp and through torch, paired: HotpotQA dev questions over a composed memory.

    python -m benchmarks.runtimes --hotpotqa dev.jsonl.gz                    # twenty minutes on two cores
    python -m benchmarks.runtimes --hotpotqa dev.jsonl.gz --model memagent-1.5b --num 50

A memory has the supporting sentences of a question and some from its other paragraphs, one on a line, shuffled. Each engine
writes the answers greedily, with the prompts and the adapter of the model. An answer is right if it contains the gold one.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import time
from pathlib import Path
from typing import Any

from memagent.agent.prompts import open_prompts
from memagent.engines.base import open_engine
from memagent.engines.store import reading_defaults
from memagent.eval.stats import compare
from memagent.rewards.verifiers import grade
from memagent.types import Message, Sampling

NUM_OTHERS = 6
ANSWER_TOKENS = 32


def memory_of(item: dict[str, Any], rng: random.Random) -> str:
    """Sentences of a question's paragraphs."""
    paragraphs = dict(item["context"])
    gold = [
        paragraphs[title][number].strip()
        for title, number in item["supporting_facts"]
        if number < len(paragraphs.get(title, ()))
    ]
    others = [one.strip() for sentences in paragraphs.values() for one in sentences]
    lines = gold + rng.sample([one for one in others if one and one not in gold], NUM_OTHERS)
    return "\n".join(f"- {one}" for one in rng.sample(lines, len(lines)))


def prompts_of(path: Path, model: str, num: int) -> tuple[list[list[Message]], list[str]]:
    """Conversations that ask for the answer, and the answers."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        items = [json.loads(line) for line in file][:num]
    prompts, rng = open_prompts(reading_defaults(model)["prompts"]), random.Random(0)
    conversations = [
        prompts.answer_messages(
            question=item["question"],
            memory=memory_of(item, rng),
            num_sections=8,
            answer_tokens=ANSWER_TOKENS,
        )
        for item in items
    ]
    return conversations, [item["answer"] for item in items]


async def answers(model: str, runtime: str, conversations: list[list[Message]]) -> list[str]:
    """What a model replies in one runtime."""
    sampling = Sampling(max_tokens=ANSWER_TOKENS)
    async with open_engine(f"local:{model}", runtime=runtime) as engine:
        calls = (engine.complete(one, sampling) for one in conversations)
        return [reply.text for reply in await asyncio.gather(*calls)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hotpotqa", type=Path, required=True, help="dev.jsonl.gz")
    parser.add_argument("--model", default="memagent-135m")
    parser.add_argument("--num", type=int, default=100)
    arguments = parser.parse_args()
    conversations, golds = prompts_of(arguments.hotpotqa, arguments.model, arguments.num)
    said, right = {}, {}
    for runtime in ("llama.cpp", "torch"):
        started = time.perf_counter()
        said[runtime] = asyncio.run(answers(arguments.model, runtime, conversations))
        right[runtime] = [
            grade("contains", reply, [gold]).value
            for reply, gold in zip(said[runtime], golds, strict=True)
        ]
        seconds = time.perf_counter() - started
        print(f"{runtime}: {sum(right[runtime]):.0f} of {len(golds)} right, {seconds:.0f} s")
    same, found = sum(map(str.__eq__, *said.values())), compare(*right.values()).difference
    interval = f"{100 * found.low:+.1f} to {100 * found.high:+.1f}"
    print(f"{same} of {len(golds)} are the same text; {100 * found.value:+.1f} points ({interval})")


if __name__ == "__main__":
    main()

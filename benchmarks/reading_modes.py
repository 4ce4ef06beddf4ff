"""The reading modes side by side, with an oracle that reads perfectly, so that only the modes differ.

    python -m benchmarks.reading_modes                                # configs/eval/modes.toml at 28K
    python -m benchmarks.reading_modes --tokens 28K 448K 3.5M --num 4
    python -m benchmarks.reading_modes modes_counting --memory-tokens 128
    memagent eval modes --engine local:MODEL --run-dir runs/modes     # the same table with a model

The oracle knows where the evidence is. It notes, quotes and lists what a section holds, says when it has read
enough, and answers only if its last prompt shows what the answer rests on: what a mode loses, it does not know. In
`modes_counting` it does no arithmetic either. It notes each fact on a line of its memory, as far as the memory goes: of
things that change the last state only, of similar items all up to the one that is asked for, as it does not count them.
With items, code counts. Of several answers it gives those that it knows.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Sequence

from memagent.agent.trace import Trace
from memagent.cli.eval.output import results_text
from memagent.data.example import Example
from memagent.documents.chunking import Chunks
from memagent.engines.scripted import Script, ScriptedEngine
from memagent.eval.methods import Context, reader
from memagent.eval.records import ItemRecord
from memagent.eval.report.rows import Entry, result_rows
from memagent.eval.setup import evaluate
from memagent.eval.suites import Suite, read_suite
from memagent.rl.warmstart.traces import Moment, RightReplies, Rule, collect, latest_of_each
from memagent.types import Message, Sampling

UNKNOWN = "I do not know."
COUNTING = ("beyond/counting", "beyond/aggregation", "beyond/corrections", "beyond/coreference")


async def oracle(example: Example, context: Context) -> Trace:
    """The reader with perfect replies. It calculates nothing: each fact is noted on its own."""
    settings = context.settings
    right = RightReplies(
        example,
        config=settings,
        tokenizer=context.tokenizer,
        rules=NOTED,
    )
    sections = Chunks(context.document, context.tokenizer, settings.chunk_tokens)
    context.engine = ScriptedEngine(honest(example, right.script(sections)))
    return await reader(example, context)


def honest(example: Example, script: Script) -> Script:
    """A script that answers only from what its prompt shows."""

    def reply(messages: Sequence[Message], sampling: Sampling) -> str:
        said = script(messages, sampling)
        prompt = messages[-1]["content"]
        if "<section" in prompt or "<note sections=" in prompt:
            return said
        if example.match == "all" and example.task in COUNTING:
            return ", ".join(day for day in example.answers if shows_state(day, prompt)) or UNKNOWN
        return said if shows_answer(example, prompt) else UNKNOWN

    return reply


def shows_state(day: str, prompt: str) -> bool:
    """Whether a prompt shows a day as the last one of something: in the memory, or by code."""
    return f"is set for {day}." in prompt or f"last value {day} [" in prompt


def shows_answer(example: Example, prompt: str) -> bool:
    """Whether a prompt shows all evidence, or a count by code that is the answer."""
    shown = " ".join(prompt.split())
    counted = prompt.partition("Counted by code")[2].partition("Quotes from the text")[0]
    if example.task == "beyond/coreference":
        return shows_item(example, shown, counted)
    if example.task in COUNTING and any(answer in counted for answer in example.answers):
        return True
    wanted = [" ".join((item.note or item.text).split()) for item in example.evidence]
    texts = [" ".join(item.text.split()) for item in example.evidence]
    if example.task == "beyond/corrections":
        wanted, texts = wanted[-1:], texts[-1:]
    return all(note in shown or text in shown for note, text in zip(wanted, texts, strict=True))


def shows_item(example: Example, shown: str, counted: str) -> bool:
    """Whether the item that is asked for is shown, and which one it is: by code, or by all items before it."""
    number = example.metadata["number"]
    found = re.search(rf"number {number} of .*: \[(\d+)\]", counted)
    items = [text for _, text in similar_items(example)][:number]
    if found:
        return f"[{found[1]}] " in shown and items[-1] in shown
    return all(text in shown for text in items)


def similar_items(example: Example) -> list[tuple[int, str]]:
    """The items of the kind that is asked for, each with its end, in the order of the text."""
    text = example.text()
    spans = [(start, end) for start, end, _ in example.metadata["spans"].get("similar", [])]
    spans += example.evidence_offsets()
    return [(end, " ".join(text[start:end].split())) for start, end in sorted(spans)]


def note_similar(example: Example) -> list[Moment]:
    """Notes similar items, one a line, up to the one that is asked for."""
    items = similar_items(example)[: example.metadata["number"]]
    lines = [text for _, text in items]
    return [Moment(end, "\n".join(lines[: number + 1])) for number, (end, _) in enumerate(items)]


NOTED: dict[str, Rule] = {
    "beyond/counting": collect,
    "beyond/aggregation": collect,
    "beyond/corrections": latest_of_each,
    "beyond/coreference": note_similar,
}
"""What the memory holds without items."""


def with_oracle(suite: Suite) -> Suite:
    """The suite with the oracle in place of the reader."""
    methods = [
        method.model_copy(update={"name": f"{__file__}:oracle", "label": method.title})
        for method in suite.methods
    ]
    return suite.model_copy(update={"methods": methods})


def measure(
    name: str, *, tokens: Sequence[str], num: int, changes: Sequence[str] = ()
) -> list[ItemRecord]:
    """The records of a shipped suite with the oracle."""
    lengths = ", ".join(f'"{length}"' for length in tokens)
    num_tasks = len(read_suite(name).tasks)
    chosen = [f"tasks.{number}.tokens=[{lengths}]" for number in range(num_tasks)]
    chosen += [f"num={num}", 'tokenizer="estimate"']
    suite = read_suite(name, changes=[*chosen, *changes])
    return asyncio.run(evaluate(with_oracle(suite), ScriptedEngine([])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", nargs="?", default="modes")
    parser.add_argument("--tokens", nargs="+", default=["28K"])
    parser.add_argument("--num", type=int, default=4)
    parser.add_argument("--memory-tokens", type=int)
    options = parser.parse_args()
    changes = [f"agent.memory_tokens={options.memory_tokens}"] if options.memory_tokens else []
    records = measure(options.suite, tokens=options.tokens, num=options.num, changes=changes)
    print(results_text(result_rows(Entry(record.method, record) for record in records)))


if __name__ == "__main__":
    main()

"""What the embedded model makes of a text, by size of section and wording: ten facts in the town archive.

python -m benchmarks.small_model                                  # the first row in docs/models.md,
python -m benchmarks.small_model --engine local:smollm2-135m small:512:64 small:1024:64    # and others
python -m benchmarks.small_model --entries 150                    # the text of `make demo`

A row is PROMPTS:CHUNK_TOKENS:MEMORY_TOKENS. All questions are read at once over the same text, greedily.
An answer is right if it holds the words that only the fact has; `found` counts questions whose memory
held them after any section, `kept` those whose last memory did. Two of the facts are those of `make demo`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

from memagent.agent.reader import Reader
from memagent.agent.trace import Trace
from memagent.documents.sample import HIDDEN_SENTENCES, QUESTIONS, town_archive
from memagent.engines.base import BaseEngine, open_engine

ANSWER_TOKENS = 128
NUM_ENTRIES = 50
"""A third of the archive of `make demo`, about 4,000 tokens: each question reads it from the start."""
ROWS = ("compact_add:512:384",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A sentence that stands once in the text, and a question about it."""

    question: str
    sentence: str
    answer: str
    """Words of the sentence that an answer must hold."""
    place: float | None
    """Where to put it, as a share of the text; None: the archive has it."""


FACTS = (
    Fact(
        question=QUESTIONS[0],
        sentence=HIDDEN_SENTENCES[0.45],
        answer="bakery oven",
        place=None,
    ),
    Fact(
        question=QUESTIONS[1],
        sentence=HIDDEN_SENTENCES[0.80],
        answer="Marta Lindqvist",
        place=None,
    ),
    Fact(
        question="What is the name of the new ferry?",
        sentence="The new ferry was christened Morning Star by the bishop's daughter.",
        answer="Morning Star",
        place=0.05,
    ),
    Fact(
        question="Which colour will the town hall be painted?",
        sentence="It was agreed that the town hall will be painted dark green next summer.",
        answer="green",
        place=0.22,
    ),
    Fact(
        question="What did the diver find below the pier?",
        sentence="The diver who went down below the pier found a bronze cannon in the mud.",
        answer="cannon",
        place=0.33,
    ),
    Fact(
        question="Who teaches the children music?",
        sentence="Music is taught to the children by Signe Aas, who came from the capital.",
        answer="Signe Aas",
        place=0.52,
    ),
    Fact(
        question="How many books does the reading room own?",
        sentence="The reading room now owns 214 books and one globe.",
        answer="214",
        place=0.61,
    ),
    Fact(
        question="Where did the lost mail bag turn up?",
        sentence="The lost mail bag turned up in the attic of the customs house.",
        answer="attic",
        place=0.70,
    ),
    Fact(
        question="What does the doctor keep in his garden?",
        sentence="The doctor keeps eleven hives of bees in his garden, to the alarm of the street.",
        answer="bees",
        place=0.88,
    ),
    Fact(
        question="Which bird nests on the chapel roof?",
        sentence="A pair of white storks nests on the chapel roof and may not be driven off.",
        answer="stork",
        place=0.96,
    ),
)


def text_with(facts: Sequence[Fact], num_entries: int) -> str:
    """The town archive with each fact at the end of an entry."""
    entries = town_archive(num_entries=num_entries).rstrip("\n").split("\n\n")
    for fact in facts:
        if fact.place is not None:
            entries[int(fact.place * len(entries))] += f" {fact.sentence}"
    text = "\n\n".join(entries) + "\n"
    assert all(text.count(fact.sentence) == 1 for fact in facts)
    assert all(text.lower().count(fact.answer.lower()) == 1 for fact in facts)
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one setting gave."""

    num_sections: int
    found: int
    kept: int
    right: int
    seconds: float


def holds(text: str, fact: Fact) -> bool:
    """Whether a text has the words that only a fact has."""
    return fact.answer.lower() in text.lower()


def measure(
    engine: BaseEngine, setting: str, facts: Sequence[Fact], text: str
) -> tuple[Row, list[Trace]]:
    """Read the text for all facts at once."""
    prompts, chunk_tokens, memory_tokens = setting.split(":")
    reader = Reader(
        engine,
        prompts=prompts,
        chunk_tokens=int(chunk_tokens),
        memory_tokens=int(memory_tokens),
        answer_tokens=ANSWER_TOKENS,
    )
    started = time.perf_counter()
    traces = reader.ask_many([fact.question for fact in facts], text)
    seconds = time.perf_counter() - started
    pairs = list(zip(facts, traces, strict=True))
    row = Row(
        num_sections=traces[0].num_chunks,
        found=sum(any(holds(step.memory, fact) for step in trace.steps) for fact, trace in pairs),
        kept=sum(holds(trace.memory, fact) for fact, trace in pairs),
        right=sum(holds(trace.answer, fact) for fact, trace in pairs),
        seconds=seconds,
    )
    return row, traces


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", default=ROWS, help="PROMPTS:CHUNK_TOKENS:MEMORY_TOKENS")
    parser.add_argument("--engine", default="local:memagent-135m")
    parser.add_argument("--facts", type=int, default=len(FACTS), help="only the first so many")
    parser.add_argument("--entries", type=int, default=NUM_ENTRIES, help="length of the archive")
    parser.add_argument("--show", action="store_true", help="print the answers")
    arguments = parser.parse_args()
    facts = FACTS[: arguments.facts]
    text = text_with(facts, arguments.entries)
    print("| prompts:chunk:memory | sections | found | kept | right | seconds |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    with open_engine(arguments.engine) as engine:
        for setting in arguments.rows:
            row, traces = measure(engine, setting, facts, text)
            print(
                f"| {setting} | {row.num_sections} | {row.found} | {row.kept} "
                f"| {row.right} of {len(facts)} | {row.seconds:.0f} |",
                flush=True,
            )
            for trace in traces if arguments.show else ():
                print(f"  {trace.question} {' '.join(trace.answer.split())}")


if __name__ == "__main__":
    main()

"""Questions that a model makes up about paragraphs that belong together, in the manner of HotpotQA: for `prepare_answers.py`.

    python -m recipes.generate_questions lessons --qa QA --hotpotqa HOTPOTQA --out data/questions/lessons.jsonl
    memagent train sft reader_1.5b/warm_start --file data/questions/lessons.jsonl --set warm_start.batch=128 \
        --set warm_start.steps=160 --run-dir runs/asker
    python -m recipes.generate_questions facts --qa QA --hotpotqa HOTPOTQA --out data/questions/facts.jsonl.gz
    python -m recipes.generate_questions ask data/questions/facts.jsonl.gz --engine local:qwen2.5-coder-1.5b \
        --adapter runs/asker/final --out data/questions/asked.jsonl.gz
    python -m recipes.generate_questions check data/questions/asked.jsonl.gz --engine local:memagent-1.5b \
        --out data/questions/generated.jsonl.gz

Few questions come with their evidence; paragraphs are had for nothing. `lessons` turns training questions around: from the
supporting sentences to the question and its answer. `facts` picks sentences of two paragraphs of which one names the other,
or whose subjects are of one kind, and that support no development question. `ask` samples a question for each, and `check` keeps those that
a reader answers from the facts with at least some word of the answer. The result is a file as `questions.py` reads them.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any, NamedTuple

from memagent.agent.prompts import open_prompts
from memagent.engines.base import BaseEngine, open_engine
from memagent.rewards.metrics import token_f1
from memagent.rewards.text import unboxed
from memagent.rl.warmstart.conversations import Conversation
from memagent.types import Message, Sampling
from recipes.questions import (
    YES_NO,
    Paragraph,
    Pool,
    Question,
    Sources,
    is_sound,
    read_lines,
    titled,
    wording,
    write_lines,
)

PROMPT = """Facts from an encyclopedia:

{facts}

Write a question that takes all of these facts to answer, and its answer in a few words of the facts, or yes or no."""
REPLY = re.compile(r"Question: (?P<question>[^\n]+)\nAnswer: (?P<answer>[^\n]+)\s*")
NUM_FACTS = 40_000
KIND_SHARE = 0.2
"""Pairs of two subjects of one kind, which ask for a comparison."""
MAX_USES = 12
"""How often a paragraph is in a pair."""
FIRST_SHARE, MORE_SHARE = 0.6, 0.25
"""How often the sentence of the paragraph that is named is its first one, and how often a second one of it is shown too."""
KIND = re.compile(
    r"\b(?:is|was|are|were) (?:an?|the) ([a-z][\w '-]{5,60}?)(?: from| in| of| by| who| that| which|,|\.|$)"
)
NAME = re.compile(r"[A-Z0-9][\w'.&-]*(?: (?:(?:of|the|and|in|de|von|van) )*[A-Z0-9][\w'.&-]*)+")
MAX_NAME_WORDS = 7
CAPITAL = re.compile(r"(?<!^)\b[A-Z0-9]\w*")
"""A word of a name in a question; its first word has a capital anyhow."""
MAX_FACT_WORDS = 60
MAX_TOKENS, ANSWER_TOKENS, TEMPERATURE = 96, 64, 0.9
SAMPLES = 2
"""Questions that are sampled for each pair of facts."""
CONCURRENCY = 1024

Record = dict[str, Any]
"""A question as files of QA hold it, or without question and answers yet."""


class Fact(NamedTuple):
    """Sentences of one paragraph."""

    paragraph: Paragraph
    numbers: tuple[int, ...]

    def line(self) -> str:
        """As readers note it."""
        text = " ".join(self.paragraph.sentences[number] for number in self.numbers)
        return titled(self.paragraph.title, text)


def prompt_of(lines: Iterable[str]) -> list[Message]:
    """What the model is asked to do with facts."""
    return [{"role": "user", "content": PROMPT.format(facts="\n".join(lines))}]


# --- lessons ----------------------------------------------------------------------------------------


def is_told(question: Question) -> bool:
    """Whether its facts have the answer, and all names of the question."""
    facts = "\n".join(Fact(one, one.support).line() for one in question.gold).lower()
    names = CAPITAL.findall(question.text)
    return is_sound(question) and all(name.lower() in facts for name in names)


def question_lessons(questions: Iterable[Question], seed: int) -> Iterator[str]:
    """Lines of conversations from the evidence of questions to the questions."""
    for question in questions:
        lines = [Fact(one, one.support).line() for one in question.gold]
        random.Random(f"{seed}/{question.id}").shuffle(lines)
        reply = f"Question: {question.text}\nAnswer: {question.answers[0]}"
        said: Message = {"role": "assistant", "content": reply}
        yield json.dumps(
            Conversation(id=question.id, messages=(*prompt_of(lines), said)).record(),
            ensure_ascii=False,
        )


# --- facts ------------------------------------------------------------------------------------------


def linked(pool: Pool, generator: random.Random) -> Iterator[tuple[Fact, Fact]]:
    """A sentence that names another paragraph, and sentences of that one; in random order."""
    named = _by_name(pool)
    found = []
    for number in pool.allowed:
        one = pool.all[number]
        for place, sentence in enumerate(one.sentences):
            for name in names_in(sentence):
                other = named.get(name)
                if other is not None and other != number and name not in one.title:
                    found.append((number, place, other))
    generator.shuffle(found)
    uses: Counter[int] = Counter()
    for number, place, other in found:
        if max(uses[number], uses[other]) < MAX_USES:
            uses.update((number, other))
            about = pool.all[other]
            yield Fact(pool.all[number], (place,)), Fact(about, _some(about, generator))


def of_one_kind(pool: Pool, generator: random.Random) -> Iterator[tuple[Fact, Fact]]:
    """The first sentences of two paragraphs that say that their subjects are the same kind of thing."""
    kinds: dict[str, list[int]] = defaultdict(list)
    for number in pool.allowed:
        if found := KIND.search(pool.all[number].sentences[0]):
            kinds[found.group(1)].append(number)
    pairs = []
    for numbers in kinds.values():
        generator.shuffle(numbers)
        pairs += [*zip(numbers[::2], numbers[1::2], strict=False)]
    generator.shuffle(pairs)
    for pair in pairs:
        first, second = (Fact(pool.all[number], (0,)) for number in pair)
        yield first, second


def names_in(sentence: str) -> set[str]:
    """Words with capitals beside each other, and parts of such a row of words."""
    found = set()
    for match in NAME.finditer(sentence):
        words = match.group().split(" ")
        for start, end in combinations(range(len(words) + 1), 2):
            if 2 <= end - start <= MAX_NAME_WORDS:
                found.add(" ".join(words[start:end]).rstrip(".'&-"))
    return found


def _by_name(pool: Pool) -> dict[str, int]:
    """Paragraphs by a title of several words that no other one has."""
    found: dict[str, int] = {}
    twice = set()
    for number in pool.allowed:
        name = re.sub(r" \([^)]*\)$", "", pool.all[number].title)
        if " " in name and found.setdefault(name, number) != number:
            twice.add(name)
    return {name: number for name, number in found.items() if name not in twice and " " in name}


def _some(paragraph: Paragraph, generator: random.Random) -> tuple[int, ...]:
    """A sentence or two, most often the first."""
    numbers = range(len(paragraph.sentences))
    chosen = {0 if generator.random() < FIRST_SHARE else generator.choice(numbers)}
    if generator.random() < MORE_SHARE:
        chosen.add(generator.choice(numbers))
    return tuple(sorted(chosen))


def fact_records(pool: Pool, num: int, generator: random.Random) -> Iterator[Record]:
    """Records as of questions, without a question."""
    num_kinds = round(num * KIND_SHARE)
    kinds = _first(of_one_kind(pool, generator), num_kinds)
    links = _first(linked(pool, generator), num - num_kinds)
    pairs = [*kinds, *links]
    generator.shuffle(pairs)
    for number, pair in enumerate(pairs):
        yield {
            "id": f"generated-{number}",
            "paragraphs": [
                {"title": one.paragraph.title, "sentences": one.paragraph.sentences} for one in pair
            ],
            "supporting": [[one.paragraph.title, place] for one in pair for place in one.numbers],
        }


def _first(pairs: Iterable[tuple[Fact, Fact]], num: int) -> Iterator[tuple[Fact, Fact]]:
    """The first pairs whose facts are short."""
    for pair in pairs:
        if num <= 0:
            return
        if all(len(one.line().split()) <= MAX_FACT_WORDS for one in pair):
            num -= 1
            yield pair


# --- questions --------------------------------------------------------------------------------------


def lines_of(record: Record) -> list[str]:
    """The facts of a record, a line for each paragraph."""
    return [fact.line() for fact in facts_of(record)]


def facts_of(record: Record) -> list[Fact]:
    places: dict[str, list[int]] = defaultdict(list)
    for title, place in record["supporting"]:
        places[title].append(place)
    return [
        Fact(
            Paragraph(title=one["title"], sentences=tuple(one["sentences"])),
            tuple(places[one["title"]]),
        )
        for one in record["paragraphs"]
    ]


def asked(record: Record, reply: str) -> Record | None:
    """A record with the question of a reply; None where it has none, or one that cannot be answered by its facts."""
    found = REPLY.fullmatch(reply)
    if found is None:
        return None
    question, answer = found.group("question").strip(), found.group("answer").strip()
    gold = tuple(replace(fact.paragraph, support=fact.numbers) for fact in facts_of(record))
    one = Question(
        id=record["id"], text=question, answers=(answer,), gold=gold, hard=(), is_titled=True
    )
    tells = (
        answer.lower() in question.lower()
        and " or " not in question
        and answer.lower() not in YES_NO
    )
    if tells or not question.endswith("?") or not is_sound(one):
        return None
    return {**record, "question": question, "answers": [answer]}


async def ask(arguments: argparse.Namespace) -> None:
    """Sample a question for each pair of facts."""

    async def one(engine: BaseEngine, record: Record) -> list[Record]:
        prompt = prompt_of(lines_of(record))
        sampling = Sampling(max_tokens=MAX_TOKENS, temperature=TEMPERATURE)
        said = await asyncio.gather(*(engine.complete(prompt, sampling) for _ in range(SAMPLES)))
        numbered = enumerate(asked(record, one.text.strip()) for one in said)
        return [
            {**one, "id": f"{one['id']}-{number}"} for number, one in numbered if one is not None
        ]

    await over_file(arguments, one)


async def check(arguments: argparse.Namespace) -> None:
    """Keep questions that a reader answers from their facts with at least a word of the answer."""
    prompts = open_prompts("add")

    async def one(engine: BaseEngine, record: Record) -> list[Record]:
        messages = prompts.answer_messages(
            question=record["question"],
            memory="\n".join(lines_of(record)),
            num_sections=1,
            answer_tokens=ANSWER_TOKENS,
        )
        said = await engine.complete(messages, Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0))
        score = token_f1(unboxed(said.text), record["answers"][0])
        return [{**record, "agreement": round(score, 3)}] if score > 0 else []

    await over_file(arguments, one)


async def over_file(
    arguments: argparse.Namespace, work: Callable[[BaseEngine, Record], Awaitable[list[Record]]]
) -> None:
    """What an engine makes of the records of a file, many at once, until the time is over; each question once."""
    until = time.monotonic() + arguments.seconds
    records = list(read_lines(arguments.file))[: arguments.num]
    settings: dict[str, Any] = {"adapter": arguments.adapter} if arguments.adapter else {}
    if arguments.cache_gb:
        settings |= {"cache_gb": arguments.cache_gb, "merged": True}
    gate = asyncio.Semaphore(CONCURRENCY)

    async with open_engine(arguments.engine, **settings) as engine:

        async def one(record: Record) -> list[Record]:
            async with gate:
                return await work(engine, record) if time.monotonic() < until else []

        done = await asyncio.gather(*map(one, records))
    found = {wording(record["question"]): record for record in chain.from_iterable(done)}
    num = write_records(arguments.out, found.values())
    print(f"{arguments.out}: {num} of {len(records)}")


def write_records(path: Path, records: Iterable[Record]) -> int:
    """Records one a line, compressed; returns how many."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(lines)
    return len(lines)


def from_sources(arguments: argparse.Namespace) -> None:
    """`lessons` and `facts`."""
    sources = Sources(arguments.qa, arguments.hotpotqa)
    generator = random.Random(arguments.seed)
    if arguments.name == "lessons":
        dev = {wording(question.text) for question in sources.dev}
        questions = chain(sources.official(), sources.cut())
        found = [one for one in questions if is_told(one) and wording(one.text) not in dev]
        num = write_lines(arguments.out, question_lessons(found[: arguments.num], arguments.seed))
    else:
        num = write_records(
            arguments.out, fact_records(sources.pool, arguments.num or NUM_FACTS, generator)
        )
    print(f"{arguments.out}: {num}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts = parser.add_subparsers(dest="name", required=True)
    for name in ("lessons", "facts", "ask", "check"):
        part = parts.add_parser(name)
        part.add_argument("--out", type=Path, required=True)
        part.add_argument("--num", type=int, help="at most so many")
        part.add_argument("--seed", type=int, default=7)
        if name in ("lessons", "facts"):
            part.add_argument("--qa", type=Path, required=True)
            part.add_argument("--hotpotqa", type=Path, required=True)
            continue
        part.add_argument("file", type=Path)
        part.add_argument("--engine", required=True)
        part.add_argument("--adapter")
        part.add_argument(
            "--cache-gb", type=float, help="on a GPU: of the engine, with merged weights"
        )
        part.add_argument("--seconds", type=float, default=float("inf"))
    arguments = parser.parse_args()
    if arguments.name in ("lessons", "facts"):
        from_sources(arguments)
    else:
        asyncio.run({"ask": ask, "check": check}[arguments.name](arguments))


if __name__ == "__main__":
    main()

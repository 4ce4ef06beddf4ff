"""Examples and warm-start conversations for the reader, from files of questions with their paragraphs.

    python configs/train/reader_1.5b/prepare.py --qa QA --hotpotqa HOTPOTQA --essays ESSAYS --tokenizer MODEL --out data/reader

QA holds `NAME.jsonl.gz` files, one question a line: `id`, `question`, `answers`, `paragraphs` (each with
`title` and `sentences` or `text`), `supporting` (pairs of title and number of a sentence), and for some
`distractors`, line numbers of `paragraphs.jsonl.gz`. HOTPOTQA holds `train`, `dev` and `paragraphs` files as
HotpotQA publishes them. ESSAYS is a folder of texts for needles to hide in. Written are

    OUT/lessons_short.jsonl    conversations over short texts in short sections: many questions for few tokens
    OUT/lessons_long.jsonl     conversations over sections of full length
    OUT/lessons_tasks.jsonl    conversations over generated tasks: needles, variables, corrections and others
    OUT/train_titled.jsonl     examples for reinforcement learning on other questions, whole paragraphs with titles
    OUT/train_plain.jsonl      the same with one to three sentences of a paragraph and no titles

HotpotQA questions are split by their wording: a share of them (`--rl-share`) is for reinforcement learning alone,
so that its rewards are for questions the model has not been trained on; a question on both sides, or one of the
development files, is refused.

Questions whose paragraphs are known only by their supporting sentences get no titles and short distractors:
otherwise their length would give the gold paragraphs away. Paragraphs that support development questions
are in no text. The same files and seed give the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from memagent.config import AgentConfig
from memagent.data.example import Evidence, Example, Passage, body_starts
from memagent.data.formats.files import write_examples
from memagent.data.tasks.lengths import length_tokenizer
from memagent.data.tasks.registry import open_task
from memagent.data.tasks.ruler.needles import NEEDLES
from memagent.documents.tokenizers import Tokenizer
from memagent.rl.warmstart.traces import TraceRefused, conversations

TASK = "questions"
WORD = re.compile(r"\w+")
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(])")
YES_NO = ("yes", "no")
MAX_ANSWER_WORDS = 10
MAX_EVIDENCE_TOKENS = 260
NUM_CANDIDATES = 2
"""Other sentences that a memory keeps until all evidence is found."""
LEAST_RANK = 0.3
"""Share of a question's weight of words that a candidate has at least."""
MAX_CANDIDATE_TOKENS = 80
HEADING_TOKENS = 5
NUM_HARD = 12
MAX_RANDOM = 600
"""Paragraphs tried as fillers of a text."""
RL_SHARE = 0.5
MAX_PLAIN = 1500
"""Questions without titles for reinforcement learning; the others are for the warm start."""
NUM_LONG_PLAIN = 300
NUM_NATURAL = 1200
"""Questions of Natural Questions."""
FEW_HARD, FEW_HARD_SHARE = 4, 0.5
"""Half of the texts have few misleading paragraphs: most sections of a long text add nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph:
    """A paragraph by its sentences, and which of them support the answer."""

    title: str
    sentences: tuple[str, ...]
    support: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question with its paragraphs."""

    id: str
    text: str
    answers: tuple[str, ...]
    gold: tuple[Paragraph, ...]
    hard: tuple[Paragraph, ...]
    """Misleading ones."""
    is_titled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How long a text is, and in which sections it is read."""

    tokens: int
    chunk_tokens: int


SHORT = (
    Shape(tokens=480, chunk_tokens=512),
    Shape(tokens=800, chunk_tokens=512),
    Shape(tokens=1150, chunk_tokens=640),
    Shape(tokens=1550, chunk_tokens=512),
)
LONG = (Shape(tokens=6000, chunk_tokens=2048), Shape(tokens=4000, chunk_tokens=2048))
FULL = {
    "titled": Shape(tokens=10200, chunk_tokens=2048),
    "plain": Shape(tokens=6100, chunk_tokens=2048),
}
"""What reinforcement learning reads."""
TASK_SHAPES = (
    Shape(tokens=900, chunk_tokens=512),
    Shape(tokens=1800, chunk_tokens=512),
    Shape(tokens=1800, chunk_tokens=1024),
    Shape(tokens=4000, chunk_tokens=2048),
)
GENERATED = {
    "ruler/niah_single_1": 40, "ruler/niah_single_2": 40, "ruler/niah_single_3": 60,
    "ruler/niah_multikey_1": 60, "ruler/niah_multikey_2": 80, "ruler/niah_multikey_3": 80,
    "ruler/niah_multivalue": 80, "ruler/niah_multiquery": 80, "ruler/vt": 120, "ruler/fwe": 140,
    "beyond/two_hop": 60, "beyond/corrections": 60, "beyond/unanswerable": 80,
    "beyond/injection": 40, "beyond/counting": 40,
}  # fmt: skip
"""Examples of generated tasks for the warm start."""


class Pool:
    """Paragraphs to fill texts with, and how rare words are."""

    def __init__(self, paragraphs: Sequence[Paragraph], *, banned: set[str]) -> None:
        self.all = paragraphs
        self.allowed = [number for number, one in enumerate(paragraphs) if one.title not in banned]
        self._banned = banned
        counts: Counter[str] = Counter()
        self._holders: dict[str, list[int]] = defaultdict(list)
        for number, one in enumerate(paragraphs):
            for word in words(one.title, *one.sentences):
                counts[word] += 1
                self._holders[word].append(number)
        self._idf = {word: math.log(len(paragraphs) / count) for word, count in counts.items()}
        self._rarest = math.log(len(paragraphs))

    def weight(self, word: str) -> float:
        """How rare a word is."""
        return self._idf.get(word, self._rarest)

    def paragraph(self, number: int) -> Paragraph | None:
        """By line number; None where no text may hold it."""
        one = self.all[number]
        return None if one.title in self._banned else one

    def near(self, question: str, num: int) -> list[Paragraph]:
        """Paragraphs with most of a question's words."""
        scores: Counter[int] = Counter()
        for word in sorted(words(question)):
            holders = self._holders.get(word, [])
            if len(holders) < len(self.all) // 20:
                for number in holders:
                    scores[number] += self.weight(word)  # type: ignore[assignment]
        found = (self.paragraph(number) for number, _ in scores.most_common(3 * num))
        return [one for one in found if one is not None][:num]

    def rank(self, question: str, *texts: str) -> float:
        """Share of the weight of a question's words that a text has."""
        asked = words(question)
        total = math.fsum(map(self.weight, asked))
        found = math.fsum(map(self.weight, asked & words(*texts)))
        return found / total if total else 0.0


@lru_cache(maxsize=200_000)
def words(*texts: str) -> frozenset[str]:
    """Words of texts, lower-cased."""
    return frozenset(WORD.findall(" ".join(texts).lower()))


# --- questions ------------------------------------------------------------------------------------


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def sentences_of(record: dict[str, Any]) -> tuple[str, ...]:
    found = record.get("sentences") or SENTENCE.split(record["text"])
    return tuple(one.strip() for one in found if one.strip())


def hotpot_questions(path: Path) -> Iterator[Question]:
    """Official items: all paragraphs whole."""
    for item in read_lines(path):
        support = dict(_supporting(item))
        paragraphs = [
            Paragraph(
                title=title,
                sentences=tuple(sentence.strip() for sentence in sentences),
                support=tuple(n for n in support.get(title, ()) if n < len(sentences)),
            )
            for title, sentences in item["context"]
        ]
        yield Question(
            id=item["_id"],
            text=item["question"],
            answers=(item["answer"],),
            gold=tuple(one for one in paragraphs if one.support),
            hard=tuple(one for one in paragraphs if one.title not in support),
            is_titled=True,
        )


def _supporting(item: dict[str, Any]) -> Iterator[tuple[str, list[int]]]:
    found: dict[str, list[int]] = defaultdict(list)
    for title, numbers in item["supporting_facts"]:
        found[title] += numbers if isinstance(numbers, list) else [numbers]
    yield from found.items()


def cut_questions(path: Path, pool: Pool) -> Iterator[Question]:
    """Items whose gold paragraphs are cut to their supporting sentences; whole where the pool has them."""
    where = {
        _plain(sentence): (number, place)
        for number, one in enumerate(pool.all)
        for place, sentence in enumerate(one.sentences)
    }
    for item in read_lines(path):
        hard = [pool.paragraph(number) for number in item["distractors"]]
        gold = [
            Paragraph(title="", sentences=sentences, support=tuple(range(len(sentences))))
            for sentences in map(sentences_of, item["paragraphs"])
        ]
        whole = [_whole(one, where, pool) for one in gold]
        is_titled = all(whole) and len({one.title for one in whole if one}) == len(whole)
        yield Question(
            id=item["id"],
            text=item["question"],
            answers=tuple(item["answers"]),
            gold=tuple(one for one in whole if one) if is_titled else tuple(gold),
            hard=tuple(one for one in hard if one),
            is_titled=is_titled,
        )


def _plain(text: str) -> str:
    return "".join(WORD.findall(text.lower()))


def _whole(paragraph: Paragraph, where: dict[str, tuple[int, int]], pool: Pool) -> Paragraph | None:
    """The paragraph of the pool that holds all sentences of this one."""
    places = [where.get(_plain(sentence)) for sentence in paragraph.sentences]
    numbers = {place[0] for place in places if place}
    if None in places or len(numbers) != 1:
        return None
    support = tuple(sorted({place[1] for place in places if place}))
    return replace(pool.all[numbers.pop()], support=support)


def other_questions(path: Path, pool: Pool, *, is_titled: bool) -> Iterator[Question]:
    """Items with their own paragraphs; without distractors, near ones of the pool are used."""
    for item in read_lines(path):
        if item.get("unanswerable") or not item["answers"]:
            continue
        support: dict[str, set[int]] = defaultdict(set)
        for title, number in item["supporting"]:
            support[title].add(number)
        gold, hard = [], []
        for record in item["paragraphs"]:
            sentences = sentences_of(record)
            numbers = support.get(record["title"], set()) if "sentences" in record else None
            if numbers is None:
                numbers = _holding(sentences, item["answers"], is_whole=not is_titled)
            kept = tuple(sorted(number for number in numbers if number < len(sentences)))
            title = record["title"] if is_titled else ""
            one = Paragraph(title=title, sentences=sentences, support=kept)
            (gold if kept else hard).append(one)
        answer = item["answers"][0].lower()
        near = () if len(hard) >= 6 else pool.near(item["question"], NUM_HARD)
        hard += [one for one in near if answer not in " ".join(one.sentences).lower()]
        yield Question(
            id=item["id"],
            text=item["question"],
            answers=tuple(item["answers"]),
            gold=tuple(gold),
            hard=tuple(hard),
            is_titled=is_titled,
        )


def _holding(sentences: Sequence[str], answers: Sequence[str], *, is_whole: bool) -> set[int]:
    """Sentences with an answer; all of them for a passage that is evidence as a whole."""
    if is_whole:
        return set(range(len(sentences)))
    found = [
        number
        for number, sentence in enumerate(sentences)
        if any(answer.lower() in sentence.lower() for answer in answers)
    ]
    return set(found[:1])


def is_sound(question: Question) -> bool:
    """Whether the answer is short and stands in the evidence, or is yes or no."""
    if not question.gold or len(question.answers[0].split()) > MAX_ANSWER_WORDS:
        return False
    evidence = " ".join(
        one.sentences[number] for one in question.gold for number in one.support
    ).lower()
    titles = " ".join(one.title for one in question.gold).lower()
    answer = question.answers[0].strip().lower()
    return bool(answer) and (answer in YES_NO or answer in evidence or answer in titles)


# --- two sets of questions ------------------------------------------------------------------------


def split(
    questions: Iterable[Question], share: float, *, seed: int
) -> tuple[list[Question], list[Question]]:
    """Questions for reinforcement learning, and for the warm start; the wording decides."""
    for_rl, for_lessons = [], []
    for question in questions:
        is_for_rl = random.Random(f"{seed}/split/{_plain(question.text)}").random() < share
        (for_rl if is_for_rl else for_lessons).append(question)
    return for_rl, for_lessons


def check_apart(**sets: Iterable[Question]) -> None:
    """Refuse a question that is in two of the sets."""
    seen: dict[str, str] = {}
    for name, questions in sets.items():
        for question in questions:
            other = seen.setdefault(_plain(question.text), name)
            if other != name:
                raise SystemExit(
                    f"the question {question.id} is in {other} and in {name}: {question.text}"
                )


# --- texts ----------------------------------------------------------------------------------------


class Writer:
    """Builds texts for questions."""

    def __init__(self, pool: Pool, tokenizer: Tokenizer, seed: int) -> None:
        self._pool = pool
        self._count = lru_cache(maxsize=400_000)(tokenizer.count)
        self._seed = seed

    def example(self, question: Question, tokens: int, purpose: str) -> Example | None:
        """The question over a text of about so many tokens; None if its evidence does not fit."""
        generator = random.Random(f"{self._seed}/{purpose}/{question.id}")
        gold = list(question.gold)
        left = tokens - sum(map(self._cost, gold))
        evidence = sum(self._count(one.sentences[n]) for one in gold for n in one.support)
        if left < 0 or evidence > MAX_EVIDENCE_TOKENS:
            return None
        others = self._fillers(question, left, generator)
        order = [*gold, *others]
        generator.shuffle(order)
        return self._labelled(question, order, tokens, purpose)

    def _fillers(self, question: Question, left: int, generator: random.Random) -> list[Paragraph]:
        """Hard ones first, then any, as long as they fit."""
        hard = list(question.hard)
        generator.shuffle(hard)
        if generator.random() < FEW_HARD_SHARE:
            hard = hard[: generator.randint(0, FEW_HARD)]
        titles = {one.title for one in question.gold if one.title}
        answer = question.answers[0].lower()
        answer = "" if answer in YES_NO or len(answer) < 4 else answer
        texts = {one.sentences[0] for one in question.gold}
        found: list[Paragraph] = []
        num_missed = 0
        for num_seen, one in enumerate(chain(hard, self._random(generator))):
            if one.title in titles or one.sentences[0] in texts:
                continue
            if num_seen >= len(hard) and answer and answer in " ".join(one.sentences).lower():
                continue
            one = one if question.is_titled else _cut(one, generator)
            cost = self._cost(one)
            if cost > left:
                num_missed += 1
                if num_missed == 4:
                    return found
                continue
            titles.add(one.title)
            texts.add(one.sentences[0])
            left -= cost
            found.append(one)
        return found

    def _random(self, generator: random.Random) -> Iterator[Paragraph]:
        allowed = self._pool.allowed
        for number in generator.sample(allowed, min(len(allowed), MAX_RANDOM)):
            yield self._pool.all[number]

    def _cost(self, paragraph: Paragraph) -> int:
        text = " ".join((paragraph.title, *paragraph.sentences))
        return self._count(text) + HEADING_TOKENS

    def _labelled(
        self, question: Question, order: Sequence[Paragraph], tokens: int, purpose: str
    ) -> Example:
        titled = [one if question.is_titled else replace(one, title="") for one in order]
        passages = tuple(Passage(title=one.title, text=" ".join(one.sentences)) for one in titled)
        is_gold = [any(one is gold for gold in question.gold) for one in order]
        evidence = [
            Evidence(document=place, start=start, end=end, text=passages[place].text[start:end])
            for place, one in enumerate(titled)
            if is_gold[place]
            for start, end in _merged(one)
        ]
        starts = body_starts(passages)
        candidates = [
            (starts[place] + end, _note(one, number), round(rank, 4))
            for place, one in enumerate(titled)
            for number, (_, end) in enumerate(_bounds(one))
            if not (is_gold[place] and number in one.support)
            and (rank := self._rank(question, one, number)) >= LEAST_RANK
        ]
        return Example(
            id=f"{TASK}/{purpose}/{question.id}",
            task=TASK,
            question=question.text,
            answers=question.answers,
            grader="strict",
            documents=passages,
            evidence=tuple(evidence),
            target_tokens=tokens,
            seed=self._seed,
            metadata={"candidates": candidates, "num_candidates": NUM_CANDIDATES},
        )

    def _rank(self, question: Question, paragraph: Paragraph, number: int) -> float:
        sentence = paragraph.sentences[number]
        if self._count(sentence) > MAX_CANDIDATE_TOKENS:
            return 0.0
        return self._pool.rank(question.text, paragraph.title, sentence)


def _cut(paragraph: Paragraph, generator: random.Random) -> Paragraph:
    """One to three sentences of a paragraph, most often its first ones."""
    num = generator.choices((1, 2, 3), (6, 3, 1))[0]
    last = max(0, len(paragraph.sentences) - num)
    first = 0 if generator.random() < 0.7 else generator.randint(0, last)
    return replace(paragraph, title="", sentences=paragraph.sentences[first : first + num])


def _bounds(paragraph: Paragraph) -> list[tuple[int, int]]:
    """Where each sentence stands in the joined text."""
    found, start = [], 0
    for sentence in paragraph.sentences:
        found.append((start, start + len(sentence)))
        start += len(sentence) + 1
    return found


def _merged(paragraph: Paragraph) -> list[tuple[int, int]]:
    """Spans of the supporting sentences; those that follow each other are one."""
    bounds = _bounds(paragraph)
    found: list[tuple[int, int]] = []
    for number in paragraph.support:
        start, end = bounds[number]
        if found and found[-1][1] + 1 == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def _note(paragraph: Paragraph, number: int) -> str:
    """As traces note evidence: with the title where the sentence does not have it."""
    sentence = paragraph.sentences[number]
    title = paragraph.title
    note = f"{title}: {sentence}" if title and title not in sentence else sentence
    return " ".join(note.split())


# --- files ----------------------------------------------------------------------------------------


def lessons(
    examples: Iterable[tuple[Example, Shape]], agent: AgentConfig, tokenizer: Tokenizer
) -> Iterator[str]:
    """Lines of conversations; examples whose memory does not fit are left out."""
    for example, shape in examples:
        config = agent.model_copy(update={"chunk_tokens": shape.chunk_tokens})
        try:
            steps = conversations(example, config=config, tokenizer=tokenizer)
        except TraceRefused:
            continue
        for step in steps:
            yield json.dumps(step.record(), ensure_ascii=False)


def with_shapes(
    questions: Sequence[Question], shapes: Sequence[Shape], writer: Writer, purpose: str
) -> Iterator[tuple[Example, Shape]]:
    """Each question over a text of one of the shapes, in turn."""
    for number, question in enumerate(questions):
        shape = shapes[number % len(shapes)]
        example = writer.example(question, shape.tokens, purpose)
        if example is not None:
            yield example, shape


def generated(
    num_of: dict[str, int], essays: Path, tokenizer: str, seed: int
) -> Iterator[tuple[Example, Shape]]:
    """Examples of generated tasks, of each of the shapes in turn."""
    for name, num in num_of.items():
        for place, shape in enumerate(TASK_SHAPES):
            settings: dict[str, Any] = {
                "tokens": shape.tokens, "tokenizer": tokenizer, "seed": seed + place,
            }  # fmt: skip
            if NEEDLES.get(name, {}).get("haystack") == "essay":
                settings |= {"essays": str(essays), "shift": True}
            task = open_task(name, settings)
            for index in range(place, num, len(TASK_SHAPES)):
                yield task.example(index), shape


def write_lines(path: Path, lines: Iterable[str]) -> int:
    num = 0
    with path.open("w", encoding="utf-8") as file:
        for num, line in enumerate(lines, start=1):  # noqa: B007
            file.write(f"{line}\n")
    return num


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--qa", type=Path, required=True)
    parser.add_argument("--hotpotqa", type=Path, required=True)
    parser.add_argument("--essays", type=Path, help="without them there are no generated tasks")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--limit", type=int, help="questions of each file, to try it out")
    parser.add_argument("--memory-tokens", type=int, default=512)
    parser.add_argument(
        "--rl-share",
        type=float,
        default=RL_SHARE,
        help="share of the HotpotQA questions for reinforcement learning alone",
    )
    arguments = parser.parse_args()
    tokenizer = length_tokenizer(arguments.tokenizer)
    agent = AgentConfig(
        window=4096,
        chunk_tokens=2048,
        memory_tokens=arguments.memory_tokens,
        answer_tokens=64,
        prompts="keep",
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    dev = list(hotpot_questions(arguments.hotpotqa / "dev.jsonl.gz"))
    banned = {one.title for question in dev for one in question.gold}
    paragraphs = [
        Paragraph(title=record["title"], sentences=sentences_of(record))
        for record in read_lines(arguments.qa / "paragraphs.jsonl.gz")
    ]
    pool = Pool(paragraphs, banned=banned)
    generator = random.Random(arguments.seed)

    def taken(questions: Iterable[Question], num: int | None = None) -> list[Question]:
        found = [question for question in questions if is_sound(question)]
        generator.shuffle(found)
        limits = [limit for limit in (num, arguments.limit) if limit is not None]
        return found[: min(limits)] if limits else found

    official = taken(hotpot_questions(arguments.hotpotqa / "train.jsonl.gz"))
    cut = taken(cut_questions(arguments.qa / "hotpotqa_train_halueval.jsonl.gz", pool))
    wiki = taken(other_questions(arguments.qa / "2wiki_train.jsonl.gz", pool, is_titled=True))
    natural = taken(
        other_questions(arguments.qa / "nq_open_gold.jsonl.gz", pool, is_titled=True), NUM_NATURAL
    )
    linked = taken(other_questions(arguments.qa / "iirc.jsonl.gz", pool, is_titled=False), 400)
    parts = {"seed": arguments.seed, "share": arguments.rl_share}
    titled, warm_titled = split([*official, *(one for one in cut if one.is_titled)], **parts)
    plain, warm_plain = split((one for one in cut if not one.is_titled), **parts)
    plain, unused = plain[:MAX_PLAIN], plain[MAX_PLAIN:]
    warm_plain += unused
    long_ones = [*warm_titled, *warm_plain[:NUM_LONG_PLAIN]]
    short_ones = [*warm_plain[NUM_LONG_PLAIN:], *wiki, *natural, *linked]
    check_apart(
        development=dev,
        **{
            "the warm start": [*long_ones, *short_ones],
            "reinforcement learning": [*titled, *plain],
        },
    )
    writer = Writer(pool, tokenizer, arguments.seed)

    long = with_shapes(long_ones, LONG, writer, "long")
    short = with_shapes(short_ones, SHORT, writer, "short")
    out = arguments.out
    num_long = write_lines(out / "lessons_long.jsonl", lessons(long, agent, tokenizer))
    num_short = write_lines(out / "lessons_short.jsonl", lessons(short, agent, tokenizer))
    num_tasks = 0
    if arguments.essays is not None:
        num_of = {name: min(num, arguments.limit or num) for name, num in GENERATED.items()}
        made_up = generated(num_of, arguments.essays, arguments.tokenizer, arguments.seed)
        num_tasks = write_lines(out / "lessons_tasks.jsonl", lessons(made_up, agent, tokenizer))
    for name, some in (("titled", titled), ("plain", plain)):
        made = (example for example, _ in with_shapes(some, [FULL[name]], writer, "train"))
        num = write_examples(out / f"train_{name}.jsonl", made)
        print(f"train_{name}.jsonl: {num} examples")
    print(
        f"lessons_long.jsonl: {num_long}, lessons_short.jsonl: {num_short}, "
        f"lessons_tasks.jsonl: {num_tasks} conversations"
    )


if __name__ == "__main__":
    main()

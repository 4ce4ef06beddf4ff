"""Questions with their paragraphs, from files, and texts around them: for the data of the readers.

    sources = Sources(qa, hotpotqa)                       # sources.pool: paragraphs to fill texts with
    questions = sources.natural()
    Writer(sources.pool, tokenizer, seed=7).example(question, 1000, "short")

QA holds `NAME.jsonl.gz` files, one question a line: `id`, `question`, `answers`, `paragraphs` (each with
`title` and `sentences` or `text`), `supporting` (pairs of title and number of a sentence), and for some
`distractors`, line numbers of `paragraphs.jsonl.gz`. HOTPOTQA holds `train` and `dev` files as HotpotQA publishes them.

Questions whose paragraphs are known only by their supporting sentences get no titles and short distractors:
otherwise their length would give the gold paragraphs away.
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
from heapq import nlargest
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from memagent.agent.prompts import prompts_for
from memagent.config import AgentConfig
from memagent.data.example import Evidence, Example, Passage, body_starts
from memagent.rl.warmstart.traces import (
    Moment,
    TraceRefused,
    collected,
    conversations,
    noted,
    required,
)
from memagent.tokens.tokenizers import Tokenizer

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
    is_spread: bool = False
    """Whether paragraphs that look relevant stand far from each other, all of them, as in a very long text."""


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
        scores: dict[int, float] = defaultdict(float)
        for word in sorted(words(question)):
            holders = self._holders.get(word, [])
            if len(holders) < len(self.all) // 20:
                for number in holders:
                    scores[number] += self.weight(word)
        found = map(self.paragraph, nlargest(3 * num, scores, key=scores.__getitem__))
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
        wording(sentence): (number, place)
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


def wording(text: str) -> str:
    """Letters and digits of a text alone, to compare wordings."""
    return "".join(WORD.findall(text.lower()))


def _whole(paragraph: Paragraph, where: dict[str, tuple[int, int]], pool: Pool) -> Paragraph | None:
    """The paragraph of the pool that holds all sentences of this one."""
    places = [where.get(wording(sentence)) for sentence in paragraph.sentences]
    numbers = {place[0] for place in places if place}
    if None in places or len(numbers) != 1:
        return None
    support = tuple(sorted({place[1] for place in places if place}))
    return replace(pool.all[numbers.pop()], support=support)


def other_questions(path: Path, pool: Pool, *, is_titled: bool) -> Iterator[Question]:
    """Items with their own paragraphs; without distractors, near ones of the pool are used."""
    for item in read_lines(path):
        if not item.get("unanswerable") and item["answers"]:
            yield question_of(item, pool, is_titled=is_titled)


def question_of(item: dict[str, Any], pool: Pool, *, is_titled: bool) -> Question:
    """An item with its own paragraphs, near ones of the pool beside them where it has few others."""
    support: dict[str, set[int]] = defaultdict(set)
    for title, number in item["supporting"]:
        support[title].add(number)
    gold: list[Paragraph] = []
    hard: list[Paragraph] = []
    for record in item["paragraphs"]:
        sentences = sentences_of(record)
        numbers = support.get(record["title"], set()) if "sentences" in record else None
        if numbers is None:
            numbers = _holding(sentences, item["answers"], is_whole=not is_titled)
        kept = tuple(sorted(number for number in numbers if number < len(sentences)))
        title = record["title"] if is_titled else ""
        (gold if kept else hard).append(Paragraph(title=title, sentences=sentences, support=kept))
    answer = item["answers"][0].lower()
    near = () if len(hard) >= 6 else pool.near(item["question"], NUM_HARD)
    titles = {one.title for one in gold}
    hard += [
        one
        for one in near
        if one.title not in titles and answer not in " ".join(one.sentences).lower()
    ]
    return Question(
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


def check_apart(**sets: Iterable[Question]) -> None:
    """Refuse a question that is in two of the sets."""
    seen: dict[str, str] = {}
    for name, questions in sets.items():
        for question in questions:
            other = seen.setdefault(wording(question.text), name)
            if other != name:
                raise SystemExit(
                    f"the question {question.id} is in {other} and in {name}: {question.text}"
                )


class Sources:
    """The questions and paragraphs of the folders QA and HOTPOTQA, those of development apart."""

    def __init__(self, qa: Path, hotpotqa: Path) -> None:
        self.qa, self._hotpotqa = qa, hotpotqa
        self.dev = list(hotpot_questions(hotpotqa / "dev.jsonl.gz"))
        paragraphs = [
            Paragraph(title=record["title"], sentences=sentences_of(record))
            for record in read_lines(qa / "paragraphs.jsonl.gz")
        ]
        banned = {one.title for question in self.dev for one in question.gold}
        self.pool = Pool(paragraphs, banned=banned)

    def official(self) -> Iterator[Question]:
        """HotpotQA's own training questions."""
        return hotpot_questions(self._hotpotqa / "train.jsonl.gz")

    def cut(self) -> Iterator[Question]:
        """Training questions of HotpotQA with paragraphs cut to their supporting sentences."""
        return cut_questions(self.qa / "hotpotqa_train_halueval.jsonl.gz", self.pool)

    def wiki(self) -> Iterator[Question]:
        """2WikiMultihopQA."""
        return other_questions(self.qa / "2wiki_train.jsonl.gz", self.pool, is_titled=True)

    def natural(self) -> Iterator[Question]:
        """Natural Questions."""
        return other_questions(self.qa / "nq_open_gold.jsonl.gz", self.pool, is_titled=True)

    def linked(self) -> Iterator[Question]:
        """IIRC, whose passages often are one sentence."""
        return other_questions(self.qa / "iirc.jsonl.gz", self.pool, is_titled=False)

    def papers(self) -> Iterator[Question]:
        """QASPER."""
        return other_questions(self.qa / "qasper_evidence.jsonl.gz", self.pool, is_titled=True)


def source_options(doc: str | None, *, tokenizer: str | None = None) -> argparse.ArgumentParser:
    """A parser with the options that all scripts have; without a default, the tokenizer must be given."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--qa", type=Path, required=True)
    parser.add_argument("--hotpotqa", type=Path, required=True)
    parser.add_argument("--tokenizer", required=tokenizer is None, default=tokenizer)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--limit", type=int, help="questions of each kind, to try it out")
    return parser


# --- texts ----------------------------------------------------------------------------------------


class Writer:
    """Builds texts for questions."""

    def __init__(
        self,
        pool: Pool,
        tokenizer: Tokenizer,
        seed: int,
        *,
        num_candidates: int = NUM_CANDIDATES,
        max_evidence_tokens: int = MAX_EVIDENCE_TOKENS,
        least_rank: float = LEAST_RANK,
    ) -> None:
        self._pool = pool
        self._least_rank = least_rank
        self._num_candidates = num_candidates
        self._max_evidence_tokens = max_evidence_tokens
        self._count = lru_cache(maxsize=400_000)(tokenizer.count)
        self._seed = seed

    def example(
        self, question: Question, tokens: int, purpose: str, *, is_spread: bool = False
    ) -> Example | None:
        """The question over a text of about so many tokens; None if its evidence does not fit."""
        generator = random.Random(f"{self._seed}/{purpose}/{question.id}")
        gold = list(question.gold)
        left = tokens - sum(map(self._cost, gold))
        evidence = sum(self._count(one.sentences[n]) for one in gold for n in one.support)
        if left < 0 or evidence > self._max_evidence_tokens:
            return None
        others = self._fillers(question, left, generator, all_hard=is_spread)
        order = [*gold, *others]
        generator.shuffle(order)
        if is_spread:
            order = _spread(order, {one.sentences[0] for one in (*gold, *question.hard)}, generator)
        return self._labelled(question, order, tokens, purpose)

    def _fillers(
        self, question: Question, left: int, generator: random.Random, *, all_hard: bool
    ) -> list[Paragraph]:
        """Hard ones first, then any, as long as they fit."""
        hard = list(question.hard)
        generator.shuffle(hard)
        if not all_hard and generator.random() < FEW_HARD_SHARE:
            hard = hard[: generator.randint(0, FEW_HARD)]
        titles = {one.title for one in question.gold if one.title}
        answer = question.answers[0].lower()
        answer = "" if answer in YES_NO or len(answer) < 4 else answer
        texts = {one.sentences[0] for one in question.gold}
        found: list[Paragraph] = []
        num_missed = 0
        for num_seen, one in enumerate(chain(hard, self._others(generator))):
            if (one.title and one.title in titles) or one.sentences[0] in texts:
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

    def _others(self, generator: random.Random) -> Iterator[Paragraph]:
        """Paragraphs after the hard ones."""
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
            and (rank := self._rank(question, one, number)) >= self._least_rank
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
            metadata={"candidates": candidates, "num_candidates": self._num_candidates},
        )

    def _rank(self, question: Question, paragraph: Paragraph, number: int) -> float:
        sentence = paragraph.sentences[number]
        if self._count(sentence) > MAX_CANDIDATE_TOKENS:
            return 0.0
        return self._pool.rank(question.text, paragraph.title, sentence)


def _spread(
    order: Sequence[Paragraph], relevant: set[str], generator: random.Random
) -> list[Paragraph]:
    """The same paragraphs, those whose first sentence is `relevant` at equal distances."""
    chosen = [one for one in order if one.sentences[0] in relevant]
    others = [one for one in order if one.sentences[0] not in relevant]
    step = len(others) / max(1, len(chosen))
    places = [(number + generator.random()) * step for number in range(len(chosen))]
    placed = [*zip(places, chosen, strict=True), *enumerate(others)]
    return [one for _, one in sorted(placed, key=lambda pair: pair[0])]


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
    return titled(paragraph.title, paragraph.sentences[number])


def titled(title: str, text: str) -> str:
    """A note with its title, where the text does not have it."""
    note = f"{title}: {text}" if title and title not in text else text
    return " ".join(note.split())


# --- memories of right replies --------------------------------------------------------------------


class Line(NamedTuple):
    """A line that a memory may keep, and where it ends in the text."""

    end: int
    text: str
    rank: float | None
    """How likely it is to matter; None for evidence."""


def lines_of(example: Example) -> list[Line]:
    """Evidence and candidates of an example; evidence is no candidate."""
    if not example.evidence:
        raise TraceRefused(f"{example.id} has no evidence, so there is no memory to demonstrate")
    notes = [(moment.end, " ".join(moment.memory.split())) for moment in noted(example)]
    places = set(notes)
    candidates = [
        Line(end, text, rank)
        for end, text, rank in required(example, "candidates")
        if (end, text) not in places
    ]
    return [*(Line(end, text, None) for end, text in notes), *candidates]


def with_line(kept: list[Line], line: Line, *, most: int) -> list[Line]:
    """Add a line; only the likeliest `most` candidates stay."""
    kept = [*kept, line]
    ranks = sorted((one.rank for one in kept if one.rank is not None), reverse=True)
    if len(ranks) <= most:
        return kept
    return [one for one in kept if one.rank is None or one.rank > ranks[most]]


def likely(example: Example) -> list[Moment]:
    """Keep evidence and the likeliest other sentences, until all evidence has been read."""
    kept: list[Line] = []
    moments: list[Moment] = []
    num_left = len(example.evidence)
    for line in sorted(lines_of(example)):
        num_left -= line.rank is None
        kept = with_line(kept, line, most=required(example, "num_candidates"))
        if num_left == 0:
            kept = [one for one in kept if one.rank is None]
        moments.append(Moment(line.end, "\n".join(dict.fromkeys(one.text for one in kept))))
        if num_left == 0:
            break
    return moments


def likeliest(example: Example) -> list[Moment]:
    """Keep evidence and the likeliest sentences before its end; nothing is dropped."""
    lines = lines_of(example)
    last = max(line.end for line in lines if line.rank is None)
    candidates = [(line.rank, line) for line in lines if line.rank is not None and line.end < last]
    candidates.sort(reverse=True)
    most = required(example, "num_candidates")
    kept = [line for line in lines if line.rank is None] + [line for _, line in candidates[:most]]
    return collected([Moment(line.end, line.text) for line in sorted(kept)])


# --- files ----------------------------------------------------------------------------------------


def lessons(
    examples: Iterable[tuple[Example, Shape]], agent: AgentConfig, tokenizer: Tokenizer
) -> Iterator[str]:
    """Lines of conversations; examples whose memory does not fit are left out."""
    rules = {TASK: likeliest if prompts_for(agent).replace else likely}
    for example, shape in examples:
        config = agent.model_copy(update={"chunk_tokens": shape.chunk_tokens})
        try:
            steps = conversations(example, config=config, tokenizer=tokenizer, rules=rules)
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
        example = writer.example(question, shape.tokens, purpose, is_spread=shape.is_spread)
        if example is not None:
            yield example, shape


def write_lines(path: Path, lines: Iterable[str]) -> int:
    num = 0
    with path.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(f"{line}\n")
            num += 1
    return num

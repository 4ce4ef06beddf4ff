"""Questions among paragraphs: SQuAD (qa_1) and HotpotQA (qa_2), with paragraphs around the gold ones.

    Document 1:            a paragraph of the same article, or of the question's own context
    Document 2:            any other paragraph
    Document 3:            the gold one  ◀── evidence
    ...

Paragraphs nearest to the question are chosen first; their order in the text is random. The last one is
shortened by words where the length requires it. A pool that is too small is used repeatedly, without the
gold paragraphs; the metadata say how often.

    open_task("ruler/qa_1", {"tokens": 8192})                                  # fetches SQuAD
    open_task("ruler/qa_2", {"tokens": 8192, "questions": "dev.jsonl.gz"})     # a file of yours
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from memagent.data.choices import source_setting
from memagent.data.example import Evidence, Passage, join
from memagent.data.sources.cache import open_source, sha256_of
from memagent.data.sources.readers import (
    HotpotItem,
    SquadItem,
    hotpot_items,
    hotpot_paragraphs,
    squad_items,
)
from memagent.data.tasks.lengths import LEAST_SHARE, fit
from memagent.data.tasks.registry import Draft, GeneratedTask, TaskSettings
from memagent.data.tasks.ruler.haystack import SENTENCE_END
from memagent.errors import DataError

_WORD = re.compile(r"\S+")


class QuestionSettings(TaskSettings):
    """Where the questions come from."""

    questions: str | None = None
    """File of the questions, as published; by default the published one."""


class ParagraphSettings(QuestionSettings):
    """Where the questions and the paragraphs around them come from."""

    paragraphs: str | None = None
    """File of further paragraphs; by default those of all questions in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParagraphQuestion:
    """A question with its gold paragraphs and related ones."""

    id: str
    text: str
    answers: tuple[str, ...]
    gold: tuple[Passage, ...]
    spans: tuple[tuple[int, int, int], ...]
    """Gold paragraph, start and end of each piece of evidence."""
    near: tuple[Passage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSet:
    """All questions of a file, and the paragraphs to put around them."""

    questions: tuple[ParagraphQuestion, ...]
    pool: tuple[Passage, ...]
    sources: dict[str, str]


def open_squad(name: str, settings: dict[str, Any]) -> QuestionTask:
    """The task qa_1."""
    checked = QuestionSettings.parse(settings)
    path = open_source("squad-dev", checked.questions)
    return QuestionTask(name, checked, _squad(path, sha256_of(path)))


def open_hotpot(name: str, settings: dict[str, Any]) -> QuestionTask:
    """The task qa_2."""
    checked = ParagraphSettings.parse(settings)
    path = open_source("hotpotqa-dev", checked.questions)
    pool = path
    if checked.paragraphs is not None:
        pool = open_source("hotpotqa-paragraphs", checked.paragraphs)
    return QuestionTask(name, checked, _hotpot(path, sha256_of(path), pool, sha256_of(pool)))


class QuestionTask(GeneratedTask[QuestionSettings]):
    """Generates questions among paragraphs."""

    def __init__(self, name: str, settings: QuestionSettings, data: QuestionSet) -> None:
        super().__init__(name, settings, data.sources)
        self._pool = data.pool
        self._questions = list(data.questions)
        # neighbours in the file are about the same article; the first few should not be
        self.rng(0, "questions").shuffle(self._questions)
        self.num_available = len(self._questions)

    def draft(self, index: int) -> Draft:
        if index >= len(self._questions):
            raise DataError(
                f"{self.name} has {len(self._questions)} questions; there is none of index {index}"
            )
        question = self._questions[index]
        around = _Around(question, self._pool, self.rng(index, "paragraphs"))
        arranged, is_shortened = self._arranged(question, around)
        documents = _passages(arranged.items)
        number_of = {item.gold: number for number, item in enumerate(arranged.items)}
        evidence = [
            Evidence(
                document=number_of[gold],
                start=start,
                end=end,
                text=question.gold[gold].text[start:end],
            )
            for gold, start, end in question.spans
        ]
        return Draft(
            question=question.text,
            answers=question.answers,
            match="any",
            grader="ruler_part",
            documents=documents,
            num_tokens=arranged.num_tokens,
            evidence=tuple(sorted(evidence, key=lambda item: (item.document, item.start))),
            metadata={
                "source_id": question.id,
                "gold_documents": sorted(number_of[gold] for gold in range(len(question.gold))),
                "num_documents": len(documents),
                "is_one_shortened": is_shortened,
                "pool_rounds": around.rounds(len(documents) - len(question.gold)),
            },
        )

    def _arranged(self, question: ParagraphQuestion, around: _Around) -> tuple[_Arranged, bool]:
        """Paragraphs of the requested length, and whether one of them was shortened."""
        what = f"the gold text of question {question.id}"

        def fitted(arrange: Callable[[int], list[_Placed]], *, is_coarse: bool) -> _Arranged:
            found = fit(
                lambda n: join(_passages(arrange(n))),
                self.tokens,
                self.tokenizer,
                is_coarse=is_coarse,
                what=what,
            )
            return _Arranged(arrange(found.num_units), found.num_units, found.num_tokens)

        whole = fitted(around.arranged, is_coarse=True)
        if whole.num_tokens >= self.tokens * LEAST_SHARE:
            return whole, False
        cut = fitted(lambda n: around.arranged(whole.num_units, num_words=n), is_coarse=False)
        return cut, True


class _Placed(NamedTuple):
    place: float
    """Paragraphs are ordered by this."""
    passage: Passage
    gold: int | None


class _Arranged(NamedTuple):
    items: list[_Placed]
    num_units: int
    num_tokens: int


class _Around:
    """Gold paragraphs with any number of others around them, each at a random place."""

    def __init__(
        self, question: ParagraphQuestion, pool: tuple[Passage, ...], source: random.Random
    ) -> None:
        own = {passage.text for passage in (*question.gold, *question.near)}
        self._source = source
        self._items = [
            _Placed(source.random(), passage, gold) for gold, passage in enumerate(question.gold)
        ]
        self._num_gold = len(self._items)
        self._near = question.near
        self._others = [passage for passage in pool if passage.text not in own]
        source.shuffle(self._others)
        if not self._others and not self._near:
            raise DataError(
                f"there is no paragraph to put around question {question.id}; give more paragraphs"
            )
        self._choice = self._endless()

    def arranged(self, count: int, *, num_words: int = 0) -> list[_Placed]:
        """The gold paragraphs, `count` others, and the first words of the next one, in order."""
        last = self._num_gold + count
        while len(self._items) <= last:
            self._items.append(_Placed(self._source.random(), next(self._choice), None))
        items = self._items[:last]
        if num_words:
            items.append(self._items[last]._replace(passage=_cut(self._items[last], num_words)))
        return sorted(items, key=lambda item: item.place)

    def rounds(self, count: int) -> int:
        """How often the paragraphs of the pool are used, at most."""
        if not self._others:
            return -(-count // len(self._near))
        return max(1, -(-(count - len(self._near)) // len(self._others)))

    def _endless(self) -> Iterator[Passage]:
        yield from self._near
        while True:
            yield from self._others or self._near


def _cut(item: _Placed, num_words: int) -> Passage:
    words = list(_WORD.finditer(item.passage.text))[:num_words]
    return Passage(title=item.passage.title, text=item.passage.text[: words[-1].end()])


def _passages(items: list[_Placed]) -> tuple[Passage, ...]:
    return tuple(item.passage for item in items)


# --- the files ------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _squad(path: Path, sha256: str) -> QuestionSet:
    items = list(squad_items(path))
    articles: dict[str, dict[str, Passage]] = {}
    for item in items:
        articles.setdefault(item.title, {})[item.context] = Passage(text=item.context)
    questions = [_squad_question(item, articles[item.title]) for item in items if item.answers]
    if not questions:
        raise DataError(
            f"{path} holds no question that has an answer; name another file: "
            f"{source_setting('squad-dev')}"
        )
    return QuestionSet(
        questions=tuple(questions),
        pool=tuple({text: p for texts in articles.values() for text, p in texts.items()}.values()),
        sources={"squad-dev": sha256},
    )


def _squad_question(item: SquadItem, article: dict[str, Passage]) -> ParagraphQuestion:
    start = item.answer_starts[0]
    first, last = sentence_around(item.context, start, start + len(item.answers[0]))
    return ParagraphQuestion(
        id=item.id,
        text=item.question.strip(),
        answers=item.answers,
        gold=(article[item.context],),
        spans=((0, first, last),),
        near=tuple(passage for text, passage in article.items() if text != item.context),
    )


def sentence_around(text: str, start: int, end: int) -> tuple[int, int]:
    """The sentence, or sentences, that hold a span; without the space around them."""
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    first = max((place for place in ends if place <= start), default=0)
    last = min((place for place in ends if place >= end), default=len(text))
    sentence = text[first:last]
    return first + len(sentence) - len(sentence.lstrip()), first + len(sentence.rstrip())


@lru_cache(maxsize=1)
def _hotpot(path: Path, sha256: str, pool: Path, pool_sha256: str) -> QuestionSet:
    questions = [_hotpot_question(item) for item in hotpot_items(path) if item.gold_titles]
    if not questions:
        raise DataError(
            f"{path} holds no question with its gold paragraphs; name another file: "
            f"{source_setting('hotpotqa-dev')}"
        )
    sources = {"hotpotqa-dev": sha256}
    return QuestionSet(
        questions=tuple(questions),
        pool=tuple(Passage(title=p.title, text=p.text) for p in hotpot_paragraphs(pool)),
        sources=sources if pool == path else {**sources, "hotpotqa-paragraphs": pool_sha256},
    )


def _hotpot_question(item: HotpotItem) -> ParagraphQuestion:
    paragraphs = {paragraph.title: paragraph for paragraph in reversed(item.context)}
    spans = []
    for number, title in enumerate(item.gold_titles):
        facts = [fact.sentence for fact in item.supporting_facts if fact.title == title]
        # a marked sentence that the file does not keep apart is somewhere in the paragraph
        whole = [(0, len(paragraphs[title].text))]
        places = [paragraphs[title].sentence_span(fact) for fact in facts] or whole
        spans += [(number, start, end) for start, end in dict.fromkeys(places) if end > start]
    passages = {
        title: Passage(title=title, text=paragraph.text) for title, paragraph in paragraphs.items()
    }
    return ParagraphQuestion(
        id=item.id,
        text=item.question.strip(),
        answers=(item.answer,),
        gold=tuple(passages[title] for title in item.gold_titles),
        spans=tuple(spans),
        near=tuple(
            passages[paragraph.title]
            for paragraph in item.context
            if paragraph.title not in item.gold_titles
        ),
    )

"""Warm-start conversations, examples for reinforcement learning and validation files for the 135M reader.

    python -m recipes.prepare_135m --qa QA --hotpotqa HOTPOTQA --squad SQUAD --squad-train TRAIN \
        --pairs PAIRS --books BOOKS --out data/reader_135m --workers 2

QA and HOTPOTQA are the folders that `questions.py` describes, SQUAD is SQuAD 2.0's development file, TRAIN a training file of
SQuAD or a part of it, PAIRS a folder with `src-test.txt` and `tgt-test.txt` of Du et al., Learning to Ask (sentences
of other articles of SQuAD's training file, with their questions), BOOKS a folder of texts. Written are

    OUT/lessons-0.jsonl        conversations written by rule, as `MIXTURE` says; one file for each worker
    OUT/answers-0.jsonl        answers alone, from memories that hold other sentences besides
    OUT/train_natural.jsonl    reinforcement learning: questions of people that are in no lesson
    OUT/train_other.jsonl      reinforcement learning: needles, and archives in the style of `make demo`
    OUT/dev_needles_8k.jsonl   validation: needles, 8,192 tokens
    OUT/dev_squad_12k.jsonl    validation: SQuAD questions among paragraphs of other articles, 12,000 tokens
    OUT/dev_hotpotqa_7k.jsonl  validation: HotpotQA development questions
    OUT/dev_archive.jsonl      validation: questions about invented archives in the style of `make demo`
    OUT/dev_demo.jsonl         validation: the questions of `make demo` and of `benchmarks/small_model.py`

Without SQUAD there are no validation files. No development question of SQuAD or HotpotQA is in a lesson or an example, and
no paragraph of SQuAD's development articles, nor one that supports a development question of HotpotQA; `check_apart` refuses
the questions. The same files and seed give the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, count, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.small_model import FACTS, text_with
from memagent.config import AgentConfig
from memagent.data.example import Evidence, Example, Passage, body_starts
from memagent.data.formats.files import write_examples
from memagent.data.tasks.beyond.facts import NOT_TOLD
from memagent.data.tasks.beyond.filler import sentences as invented_sentences
from memagent.data.tasks.lengths import length_tokenizer
from memagent.data.tasks.registry import open_task
from memagent.documents.sample import town_archive
from memagent.errors import ConfigError
from memagent.tokens.tokenizers import Tokenizer
from recipes.memories import answer_lessons
from recipes.questions import (
    YES_NO,
    Paragraph,
    Pool,
    Question,
    Shape,
    Sources,
    Writer,
    check_apart,
    is_sound,
    lessons,
    read_lines,
    sentences_of,
    source_options,
    wording,
    words,
    write_lines,
)
from recipes.squad import Casing, load_json, paired_questions, squad_paragraphs, squad_questions
from recipes.written import (
    FORBIDDEN,
    Chronicle,
    place_questions,
    relation_questions,
    two_part_questions,
)

MODEL = "smollm2-135m"
READING = AgentConfig(
    window=2048, chunk_tokens=512, memory_tokens=384, answer_tokens=64, prompts="compact_add"
)
"""How the model reads, in training and afterwards."""
NUM_FILLERS = 16_000
"""Different paragraphs that fill texts: fewer compress better."""
NUM_ASKED = 4000
"""Paragraphs that questions are written about by rule; those that ask for two things are rarer, and about all."""
SHARE_YES_NO = 0.25
UNANSWERABLE_SHARE = 0.03
MAX_EVIDENCE_TOKENS = 150
LEAST_RANK = 0.2
"""Share of a question's weight of words that a likely sentence has at least."""
LENGTHS = (
    (0.24, 200, 370),
    (0.45, 380, 500),
    (0.18, 550, 1000),
    (0.09, 1100, 2000),
    (0.04, 2000, 6000),
)
"""Share, least and most tokens of texts around questions."""
SYNTHETIC_LENGTHS = (
    (0.58, 400, 500),
    (0.28, 550, 1200),
    (0.10, 1500, 2500),
    (0.04, 3000, 6000),
)
NEEDLES = (
    *("ruler/niah_single_1", "ruler/niah_single_2", "ruler/niah_single_3"),
    *("ruler/niah_multikey_1", "ruler/niah_multikey_2", "ruler/niah_multikey_3"),
    *("ruler/niah_multivalue", "ruler/niah_multiquery"),
)
SYNTHETIC: dict[str, tuple[int, dict[str, Any]]] = {
    **dict.fromkeys(NEEDLES, (170, {})),
    "ruler/niah_multiquery": (260, {}),
    "ruler/niah_multivalue": (220, {}),
    "ruler/vt": (260, {}),
    "ruler/cwe": (40, {}),
    "ruler/fwe": (60, {}),
    "beyond/two_hop": (200, {"num_candidates": 4}),
    "beyond/corrections": (150, {}),
    "beyond/unanswerable": (200, {"answerable_share": 0.5}),
    "beyond/counting": (100, {"max_events": 6, "num_near_misses": 4}),
    "beyond/injection": (150, {}),
    "beyond/aggregation": (40, {}),
    "beyond/coreference": (40, {}),
}
"""Examples and settings of each generated task."""
LEAST_TOKENS = {"beyond": 600, "ruler/cwe": 1000, "ruler/fwe": 1000}
"""Shorter texts are too short for these."""
MIXTURE = {
    "squad": 4400,
    "squad again": 4400,
    "pairs": 7600,
    "natural": 2600,
    "natural again": 2600,
    "linked": 600,
    "papers": 700,
    "yes or no": 200,
    "relation": 1200,
    "both": 1300,
    "place": 1200,
    "chronicle": 3600,
    "HotpotQA": 1500,
}
"""Questions of each kind, at most."""
NOTED = {"squad": 2, "pairs": 2, "natural": 2, "papers": 2, "HotpotQA": 2, "linked": 1, "place": 1}
"""Likely sentences that are noted besides the evidence, for kinds that have any."""
RL_NUM = {"squad": 700, "natural": 300}
"""Questions that are for reinforcement learning alone."""
RL_TOKENS = 3000
RL_OTHERS = 20
"""Examples of each needle task; as many archives as of all of them."""
MEMORIES = {"squad": 3, "natural": 2, "both": 2}
"""Answers alone: memories of a question, where there are several."""


def drawn_length(rng: random.Random, lengths: Sequence[tuple[float, int, int]]) -> int:
    """Tokens of a text."""
    _, least, most = rng.choices(lengths, [share for share, _, _ in lengths])[0]
    return rng.randint(least, most)


# --- texts ----------------------------------------------------------------------------------------


class FilledWriter(Writer):
    """Builds texts with fillers of a question's own kind."""

    def __init__(self, pool: Pool, tokenizer: Tokenizer, seed: int, **settings: Any) -> None:
        super().__init__(pool, tokenizer, seed, **settings)
        self.fillers: Callable[[random.Random], Iterator[Paragraph]] | None = None

    def _others(self, generator: random.Random) -> Iterator[Paragraph]:
        return super()._others(generator) if self.fillers is None else self.fillers(generator)


def as_prose(example: Example, heading: str = "") -> Example:
    """The documents of an example as paragraphs of one text, without numbers."""
    texts, starts, position = [], [], 0
    for passage in example.passages:
        head = f"{passage.title}\n" if passage.title else ""
        head = f"{heading}\n\n{head}" if heading and not texts else head
        starts.append(position + len(head))
        texts.append(head + passage.text)
        position += len(texts[-1]) + 2
    evidence = []
    for item in example.evidence:
        title, start = example.passages[item.document].title, starts[item.document]
        note = f"{title}: {item.text}" if title and title not in item.text else item.text
        evidence.append(
            replace(item, document=0, start=start + item.start, end=start + item.end, note=note)
        )
    before = body_starts(example.passages)
    candidates = [
        (end - before[number] + starts[number], note, rank)
        for end, note, rank in example.metadata.get("candidates", ())
        for number in (bisect_right(before, end) - 1,)
    ]
    return replace(
        example,
        documents=(Passage(text="\n\n".join(texts)),),
        evidence=tuple(evidence),
        metadata={**example.metadata, "candidates": candidates},
    )


def without_titles(question: Question) -> Question:
    """The question over paragraphs without titles, if its evidence can be understood without."""
    evidence = [one.sentences[number] for one in question.gold for number in one.support]
    if any(one.split()[0] in ("He", "She", "It", "They", "His", "Her") for one in evidence):
        return question
    strip = [
        tuple(replace(one, title="") for one in group) for group in (question.gold, question.hard)
    ]
    return replace(question, gold=strip[0], hard=strip[1])


def unanswered(example: Example) -> Example:
    """The example without the documents that hold its evidence."""
    gone = {item.document for item in example.evidence}
    kept = tuple(one for number, one in enumerate(example.passages) if number not in gone)
    metadata = {**example.metadata, "candidates": []}
    return replace(
        example, id=f"{example.id}/unanswerable", task="beyond/unanswerable", answers=NOT_TOLD,
        documents=kept, evidence=(), metadata=metadata,
    )  # fmt: skip


# --- questions ------------------------------------------------------------------------------------


def best_support(question: Question) -> Question:
    """Only the sentence with an answer that has most of the question's words."""
    if len(question.gold) != 1:
        return question
    [gold] = question.gold
    asked = words(question.text)
    holding = [
        number
        for number, sentence in enumerate(gold.sentences)
        if any(answer.lower() in sentence.lower() for answer in question.answers)
    ]
    if not holding:
        return question
    best = max(holding, key=lambda number: (len(asked & words(gold.sentences[number])), -number))
    answers = [one for one in question.answers if one.lower() in gold.sentences[best].lower()]
    return replace(question, gold=(replace(gold, support=(best,)),), answers=(answers[0],))


def as_written(question: Question) -> Question:
    """The answer with the letters it has in the evidence."""
    evidence = " ".join(one.sentences[number] for one in question.gold for number in one.support)
    match = re.search(re.escape(question.answers[0]), evidence, re.IGNORECASE)
    return replace(question, answers=(match.group(),)) if match else question


def fewer_yes_no(questions: Iterable[Question], rng: random.Random) -> Iterator[Question]:
    """Leave out most questions whose answer is yes or no."""
    for question in questions:
        if (
            not question.answers
            or question.answers[0].lower() not in YES_NO
            or rng.random() < SHARE_YES_NO
        ):
            yield question


def yes_no_questions(path: Path) -> Iterator[Question]:
    """As many with the answer yes as with no."""
    items = list(read_lines(path))
    for answer in YES_NO:
        for item in [one for one in items if one["answers"] == [answer]][
            : MIXTURE["yes or no"] // 2
        ]:
            [record] = item["paragraphs"]
            sentences = sentences_of(record)
            asked = words(item["question"])
            best = max(
                range(len(sentences)), key=lambda number: len(asked & words(sentences[number]))
            )
            gold = Paragraph(title=record["title"], sentences=sentences, support=(best,))
            yield Question(
                id=item["id"], text=item["question"], answers=(answer,), gold=(gold,), hard=(), is_titled=True
            )  # fmt: skip


def paragraphs_of(path: Path) -> list[Paragraph]:
    """The distinct paragraphs of a file of questions."""
    found = {
        record["text"]: Paragraph(title=record["title"], sentences=sentences_of(record))
        for item in read_lines(path)
        for record in item["paragraphs"]
        if "text" in record
    }
    return [one for one in found.values() if one.sentences]


# --- fillers of other kinds -----------------------------------------------------------------------


def pieces(texts: Iterable[str], num_chars: int) -> list[Paragraph]:
    """Texts cut between lines or paragraphs."""
    found = []
    for text in texts:
        part: list[str] = []
        for block in re.split(r"\n\s*\n", text):
            part.append(block.strip("\n"))
            if sum(map(len, part)) >= num_chars:
                found.append(Paragraph(title="", sentences=("\n\n".join(part),)))
                part = []
    return found


def invented(generator: random.Random) -> Iterator[Paragraph]:
    """Paragraphs of invented prose."""
    source = invented_sentences(generator)
    while True:
        yield Paragraph(title="", sentences=tuple(islice(source, generator.randint(3, 7))))


REPEATED = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
    "The train passes. A bird sings. The kettle boils. Someone waits. The street is empty.",
)


def repeated(generator: random.Random) -> Iterator[Paragraph]:
    """The same few sentences, again and again."""
    text = generator.choice(REPEATED)
    while True:
        yield Paragraph(title="", sentences=(" ".join([text] * generator.randint(1, 20)),))


def sampled(paragraphs: Sequence[Paragraph]) -> Callable[[random.Random], Iterator[Paragraph]]:
    """Paragraphs in random order, and without their titles where they are all without."""

    def source(generator: random.Random) -> Iterator[Paragraph]:
        return iter(generator.sample(paragraphs, min(len(paragraphs), 600)))

    return source


def unique(
    source: Callable[[random.Random], Iterator[Paragraph]],
) -> Callable[[random.Random], Iterator[Paragraph]]:
    """At most 400 of an endless source."""
    return lambda generator: islice(source(generator), 400)


# --- validation -----------------------------------------------------------------------------------


def squad_examples(
    path: Path, tokens: int, num: int, tokenizer: Tokenizer, seed: int
) -> Iterator[Example]:
    """Questions over paragraphs of many articles as one text, the question's own article included."""
    articles = load_json(path)["data"]
    contexts = [one["context"] for article in articles for one in article["paragraphs"]]
    questions = [
        (paragraph["context"], question)
        for article in articles
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
        if not question.get("is_impossible") and question["answers"]
    ]
    rng = random.Random(f"{seed}/squad")
    for context, question in rng.sample(questions, num):
        answers = tuple(dict.fromkeys(one["text"] for one in question["answers"]))
        left = tokens - tokenizer.count(context)
        chosen = [context]
        for other in rng.sample(contexts, len(contexts)):
            if other == context or any(
                len(one) > 3 and one.lower() in other.lower() for one in answers
            ):
                continue
            left -= tokenizer.count(other) + 2
            if left < 0:
                break
            chosen.append(other)
        rng.shuffle(chosen)
        text = "\n\n".join(chosen)
        first = question["answers"][0]
        start = text.index(context) + first["answer_start"]
        yield Example(
            id=f"squad/{question['id']}", task="squad", question=question["question"].strip(), answers=answers,
            grader="lenient", documents=(Passage(text=text),), target_tokens=tokens, seed=seed,
            evidence=(Evidence(document=0, start=start, end=start + len(first["text"]), text=first["text"]),),
        )  # fmt: skip


def demo_examples() -> Iterator[Example]:
    """The questions of `make demo` and of `benchmarks/small_model.py`, over their own texts."""
    texts = {"demo": town_archive(), "facts": text_with(FACTS, 50)}
    for name, facts in (("demo", FACTS[:2]), ("facts", FACTS)):
        for number, fact in enumerate(facts):
            place = fact.sentence.lower().index(fact.answer.lower())
            answer = fact.sentence[place : place + len(fact.answer)]
            start = texts[name].index(fact.sentence)
            yield Example(
                id=f"{name}/{number}", task=f"archive_{name}", question=fact.question,
                answers=(answer, "340 crowns") if number == 1 else (answer,), match="all", grader="contains",
                documents=(Passage(text=texts[name]),),
                evidence=(Evidence(document=0, start=start, end=start + len(fact.sentence), text=fact.sentence),),
            )  # fmt: skip


# --- all of it ------------------------------------------------------------------------------------


class Preparation:
    """All sources of lessons."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.shard = 0
        self.tokenizer = length_tokenizer(arguments.tokenizer)
        self.rng = random.Random(arguments.seed)
        self.sources = Sources(arguments.qa, arguments.hotpotqa)
        self.dev, self.pool = self.sources.dev, self.sources.pool
        allowed = [self.pool.all[number] for number in self.pool.allowed]
        self.rng.shuffle(allowed)
        self.wiki, self.asked = allowed[:NUM_FILLERS], allowed[: NUM_FILLERS + 8000]
        self.natural_paragraphs = paragraphs_of(arguments.qa / "nq_open_gold.jsonl.gz")
        self.squad_questions = list(squad_questions(arguments.squad_train))
        casing = Casing(sentence for one in self.pool.all for sentence in one.sentences)
        self.pairs = list(
            paired_questions(
                arguments.pairs / "src-test.txt",
                arguments.pairs / "tgt-test.txt",
                casing,
                known={wording(one.text) for one in self.squad_questions},
            )
        )
        paired = {one.gold[0].sentences: replace(one.gold[0], support=()) for one in self.pairs}
        untitled = [replace(one, title="") for one in (*self.natural_paragraphs, *self.wiki[:2000])]
        self.mixed_paragraphs = [
            *squad_paragraphs(arguments.squad_train), *paired.values(), *untitled[:3000]
        ]  # fmt: skip
        self.paper_paragraphs = paragraphs_of(arguments.qa / "qasper_evidence.jsonl.gz")
        books = [text_of(path)[20_000:320_000] for path in sorted(arguments.books.iterdir())]
        self.essays = arguments.out / "essays"
        self.essays.mkdir(parents=True, exist_ok=True)
        for number, text in enumerate(books[:4]):
            (self.essays / f"{number}.txt").write_text(text, encoding="utf-8")
        code = sorted((Path(__file__).resolve().parents[1] / "src" / "memagent").rglob("*.py"))
        code = [path for path in code if path.name != "sample.py"]  # the text of the demo
        prose = {
            "wiki": sampled(self.wiki),
            "books": sampled(pieces(books, 500)),
            "code": sampled(pieces((path.read_text(encoding="utf-8") for path in code), 400)),
            "invented": unique(invented),
            "repeated": unique(repeated),
        }
        self.kinds = prose
        self.writer = FilledWriter(
            self.pool, self.tokenizer, arguments.seed, max_evidence_tokens=MAX_EVIDENCE_TOKENS, least_rank=LEAST_RANK
        )  # fmt: skip

    def questions(self) -> dict[str, list[Question]]:
        """Questions of each kind that has a file or paragraphs."""
        sources, rng = self.sources, self.rng

        def taken(name: str, questions: Iterable[Question]) -> list[Question]:
            found = [as_written(one) for one in questions if is_sound(one)]
            rng.shuffle(found)
            return found[: min(MIXTURE[name], self.arguments.limit or MIXTURE[name])]

        natural = map(best_support, sources.natural())
        papers = (replace(one, hard=()) for one in map(best_support, sources.papers()))
        hotpot = chain(sources.official(), sources.cut(), sources.wiki())
        relation = [
            one
            for paragraph in self.asked[:NUM_ASKED]
            for one in islice(relation_questions(paragraph), 2)
        ]
        rng.shuffle(relation)
        both = [one for paragraph in self.asked for one in islice(two_part_questions(paragraph), 1)]
        place_rng = random.Random(f"{self.arguments.seed}/place")
        place = [
            one
            for paragraph in self.asked[:NUM_ASKED]
            for one in islice(place_questions(paragraph, place_rng), 1)
        ]
        chronicle = [self._chronicle(number) for number in range(MIXTURE["chronicle"])]
        rng.shuffle(both)
        found = {
            "squad": taken("squad", self.squad_questions),
            "pairs": self.pairs[: min(MIXTURE["pairs"], self.arguments.limit or MIXTURE["pairs"])],
            "both": both[: min(MIXTURE["both"], self.arguments.limit or MIXTURE["both"])],
            "natural": taken("natural", natural),
            "linked": taken("linked", fewer_yes_no(sources.linked(), rng)),
            "papers": taken("papers", fewer_yes_no(papers, rng)),
            "yes or no": list(yes_no_questions(sources.qa / "boolq_train.jsonl.gz"))[
                : self.arguments.limit
            ],
            "relation": taken("relation", relation),
            "place": taken("place", place),
            "chronicle": taken("chronicle", chronicle),
            "HotpotQA": taken("HotpotQA", fewer_yes_no(hotpot, rng)),
        }
        return found

    def reserved(self, questions: dict[str, list[Question]]) -> list[tuple[str, Question]]:
        """Take the questions for reinforcement learning out of the others."""
        found: list[tuple[str, Question]] = []
        for name, num in RL_NUM.items():
            num = min(num, len(questions[name]) // 4)
            found += [(name, one) for one in questions[name][:num]]
            questions[name] = questions[name][num:]
        kept = {wording(one.text) for _, one in found}
        for name, some in questions.items():
            questions[name] = [one for one in some if wording(one.text) not in kept]
        for name in ("squad", "natural"):
            questions[f"{name} again"] = questions[name]
        return found

    def _chronicle(self, number: int) -> Question:
        rng = random.Random(f"{self.arguments.seed}/chronicle/{number}")
        while True:
            question = Chronicle(rng).question(rng.choice((0, 1, 2, 3)))
            text = " ".join(
                [question.text, *(s for p in (*question.gold, *question.hard) for s in p.sentences)]
            ).lower()
            if not any(one in text for one in FORBIDDEN):
                return replace(question, id=f"chronicle/{number}")

    def examples(self, questions: dict[str, list[Question]]) -> Iterator[tuple[Example, Shape]]:
        """Texts around questions."""
        for name, some in questions.items():
            for number, question in enumerate(some):
                if self._is_ours(number):
                    yield from self._example(name, question)

    def _example(self, name: str, question: Question) -> Iterator[tuple[Example, Shape]]:
        rng = random.Random(f"{self.arguments.seed}/{name}/{question.id}")
        tokens = drawn_length(rng, LENGTHS)
        example = self.filled(name, question, tokens, rng)
        if example is None and tokens < READING.chunk_tokens:
            tokens = READING.chunk_tokens
            example = self.filled(name, question, tokens, rng)
        if example is not None:
            shape = Shape(tokens=tokens, chunk_tokens=READING.chunk_tokens)
            yield replace(example, id=f"{name}/{question.id}"), shape

    def filled(
        self, name: str, question: Question, tokens: int, rng: random.Random
    ) -> Example | None:
        """A text of so many tokens around a question, in the form of its kind."""
        kind = name.removesuffix(" again")
        question, heading = self._with_fillers(kind, question, rng)
        is_prose = kind in ("squad", "pairs", "papers", "chronicle") or rng.random() < 0.4
        if is_prose and kind in ("relation", "both", "place", "natural") and rng.random() < 0.5:
            question = without_titles(question)
            if not question.gold[0].title:
                self.writer.fillers = untitled(self.writer.fillers or self.kinds["wiki"])
        example = self.writer.example(question, tokens, name)
        if example is None:
            return None
        candidates = example.metadata["candidates"] if kind in NOTED else []
        noted = {"candidates": candidates, "num_candidates": NOTED.get(kind, 0)}
        example = replace(example, metadata=noted)
        can_miss = kind not in ("yes or no", "HotpotQA", "linked", "pairs")
        if can_miss and rng.random() < UNANSWERABLE_SHARE and len(example.passages) > 1:
            example = unanswered(example)
        return as_prose(example, heading) if is_prose else example

    def _with_fillers(
        self, kind: str, question: Question, rng: random.Random
    ) -> tuple[Question, str]:
        """Sets what texts around a question of this kind are filled with; the question, and a heading."""
        self.writer.fillers = self.kinds["wiki"]
        if kind in ("squad", "pairs"):
            self.writer.fillers = sampled(self.mixed_paragraphs)
        elif kind == "natural":
            mixed = [*self.natural_paragraphs, *self.wiki[: len(self.natural_paragraphs)]]
            self.writer.fillers = sampled(mixed)
        elif kind == "papers":
            self.writer.fillers = untitled(sampled(self.paper_paragraphs))
            return bare_titles(question), ""
        elif kind == "chronicle":
            fillers = rng.choices(("chronicle", *self.kinds), (9, 2, 2, 2, 2, 1))[0]
            place = Chronicle(random.Random(f"{self.arguments.seed}/{question.id}/place"))
            self.writer.fillers = self.kinds.get(fillers) or unique(
                lambda _: clean(place.entries())
            )
            return question, place.heading if rng.random() < 0.5 else ""
        elif kind in ("relation", "both", "place") and rng.random() < 0.6:
            return self._with_near(question, rng.randint(2, 10)), ""
        return question, ""

    def _with_near(self, question: Question, num: int) -> Question:
        """The question with paragraphs of similar words as misleading ones."""
        answer, title = question.answers[0].lower(), question.gold[0].title
        hard = tuple(
            one
            for one in self.pool.near(question.text, num)
            if one.title != title and answer not in " ".join(one.sentences).lower()
        )
        return replace(question, hard=hard)

    def answered(self, questions: dict[str, list[Question]]) -> Iterator[tuple[Example, Shape]]:
        """Examples for answers alone."""
        shape = Shape(tokens=READING.chunk_tokens, chunk_tokens=READING.chunk_tokens)
        for name, some in questions.items():
            if name == "pairs" or name.endswith(" again"):
                continue
            for number, question in enumerate(some):
                for place in range(MEMORIES.get(name, 1) if self._is_ours(number) else 0):
                    purpose = f"answer-{place}/{name}"
                    rng = random.Random(f"{self.arguments.seed}/{purpose}/{question.id}")
                    asked, _ = self._with_fillers(name, question, rng)
                    example = self.writer.example(asked, shape.tokens, purpose)
                    if example is not None:
                        yield replace(example, id=f"{purpose}/{question.id}"), shape

    def generated(self) -> Iterator[tuple[Example, Shape]]:
        """Examples of the generated tasks."""
        for name, (num, settings) in SYNTHETIC.items():
            lengths = random.Random(f"{self.arguments.seed}/{name}")
            for number in range(min(num, self.arguments.limit or num)):
                tokens = drawn_length(lengths, SYNTHETIC_LENGTHS)
                tokens = max(
                    tokens, LEAST_TOKENS.get(name.partition("/")[0], 0), LEAST_TOKENS.get(name, 0)
                )
                if not self._is_ours(number):
                    continue
                tokens = tokens // 50 * 50
                essays = {"essays": str(self.essays), "shift": True} if name in NEEDLES else {}
                if name in NEEDLES and lengths.random() < 0.2:
                    essays = (
                        {"haystack": "repeat"}
                        if "multikey_2" not in name and "multikey_3" not in name
                        else {}
                    )
                values = {
                    "tokens": tokens,
                    "seed": 1_000_000 + number,
                    "tokenizer": self.arguments.tokenizer,
                }
                task = open_task(name, {**values, **essays, **settings})
                try:
                    example = task.example(number)
                except ConfigError:  # the task has no text of this length
                    continue
                yield (
                    replace(example, id=f"{name}/{number}"),
                    Shape(tokens=tokens, chunk_tokens=READING.chunk_tokens),
                )

    def write(self, questions: dict[str, list[Question]], shard: int) -> None:
        """Write the lessons of one worker."""
        self.shard = shard
        examples = chain(self.generated(), self.examples(questions))
        path = self.arguments.out / f"lessons-{shard}.jsonl"
        num = write_lines(path, with_answers(lessons(examples, READING, self.tokenizer)))
        alone = answer_lessons(self.answered(questions), READING, self.arguments.seed)
        num_alone = write_lines(self.arguments.out / f"answers-{shard}.jsonl", alone)
        print(f"{path.name}: {num} conversations, {num_alone} answers alone", flush=True)

    def write_training(self, questions: list[tuple[str, Question]]) -> None:
        """Write the examples of reinforcement learning."""
        made = (
            self.filled(name, one, RL_TOKENS, random.Random(f"rl/{one.id}"))
            for name, one in questions
        )
        natural = (replace(one, metadata={}) for one in made if one is not None and one.evidence)
        out = self.arguments.out
        write_examples(out / "train_natural.jsonl", natural)
        num = min(RL_OTHERS, self.arguments.limit or RL_OTHERS)
        needles = self._needles(RL_TOKENS, num, 3_000_000)
        archives = islice(self._archives("rl"), num * len(NEEDLES))
        write_examples(out / "train_other.jsonl", chain(needles, archives))

    def _needles(self, tokens: int, num: int, seed: int) -> Iterator[Example]:
        for name in NEEDLES:
            values = {"tokens": tokens, "seed": seed, "tokenizer": self.arguments.tokenizer}
            task = open_task(name, {**values, "essays": str(self.essays), "shift": True})
            yield from (replace(task.example(number), origin=None) for number in range(num))

    def _archives(self, purpose: str) -> Iterator[Example]:
        """Questions about invented archives, in texts of the same style."""
        for number in count():
            place = Chronicle(random.Random(f"{self.arguments.seed}/{purpose}/{number}"))
            question = place.question(3)
            self.writer.fillers = unique(lambda _, place=place: clean(place.entries()))  # type: ignore[misc]
            example = self.writer.example(question, 4000, purpose)
            if example is not None:
                example = replace(example, metadata={}, id=f"{purpose}/{number}", task="archive")
                yield as_prose(example, place.heading)

    def _is_ours(self, number: int) -> bool:
        return number % self.arguments.workers == self.shard

    def validation(self) -> None:
        """Write the validation files."""
        out, seed = self.arguments.out, self.arguments.seed
        write_examples(out / "dev_needles_8k.jsonl", self._needles(8192, 5, 77))
        squad = squad_examples(self.arguments.squad, 12_000, 100, self.tokenizer, seed)
        write_examples(out / "dev_squad_12k.jsonl", squad)
        dev = [one for one in self.dev if is_sound(one)]
        random.Random(seed).shuffle(dev)
        writer = Writer(self.pool, self.tokenizer, seed)
        hotpot = (writer.example(one, 7000, "dev") for one in dev[:60])
        write_examples(
            out / "dev_hotpotqa_7k.jsonl", islice((one for one in hotpot if one is not None), 50)
        )
        write_examples(out / "dev_archive.jsonl", islice(self._archives("archive"), 40))
        write_examples(out / "dev_demo.jsonl", demo_examples())


def untitled(
    source: Callable[[random.Random], Iterator[Paragraph]],
) -> Callable[[random.Random], Iterator[Paragraph]]:
    """The same paragraphs without their titles."""
    return lambda draw: (replace(one, title="") for one in source(draw))


def with_answers(lines: Iterable[str]) -> Iterator[str]:
    """Lessons without the answers of questions whose answer is not known."""
    for line in lines:
        if '\\\\boxed{}"' not in line:
            yield line


def bare_titles(question: Question) -> Question:
    """The question over paragraphs that have no titles."""
    gold, hard = (
        tuple(replace(one, title="") for one in group) for group in (question.gold, question.hard)
    )
    return replace(question, gold=gold, hard=hard)


def clean(entries: Iterator[Paragraph]) -> Iterator[Paragraph]:
    """Entries without words of the demo."""
    for one in entries:
        if not any(word in " ".join(one.sentences).lower() for word in FORBIDDEN):
            yield one


def text_of(path: Path) -> str:
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return file.read()
    return path.read_text(encoding="utf-8")


def main() -> None:
    parser = source_options(__doc__, tokenizer=MODEL)
    parser.add_argument("--squad", type=Path)
    parser.add_argument("--squad-train", type=Path, required=True)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2, help="processes, each with its own file")
    arguments = parser.parse_args()
    preparation = Preparation(arguments)
    if arguments.squad is not None:
        preparation.validation()
    questions = preparation.questions()
    training = preparation.reserved(questions)
    check_apart(
        development=preparation.dev,
        training=[one for _, one in training],
        lessons=chain(*questions.values()),
    )
    preparation.write_training(training)
    for name, some in questions.items():
        print(f"{name}: {len(some)} questions", flush=True)
    context = get_context("fork")  # the questions and paragraphs are shared
    workers = [
        context.Process(target=preparation.write, args=(questions, shard))
        for shard in range(arguments.workers)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit("a worker failed")


if __name__ == "__main__":
    main()

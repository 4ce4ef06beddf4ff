"""Answers from a memory alone: lessons and tasks whose memories look like those that long texts leave.

    writer.example ─▶ example with evidence and likely sentences ─┬─▶ answer_lessons   evidence among other sentences
                                                                  └─▶ fact_lessons     with the facts before the answer
    question, paragraphs of others ─▶ Composer ─▶ tasks for reinforcement learning, and to measure answers by

A task of a memory (`metadata.memory`) is one short call instead of a reading (`reader_1.5b/agent.py`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import nlargest

from memagent.agent.prompts import open_prompts
from memagent.config import AgentConfig
from memagent.data.example import Example, body_starts
from memagent.rl.warmstart.conversations import Conversation
from memagent.rl.warmstart.traces import answer_of
from memagent.tokens.tokenizers import Tokenizer
from memagent.types import Message
from recipes.questions import SENTENCE, YES_NO, Paragraph, Pool, Question, Shape, titled

WHOLE_SHARE, MAX_OTHERS = 0.4, 5
"""Lessons of answers alone: how often the memory holds whole paragraphs, and other sentences, at most."""
PARTIAL_SHARE, UNRELATED_SHARE, MAX_LIKELY, MAX_UNRELATED = 0.25, 0.3, 8, 4
"""Lessons that name facts before the answer: how often evidence without the answer is missing from the memory, how often
sentences are in it that have nothing to do with the question, and how many likely and unrelated ones, at most."""
MAX_NOTED_TOKENS, MAX_SENTENCE_TOKENS = 400, 90
"""Composed memories: tokens of evidence at most, and of a sentence that is noted in vain."""
MISSING_SHARE = 0.15
"""How often a composed memory lacks evidence that does not hold the answer."""
NUM_NEAR, NEAR_WEIGHTS = ((0, 0), (1, 3), (4, 8), (9, 16)), (4, 8, 5, 3)
"""How many sentences of the question's own misleading paragraphs are noted, and how often each of these ranges is drawn."""
NUM_FAR, FAR_WEIGHTS = ((0, 0), (1, 6), (7, 16)), (5, 4, 2)
"""The same of sentences of other paragraphs with words of the question, as texts of millions of tokens hold them."""
NEAREST_SHARE = 0.6
"""How often the sentence of a misleading paragraph is the one nearest to the question, instead of its first one."""
NUM_POOLED = 24
"""Paragraphs of the pool with words of the question that far sentences are drawn from."""


def answer_lessons(
    examples: Iterable[tuple[Example, Shape]], agent: AgentConfig, seed: int
) -> Iterator[str]:
    """Lines of conversations that answer from a memory with more than the evidence in it."""
    prompts = open_prompts(agent.prompts)
    for example, _ in examples:
        generator = random.Random(f"{seed}/answers/{example.id}")
        memory = _noisy_memory(example, generator)
        yield _answer_line(example, memory, answer_of(example, memory, prompts), agent)


def fact_lessons(
    examples: Iterable[tuple[Example, Shape]], agent: AgentConfig, tokenizer: Tokenizer, seed: int
) -> Iterator[str]:
    """The same with replies that repeat the facts of the memory that tell the answer, and then answer.

    The fact with the answer comes last. Memories look like those of very long texts: many lines are likely and wrong.
    """
    prompts = open_prompts(agent.prompts)
    for example, _ in examples:
        generator = random.Random(f"{seed}/facts/{example.id}")
        facts = _facts(example, generator)
        others = _other_lines(example, generator)
        while others and tokenizer.count("\n".join((*facts, *others))) > agent.memory_tokens:
            others.pop()
        lines = list(dict.fromkeys((*facts, *others)))
        generator.shuffle(lines)
        memory = "\n".join(lines)
        reply = "\n".join((*facts, answer_of(example, memory, prompts)))
        yield _answer_line(example, memory, reply, agent)


class Composer:
    """Composes memories of questions: evidence, and sentences noted in vain."""

    def __init__(self, pool: Pool, tokenizer: Tokenizer, memory_tokens: int) -> None:
        self._pool, self._memory_tokens = pool, memory_tokens
        self._count = lru_cache(maxsize=400_000)(tokenizer.count)
        self._far_of: dict[str, list[str]] = {}

    def task(self, question: Question, purpose: str, generator: random.Random) -> Example | None:
        """The question over a memory as a long text leaves it; None if the evidence is too long or does not tell."""
        gold = self._evidence(question, generator)
        if sum(map(self._count, gold)) > MAX_NOTED_TOKENS:
            return None
        near = self._drawn(NUM_NEAR, NEAR_WEIGHTS, self._near(question, generator), generator)
        far = self._drawn(NUM_FAR, FAR_WEIGHTS, self._far(question), generator)
        found = self._composed(question, purpose, gold, [*near, *far], generator)
        return found if holds_answer(found, found.metadata["memory"]) else None

    def dev_task(self, question: Question, purpose: str, *, num_near: int, num_far: int) -> Example:
        """The question over all of its evidence, the nearest sentences of its other paragraphs, and far ones."""
        gold = [_noted(one, one.support) for one in question.gold]
        others = [*self._nearest(question)[:num_near], *self._far(question)[:num_far]]
        return self._composed(question, purpose, gold, others, random.Random(question.id))

    def _composed(
        self,
        question: Question,
        purpose: str,
        gold: list[str],
        others: list[str],
        generator: random.Random,
    ) -> Example:
        """The question over a memory of these lines in any order; others as long as they fit."""
        left = self._memory_tokens - sum(self._count(line) + 1 for line in gold)
        kept = []
        for line in others:
            if (left := left - self._count(line) - 1) >= 0:
                kept.append(line)
        lines = list(dict.fromkeys((*gold, *kept)))
        generator.shuffle(lines)
        return Example(
            id=f"memory/{purpose}/{question.id}",
            task=f"answers_{purpose}",
            question=question.text,
            answers=question.answers,
            grader="strict",
            documents=(),
            metadata={"memory": "\n".join(lines)},
        )

    def _evidence(self, question: Question, generator: random.Random) -> list[str]:
        """Lines of the evidence: sentences, or the whole of a paragraph; now and then only those with the answer."""
        notes = []
        for one in question.gold:
            is_whole = generator.random() < WHOLE_SHARE / 2
            notes.append(_noted(one, range(len(one.sentences)) if is_whole else one.support))
        answer = question.answers[0].lower()
        telling = [note for note in notes if answer in note.lower()]
        return telling if telling and generator.random() < MISSING_SHARE else notes

    def _near(self, question: Question, generator: random.Random) -> list[str]:
        """A sentence of each misleading paragraph: the one nearest to the question, or the first."""
        found = []
        for one in question.hard:
            is_nearest = generator.random() < NEAREST_SHARE
            number = max(range(len(one.sentences)), key=lambda n: self._rank(question, one, n))
            found.append(_noted(one, [number if is_nearest else 0]))
        generator.shuffle(found)
        return self._short(found)

    def _nearest(self, question: Question) -> list[str]:
        """Sentences of misleading paragraphs, the nearest to the question first."""
        ranked = sorted(
            (-self._rank(question, one, number), _noted(one, [number]))
            for one in question.hard
            for number in range(len(one.sentences))
        )
        return self._short([text for _, text in ranked])

    def _far(self, question: Question) -> list[str]:
        """The nearest sentence of paragraphs of other texts, which do not hold the answer; found once for each question."""
        if (known := self._far_of.get(question.id)) is not None:
            return known
        own = {one.title for one in (*question.gold, *question.hard)}
        answer = question.answers[0].lower()
        found = []
        for one in self._pool.near(question.text, NUM_POOLED):
            if one.title not in own and answer not in " ".join(one.sentences).lower():
                number = max(range(len(one.sentences)), key=lambda n: self._rank(question, one, n))
                found.append(_noted(one, [number]))
        return self._far_of.setdefault(question.id, self._short(found))

    def _short(self, notes: list[str]) -> list[str]:
        return [note for note in notes if self._count(note) <= MAX_SENTENCE_TOKENS]

    def _rank(self, question: Question, paragraph: Paragraph, number: int) -> float:
        return self._pool.rank(question.text, paragraph.title, paragraph.sentences[number])

    @staticmethod
    def _drawn(
        ranges: Sequence[tuple[int, int]],
        weights: Sequence[int],
        notes: list[str],
        generator: random.Random,
    ) -> list[str]:
        least, most = generator.choices(ranges, weights)[0]
        return generator.sample(notes, min(len(notes), generator.randint(least, most)))


def _noted(paragraph: Paragraph, numbers: Iterable[int]) -> str:
    """Sentences of a paragraph on a line, as readers note them."""
    return titled(paragraph.title, " ".join(paragraph.sentences[number] for number in numbers))


def answer_line(example: Example, agent: AgentConfig) -> str:
    """The line of a conversation that answers from the memory of a task."""
    memory = example.metadata["memory"]
    reply = answer_of(example, memory, open_prompts(agent.prompts))
    return _answer_line(example, memory, reply, agent)


def memory_task(example: Example, memory: str) -> Example:
    """The question of an example, over a memory instead of its text."""
    return replace(
        example,
        id=f"{example.id}/memory",
        documents=(),
        evidence=(),
        target_tokens=None,
        num_tokens=None,
        text_sha256="",
        metadata={"memory": memory},
    )


def holds_answer(example: Example, memory: str) -> bool:
    """Whether the answer can be known from a memory: it is there, or it is yes or no."""
    answer = example.answers[0].lower()
    return bool(memory.strip()) and (answer in YES_NO or answer in memory.lower())


def _answer_line(example: Example, memory: str, reply: str, agent: AgentConfig) -> str:
    messages = open_prompts(agent.prompts).answer_messages(
        question=example.question, memory=memory, num_sections=1, answer_tokens=agent.answer_tokens
    )
    said: Message = {"role": "assistant", "content": reply}
    lesson = Conversation(
        id=example.id, messages=(*messages, said), task=example.task, step=0, kind="answer"
    )
    return json.dumps(lesson.record(), ensure_ascii=False)


def _facts(example: Example, generator: random.Random) -> list[str]:
    """The evidence as it is noted, that with the answer last; now and then only that with the answer."""
    noted = [titled(example.passages[item.document].title, item.text) for item in example.evidence]
    answer = example.answers[0].lower()
    telling = [note for note in noted if answer in note.lower()]
    rest = [note for note in noted if note not in telling]
    is_partial = generator.random() < PARTIAL_SHARE
    return list(dict.fromkeys(telling if telling and is_partial else rest + telling))


def _other_lines(example: Example, generator: random.Random) -> list[str]:
    """Likely sentences, the likeliest ones most often, and some that have nothing to do with the question."""
    candidates = nlargest(
        2 * MAX_LIKELY, example.metadata["candidates"], key=lambda one: float(one[2])
    )
    likely = [text for _, text, _ in candidates]
    found = generator.sample(likely, min(len(likely), generator.randint(0, MAX_LIKELY)))
    if generator.random() < UNRELATED_SHARE:
        gold = {item.document for item in example.evidence}
        free = [one for place, one in enumerate(example.passages) if place not in gold]
        num = min(len(free), generator.randint(1, MAX_UNRELATED))
        found += [
            titled(one.title, SENTENCE.split(one.text)[0]) for one in generator.sample(free, num)
        ]
    generator.shuffle(found)
    return found


def _noisy_memory(example: Example, generator: random.Random) -> str:
    """The evidence, or the whole of its paragraphs, among other sentences, in the order of the text."""
    starts = body_starts(example.passages)
    is_whole = generator.random() < WHOLE_SHARE
    noted: dict[tuple[int, int], str] = {}
    for item in example.evidence:
        passage = example.passages[item.document]
        text = passage.text if is_whole else item.text
        place = (starts[item.document], 0 if is_whole else item.start)
        noted[place] = titled(passage.title, text)
    candidates = [(end, text) for end, text, _ in example.metadata["candidates"]]
    others = generator.sample(candidates, min(len(candidates), generator.randint(0, MAX_OTHERS)))
    lines = [(sum(place), text) for place, text in noted.items()] + others
    return "\n".join(dict.fromkeys(text for _, text in sorted(lines)))

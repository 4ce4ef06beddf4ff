"""Answers from a memory alone: lessons and tasks whose memories look like those that long texts leave.

    writer.example ─▶ example with evidence and likely sentences ─┬─▶ answer_lessons   evidence among other sentences
                                                                  ├─▶ fact_lessons     with the facts before the answer
                                                                  └─▶ memory_tasks     tasks for reinforcement learning

A task of a memory (`metadata.memory`) is one short call instead of a reading (`reader_1.5b/agent.py`).
"""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace
from heapq import nlargest

from questions import SENTENCE, YES_NO, Shape, titled

from memagent.agent.evidence.answers import with_ledger
from memagent.agent.evidence.ledger import ledger_of
from memagent.agent.evidence.paragraphs import show_paragraphs
from memagent.agent.evidence.quotes import place_copies
from memagent.agent.prompts import open_prompts
from memagent.config import AgentConfig
from memagent.data.example import Example, Passage, body_starts
from memagent.documents.document import Document
from memagent.documents.tokenizers import Tokenizer
from memagent.rl.warmstart.conversations import Conversation
from memagent.rl.warmstart.traces import answer_of
from memagent.types import Message

WHOLE_SHARE, MAX_OTHERS = 0.4, 5
"""Lessons of answers alone: how often the memory holds whole paragraphs, and other sentences, at most."""
PARTIAL_SHARE, UNRELATED_SHARE, MAX_LIKELY, MAX_UNRELATED = 0.25, 0.3, 8, 4
"""Lessons that name facts before the answer: how often evidence without the answer is missing from the memory, how often
sentences are in it that have nothing to do with the question, and how many likely and unrelated ones, at most."""
MAX_NOTED, NUM_SENTENCES, SENTENCE_WEIGHTS = 6, (1, 2, 3, 4), (4, 3, 2, 1)
"""Tasks of memories: how many misleading paragraphs are noted at most, and how much of each."""
BEGINNING_SHARE, BARE_SHARE = 0.3, 0.2
"""Where paragraphs stand beside the memory: how often other sentences than the evidence are noted of its paragraphs, and how often
there are no paragraphs after all."""


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


def memory_tasks(
    examples: Iterable[tuple[Example, Shape]], agent: AgentConfig, tokenizer: Tokenizer, seed: int
) -> Iterator[Example]:
    """Questions over memories with the evidence and likely paragraphs, or parts of them, in any order.

    Evidence without the answer is missing now and then, as readers miss it. With `paragraph_tokens` most memories come with the
    paragraphs of their lines, as the reader shows them to an answer.
    """
    for example, _ in examples:
        generator = random.Random(f"{seed}/memory/{example.id}")
        has_paragraphs = agent.paragraph_tokens > 0 and generator.random() >= BARE_SHARE
        is_vague = has_paragraphs and generator.random() < BEGINNING_SHARE
        noted = _gold_beginnings if is_vague else _gold_notes
        notes, others = noted(example, generator), _likely_notes(example, generator)
        while others and tokenizer.count("\n".join((*notes, *others))) > agent.memory_tokens:
            others.pop()
        lines = list(dict.fromkeys((*notes, *others)))
        generator.shuffle(lines)
        memory = "\n".join(lines)
        if tokenizer.count(memory) > agent.memory_tokens:
            continue
        if has_paragraphs:
            memory = with_paragraphs(example, memory, agent, tokenizer)
        if holds_answer(example, memory):
            yield memory_task(example, memory)


def with_paragraphs(example: Example, memory: str, agent: AgentConfig, tokenizer: Tokenizer) -> str:
    """A memory with the paragraphs of its lines, as they stand in the prompt of an answer."""
    document = Document.from_text(example.text())
    quotes = place_copies(memory, document, start=0, section=document.text)
    paragraphs = show_paragraphs(
        ledger_of(quotes),
        document.text,
        example.question,
        tokenizer,
        memory=memory,
        max_tokens=agent.paragraph_tokens,
    )
    return with_ledger(memory, paragraphs)


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


def _gold_notes(example: Example, generator: random.Random) -> list[str]:
    """The paragraphs with evidence, whole or the evidence alone; now and then only those with the answer."""
    is_whole = generator.random() < WHOLE_SHARE
    parts: dict[int, list[str]] = {}
    for item in example.evidence:
        parts.setdefault(item.document, []).append(item.text)
    notes = [
        titled(
            example.passages[place].title,
            example.passages[place].text if is_whole else " ".join(texts),
        )
        for place, texts in parts.items()
    ]
    answer = example.answers[0].lower()
    telling = [note for note in notes if answer in note.lower()]
    return telling if telling and generator.random() < PARTIAL_SHARE else notes


def _gold_beginnings(example: Example, generator: random.Random) -> list[str]:
    """The first sentences of the paragraphs with evidence, whether it is among them or not."""
    places = dict.fromkeys(item.document for item in example.evidence)
    return [_beginning(example.passages[place], generator) for place in places]


def _likely_notes(example: Example, generator: random.Random) -> list[str]:
    """The first sentences of likely paragraphs without evidence."""
    gold = {item.document for item in example.evidence}
    starts = body_starts(example.passages)
    ranks: dict[int, float] = {}
    for end, _, rank in example.metadata["candidates"]:
        place = bisect_right(starts, end - 1) - 1
        ranks[place] = max(float(rank), ranks.get(place, 0.0))
    likely = nlargest(2 * MAX_NOTED, ranks.keys() - gold, key=lambda place: (ranks[place], place))
    num = min(len(likely), generator.randint(0, MAX_NOTED))
    return [
        _beginning(example.passages[place], generator) for place in generator.sample(likely, num)
    ]


def _beginning(passage: Passage, generator: random.Random) -> str:
    num = generator.choices(NUM_SENTENCES, SENTENCE_WEIGHTS)[0]
    return titled(passage.title, " ".join(SENTENCE.split(passage.text)[:num]))


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

"""Questions that people wrote about Wikipedia paragraphs: SQuAD's training file, and sentences with their questions.

    squad_questions(path)                          train-v1.1.json: questions with answers
    paired_questions(sources, asked, casing)       src-*.txt and tgt-*.txt of Du et al., Learning to Ask: no answers

The pairs are lower-cased and split into words there; `Casing` and `joined` restore how text is written.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from recipes.questions import SENTENCE, Paragraph, Question, wording

NUM_NEAR = 4
"""Other paragraphs of the same article that a question's text may hold."""
PER_PARAGRAPH = 5
"""Sentences of a paragraph made of paired sentences."""


def load_json(path: Path) -> Any:
    """A JSON file, compressed or not."""
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)


def squad_questions(path: Path) -> Iterator[Question]:
    """Answered questions whose answer stands within one sentence."""
    for article in load_json(path)["data"]:
        paragraphs = [_sentences(one["context"]) for one in article["paragraphs"]]
        for number, one in enumerate(article["paragraphs"]):
            others = [each for place, each in enumerate(paragraphs) if place != number]
            for asked in one["qas"]:
                question = _question(asked, one["context"], paragraphs[number], others)
                if question is not None:
                    yield question


def squad_paragraphs(path: Path) -> list[Paragraph]:
    """All paragraphs of the file, without titles."""
    return [
        Paragraph(title="", sentences=_sentences(one["context"]))
        for article in load_json(path)["data"]
        for one in article["paragraphs"]
    ]


def _sentences(context: str) -> tuple[str, ...]:
    return tuple(one for one in SENTENCE.split(context.strip()) if one)


def _question(
    asked: dict[str, Any], context: str, sentences: tuple[str, ...], others: list[tuple[str, ...]]
) -> Question | None:
    if asked.get("is_impossible") or not asked["answers"]:
        return None
    answer = asked["answers"][0]
    start, text = answer["answer_start"], answer["text"].strip()
    position = 0
    for number, sentence in enumerate(sentences):
        place = context.index(sentence, position)
        position = place + len(sentence)
        if place <= start and start + len(text) <= position:
            rng = random.Random(asked["id"])
            near = rng.sample(others, min(len(others), NUM_NEAR))
            return Question(
                id=f"squad/{asked['id']}", text=asked["question"].strip(), answers=(text,),
                gold=(Paragraph(title="", sentences=sentences, support=(number,)),),
                hard=tuple(Paragraph(title="", sentences=one) for one in near), is_titled=True,
            )  # fmt: skip
    return None


# --- sentences with their questions ---------------------------------------------------------------

OPENING, CLOSING = re.compile(r"([(\[“]) "), re.compile(r" ([,.;:?!)\]”%]|'s\b|n't\b|'(?= ))")
SPOKEN = {
    "-lrb-": "(",
    "-rrb-": ")",
    "-lsb-": "[",
    "-rsb-": "]",
    "``": "“",
    "''": "”",
    "--": "\u2013",
}


class Casing:
    """How words are most often written within sentences."""

    def __init__(self, sentences: Iterable[str]) -> None:
        counts: dict[str, Counter[str]] = {}
        for sentence in sentences:
            for word in sentence.split()[1:]:
                bare = word.strip(",.;:()\"'")
                counts.setdefault(bare.lower(), Counter())[bare] += 1
        self._written = {word: forms.most_common(1)[0][0] for word, forms in counts.items()}

    def restored(self, text: str) -> str:
        """A lower-cased text of words with spaces between them, as a sentence."""
        words = [SPOKEN.get(word) or self._written.get(word, word) for word in text.split()]
        said = joined(words)
        return said[:1].upper() + said[1:]


def joined(words: Sequence[str]) -> str:
    """Words and marks as text is written."""
    return CLOSING.sub(r"\1", OPENING.sub(r"\1", " ".join(words)))


def paired_questions(
    sources: Path, asked: Path, casing: Casing, *, known: set[str]
) -> Iterator[Question]:
    """A question for each line, over a paragraph of sentences near its own; no answers, and none of the known."""
    said = [line.strip() for line in sources.read_text(encoding="utf-8").splitlines()]
    places = {line: number for number, line in enumerate(dict.fromkeys(said))}
    written = [casing.restored(line) for line in places]
    groups = [
        tuple(written[first : first + PER_PARAGRAPH])
        for first in range(0, len(written), PER_PARAGRAPH)
    ]
    for number, line in enumerate(asked.read_text(encoding="utf-8").splitlines()):
        text = casing.restored(line.strip())
        if wording(text) in known:
            continue
        group, place = divmod(places[said[number]], PER_PARAGRAPH)
        near = [*groups[max(0, group - 2) : group], *groups[group + 1 : group + 3]]
        yield Question(
            id=f"pairs/{number}", text=text, answers=("",),
            gold=(Paragraph(title="", sentences=groups[group], support=(place,)),),
            hard=tuple(Paragraph(title="", sentences=one) for one in near), is_titled=True,
        )  # fmt: skip

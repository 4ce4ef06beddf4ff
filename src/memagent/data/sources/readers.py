"""Readers: what is in each published file, as checked records.

    for item in hotpot_items(path): ...
    for asked in squad_items(path): ...

JSON files may be arrays or lines, plain or gzipped, with the official field names.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from memagent.data.formats.json_stream import (
    checked_record,
    opened,
    parse_json,
    place,
    read_records,
)
from memagent.errors import DataError

TEXT_ENDINGS = (".txt", ".txt.gz", ".md", ".md.gz")


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph:
    """A titled paragraph of Wikipedia.

    Example: Paragraph(title="Paris", sentences=("Paris is a city.", " It lies on the Seine."))
    """

    title: str
    sentences: tuple[str, ...]
    """They join to the text as they are; a single one where the source does not split them."""

    @property
    def text(self) -> str:
        return "".join(self.sentences)

    def sentence_span(self, index: int) -> tuple[int, int]:
        """The span of a sentence in the text, without the space around it."""
        sentence = self.sentences[index]
        start = sum(len(earlier) for earlier in self.sentences[:index])
        start += len(sentence) - len(sentence.lstrip())
        return start, start + len(sentence.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportingFact:
    """A sentence that HotpotQA's annotators marked as needed for the answer."""

    title: str
    """Title of a paragraph of the item's context."""
    sentence: int
    """Index of a sentence that exists in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HotpotItem:
    """A question of HotpotQA with its paragraphs, two of which hold the answer."""

    id: str
    question: str
    answer: str
    type: str
    """bridge or comparison; empty where the file has none."""
    level: str
    """easy, medium or hard; empty where the file has none."""
    context: tuple[Paragraph, ...]
    gold_titles: tuple[str, ...]
    """Titles of the paragraphs that are needed, distinct, as far as they are in the context."""
    supporting_facts: tuple[SupportingFact, ...]
    """Marked sentences, as far as they exist: some files do not keep the boundaries of sentences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SquadItem:
    """A question of SQuAD about one paragraph."""

    id: str
    question: str
    title: str
    """Title of the article that the paragraph is from."""
    context: str
    answers: tuple[str, ...]
    """Distinct accepted answers in the order given; none where the paragraph has no answer."""
    answer_starts: tuple[int, ...]
    """Offset of each answer in the context."""
    is_impossible: bool


def hotpot_items(path: str | Path) -> Iterator[HotpotItem]:
    """The questions of a HotpotQA file, checked, in its order."""
    path = Path(path)
    for number, record in read_records(path):
        yield _hotpot_item(checked_record(_HotpotRecord, record, path, number))


def hotpot_paragraphs(path: str | Path) -> Iterator[Paragraph]:
    """The paragraphs of a file, each title once: lines of title and text, or HotpotQA questions."""
    return distinct(_paragraphs(Path(path)))


def paragraph_line(paragraph: Paragraph) -> str:
    """A paragraph as a line that `hotpot_paragraphs` reads."""
    return _ParagraphRecord(title=paragraph.title, text=paragraph.text).model_dump_json()


def distinct(paragraphs: Iterable[Paragraph]) -> Iterator[Paragraph]:
    """The first paragraph of each title."""
    seen: set[str] = set()
    for paragraph in paragraphs:
        if paragraph.title not in seen:
            seen.add(paragraph.title)
            yield paragraph


def squad_items(path: str | Path) -> Iterator[SquadItem]:
    """The questions of a SQuAD file, 1.1 or 2.0, in its order."""
    path = Path(path)
    with opened(path) as stream:
        data = stream.read()
    if not data.strip():
        raise DataError(f"{path} is empty")
    file = parse_json(data, str(path))
    if not isinstance(file, dict) or not isinstance(file.get("data"), list):
        raise DataError(f"{path} is not SQuAD: it must be an object with a list called data")
    for number, record in enumerate(file["data"], start=1):
        article = checked_record(_SquadArticle, record, path, number)
        for paragraph in article.paragraphs:
            for question in paragraph.qas:
                yield _squad_item(article.title, paragraph, question, path, number)


def text_files(folder: Path) -> list[Path]:
    """The .txt and .md files of a folder, by name; a file as it is."""
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise DataError(f"{folder} does not exist; name a folder of .txt files")
    with os.scandir(folder) as entries:
        names = sorted(e.name for e in entries if e.name.endswith(TEXT_ENDINGS) and e.is_file())
    if not names:
        raise DataError(f"{folder} holds no texts; put .txt or .md files in it")
    return [folder / name for name in names]


def texts_in(folder: str | Path) -> Iterator[tuple[str, str]]:
    """Name and text of each .txt and .md file of a folder, gzipped or not, by name; or of one file."""
    for path in text_files(Path(folder)):
        with opened(path) as stream:
            text = stream.read().decode("utf-8-sig")
        if not text.strip():
            raise DataError(f"{path} is empty; remove it or fill it")
        yield path.name, text.replace("\r\n", "\n").replace("\r", "\n")


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


def _listed(value: Any) -> Any:
    """Some files give a single value where a list is usual."""
    return value if isinstance(value, list) else [value]


def _paired(value: Any) -> Any:
    """JSON has no tuples, and strict checking does not take lists for them."""
    return tuple(value) if isinstance(value, list) else value


_Sentences = Annotated[
    tuple[str, Annotated[list[str], BeforeValidator(_listed)]], BeforeValidator(_paired)
]
_Marks = Annotated[
    tuple[str, Annotated[list[int], BeforeValidator(_listed)]], BeforeValidator(_paired)
]


class _HotpotRecord(_Record):
    """A question as HotpotQA publishes it."""

    id: str = Field(alias="_id", min_length=1)
    question: str = Field(min_length=1)
    answer: str
    type: str = ""
    level: str = ""
    context: list[_Sentences] = Field(min_length=1)
    supporting_facts: list[_Marks] = []


class _ParagraphRecord(_Record):
    """A paragraph as a line of a pool."""

    title: str = Field(min_length=1)
    text: str


class _SquadAnswer(_Record):
    text: str
    answer_start: int = Field(ge=0)


class _SquadQuestion(_Record):
    id: str
    question: str
    answers: list[_SquadAnswer]
    is_impossible: bool = False


class _SquadParagraph(_Record):
    context: str
    qas: list[_SquadQuestion]


class _SquadArticle(_Record):
    title: str = ""
    paragraphs: list[_SquadParagraph]


def _hotpot_item(record: _HotpotRecord) -> HotpotItem:
    context = tuple(
        Paragraph(title=title, sentences=tuple(sentences)) for title, sentences in record.context
    )
    num_sentences: dict[str, int] = {}
    for paragraph in context:
        num_sentences.setdefault(paragraph.title, len(paragraph.sentences))
    marked = [(title, index) for title, indices in record.supporting_facts for index in indices]
    facts = tuple(
        SupportingFact(title=title, sentence=index)
        for title, index in marked
        if 0 <= index < num_sentences.get(title, 0)
    )
    gold = dict.fromkeys(title for title, _ in record.supporting_facts if title in num_sentences)
    return HotpotItem(
        id=record.id,
        question=record.question,
        answer=record.answer,
        type=record.type,
        level=record.level,
        context=context,
        gold_titles=tuple(gold),
        supporting_facts=facts,
    )


def _squad_item(
    title: str, paragraph: _SquadParagraph, question: _SquadQuestion, path: Path, number: int
) -> SquadItem:
    starts: dict[str, int] = {}
    for answer in question.answers:
        end = answer.answer_start + len(answer.text)
        if paragraph.context[answer.answer_start : end] != answer.text:
            raise DataError(
                f"{place(path, number)}: the answer {answer.text!r} of question {question.id} is not "
                f"at character {answer.answer_start} of its context"
            )
        starts.setdefault(answer.text, answer.answer_start)
    return SquadItem(
        id=question.id,
        question=question.question,
        title=title,
        context=paragraph.context,
        answers=tuple(starts),
        answer_starts=tuple(starts.values()),
        is_impossible=question.is_impossible,
    )


def _paragraphs(path: Path) -> Iterator[Paragraph]:
    for number, record in read_records(path):
        if isinstance(record, dict) and "context" in record:
            yield from _hotpot_item(checked_record(_HotpotRecord, record, path, number)).context
        else:
            checked = checked_record(_ParagraphRecord, record, path, number)
            yield Paragraph(title=checked.title, sentences=(checked.text,))

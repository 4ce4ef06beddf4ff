"""HotpotQA as a store: questions and paragraphs by number, in a database in the user's cache folder.

    train file ─┐                  ┌─▶ store.sqlite      questions, and paragraphs by their number
    dev file   ─┼─▶ open_store ────┤
    paragraphs ─┘   (once)         └─▶ counts-*.bin      tokens of each paragraph, by tokenizer

    paragraph number   0 ............ num_pool ............ num_paragraphs
                       may fill a text      of questions only

It lies under the fingerprints of the sources, so another process, or another length, starts at once. This
module keeps training and development apart: a pool for training has no gold paragraph of a development
question, and no question may be in both files. `select_items` finds the questions that a file names.
"""

from __future__ import annotations

import hashlib
import html
import json
import sqlite3
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from filelock import FileLock
from platformdirs import user_cache_path

from memagent.data.example import Passage
from memagent.data.formats.files import read_examples
from memagent.data.formats.json_stream import read_records
from memagent.data.formats.original import kind_of, read_original
from memagent.data.sources.cache import sha256_of
from memagent.data.sources.readers import HotpotItem, Paragraph, hotpot_items, hotpot_paragraphs
from memagent.errors import DataError
from memagent.files import replacing, write_atomically

FORMAT = 2
"""Raised whenever the tables, or what is left out of them, change."""
TABLES = """
PRAGMA journal_mode = OFF;
CREATE TABLE paragraphs (number INTEGER PRIMARY KEY, title TEXT, text TEXT);
CREATE TABLE questions (number INTEGER PRIMARY KEY, record TEXT);
CREATE TABLE about (record TEXT);
"""
NUM_TRIED = 32
"""Paragraphs whose counts distinguish tokenizers of the same name."""
YES_NO = ("yes", "no")

Split = Literal["train", "dev"]
Overlap = Literal["refuse", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gold:
    """A gold paragraph: one that the answer rests on."""

    paragraph: int
    spans: tuple[tuple[int, int], ...]
    """Spans of the marked sentences; the whole text where sentences are not split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuestion:
    """A question, with its paragraphs by number."""

    id: str
    question: str
    answer: str
    type: str
    level: str
    gold: tuple[Gold, ...]
    distractors: tuple[int, ...]
    """Paragraphs that HotpotQA gives with the question to mislead."""
    taken: frozenset[int]
    """Paragraphs of the pool that must not fill its text: its own, by title or by text."""
    is_gold_in_dev: bool
    """Whether a development question rests on one of its gold paragraphs too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HotpotFiles:
    """The files a store is built from."""

    split: Split
    items: Path
    dev: Path | None
    """Development questions, which training must not see; None for the split dev."""
    paragraphs: Path | None
    """The pool; None for the paragraphs of `items`."""
    overlap: Overlap

    def fingerprints(self) -> dict[str, str]:
        """SHA-256 of each, by the name of the source."""
        files = {f"hotpotqa-{self.split}": self.items, "hotpotqa-paragraphs": self.paragraphs}
        if self.split == "train":
            files["hotpotqa-dev"] = self.dev
        return {name: sha256_of(path) for name, path in sorted(files.items()) if path is not None}


class Store:
    """Questions and paragraphs by number."""

    def __init__(self, folder: Path, fingerprints: dict[str, str]) -> None:
        self.folder = folder
        self.fingerprints = fingerprints
        self._database = sqlite3.connect(
            f"{(folder / 'store.sqlite').as_uri()}?immutable=1", uri=True, check_same_thread=False
        )
        about = json.loads(self._one("SELECT record FROM about")[0])
        self.num_items: int = about["num_items"]
        self.num_paragraphs: int = about["num_paragraphs"]
        self.num_pool: int = about["num_pool"]
        """Paragraphs that may fill a text."""
        self.left_out: dict[str, int] = about["left_out"]
        """Questions and paragraphs that are not used, by reason."""

    def item(self, number: int) -> StoredQuestion:
        """A question."""
        record = json.loads(self._one("SELECT record FROM questions WHERE number = ?", number)[0])
        gold = (Gold(paragraph=at, spans=tuple(map(tuple, spans))) for at, spans in record["gold"])
        return StoredQuestion(
            **{
                **record,
                "gold": tuple(gold),
                "distractors": tuple(record["distractors"]),
                "taken": frozenset(record["taken"]),
            }
        )

    def passage(self, number: int) -> Passage:
        """A paragraph."""
        title, text = self._one("SELECT title, text FROM paragraphs WHERE number = ?", number)
        return Passage(title=title, text=text)

    def counts(self, tokenizer: str, count: Callable[[str], int]) -> Sequence[int]:
        """What `count` gives for each paragraph; counted once and kept on disk."""

        def counts_of(numbers: range) -> Iterator[int]:
            for passage in map(self.passage, numbers):
                yield count(f"{passage.title}\n{passage.text}")

        numbers = range(self.num_paragraphs)
        sample = list(counts_of(numbers[:: max(len(numbers) // NUM_TRIED, 1)]))
        key = hashlib.sha256(json.dumps([tokenizer, sample]).encode()).hexdigest()[:24]
        path = self.folder / f"counts-{key}.bin"
        if not path.exists():
            write_atomically(path, array("I", counts_of(numbers)).tobytes())
        counts = array("I")
        counts.frombytes(path.read_bytes())
        return counts

    def _one(self, query: str, *values: int) -> Any:
        return self._database.execute(query, values).fetchone()


def open_store(files: HotpotFiles) -> Store:
    """The store of these files, built on first use."""
    fingerprints = files.fingerprints()
    key = json.dumps([FORMAT, files.split, files.overlap, fingerprints])
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    folder = user_cache_path("memagent", appauthor=False) / "hotpotqa" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if not (folder / "store.sqlite").exists():
                _build(files, folder / "store.sqlite")
    except (OSError, sqlite3.Error) as error:
        raise DataError(
            f"cannot write to {folder} ({getattr(error, 'strerror', None) or error}); free some "
            "space there, or set XDG_CACHE_HOME to a folder of yours"
        ) from None
    return _opened(folder, tuple(fingerprints.items()))


@lru_cache(maxsize=4)
def _opened(folder: Path, fingerprints: tuple[tuple[str, str], ...]) -> Store:
    return Store(folder, dict(fingerprints))


# --- building -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _HeldOut:
    """What training must not see: development questions and their gold paragraphs."""

    ids: set[str] = field(default_factory=set)
    questions: set[bytes] = field(default_factory=set)
    titles: set[bytes] = field(default_factory=set)
    texts: set[bytes] = field(default_factory=set)

    def add(self, item: HotpotItem) -> None:
        self.ids.add(item.id)
        self.questions.add(_key(item.question))
        for paragraph in _gold_of(item):
            self.titles.add(_key(paragraph.title))
            self.texts.add(_key(paragraph.text))

    def has(self, paragraph: Paragraph) -> bool:
        return _key(paragraph.title) in self.titles or _key(paragraph.text) in self.texts

    def asks(self, item: HotpotItem) -> bool:
        return item.id in self.ids or _key(item.question) in self.questions


class _Paragraphs:
    """Writes paragraphs, each once, and finds the number of one by its title or text."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._numbers: dict[bytes, int] = {}
        self._by_title: dict[bytes, int] = {}
        self._by_text: dict[bytes, int] = {}

    def add_to_pool(self, paragraph: Paragraph) -> bool:
        """Whether it is new: neither its title nor its text was added before."""
        title, text = _key(paragraph.title), _key(paragraph.text)
        if title in self._by_title or text in self._by_text:
            return False
        self._by_title[title] = self._by_text[text] = self.add(paragraph)
        return True

    def add(self, paragraph: Paragraph) -> int:
        """Its number; it is written once."""
        title = " ".join(paragraph.title.split())
        key = hashlib.blake2b(f"{title}\n{paragraph.text}".encode(), digest_size=16).digest()
        number = self._numbers.setdefault(key, len(self._numbers))
        row = (number, title, paragraph.text)
        self._database.execute("INSERT OR IGNORE INTO paragraphs VALUES (?, ?, ?)", row)
        return number

    def __len__(self) -> int:
        return len(self._numbers)

    def duplicates(self, paragraph: Paragraph) -> Iterator[int]:
        """Paragraphs of the pool with its title, or with its text."""
        for known, key in ((self._by_title, paragraph.title), (self._by_text, paragraph.text)):
            if (number := known.get(_key(key))) is not None:
                yield number


def _build(files: HotpotFiles, path: Path) -> None:
    held_out = _HeldOut()
    for item in hotpot_items(files.dev) if files.dev else ():
        held_out.add(item)
    left_out: Counter[str] = Counter()
    with replacing(path) as part, closing(sqlite3.connect(part)) as database, database:
        database.executescript(TABLES)
        paragraphs = _Paragraphs(database)
        for paragraph in hotpot_paragraphs(files.paragraphs or files.items):
            left_out.update(_reasons_against(paragraph, paragraphs, held_out))
        num_pool, num_items = len(paragraphs), 0
        for item in _usable(files, held_out, left_out):
            record = json.dumps(_record(item, paragraphs, held_out))
            database.execute("INSERT INTO questions VALUES (?, ?)", (num_items, record))
            num_items += 1
        if num_items == 0:
            reasons = ", ".join(f"{number} {reason}" for reason, number in left_out.items())
            raise DataError(
                f"{files.items} holds no question that can be used: {reasons or 'it has none'}"
            )
        about = {
            "num_items": num_items,
            "num_paragraphs": len(paragraphs),
            "num_pool": num_pool,
            "left_out": dict(sorted(left_out.items())),
        }
        database.execute("INSERT INTO about VALUES (?)", (json.dumps(about),))


def _reasons_against(
    paragraph: Paragraph, paragraphs: _Paragraphs, held_out: _HeldOut
) -> Iterator[str]:
    """Put a paragraph into the pool, or yield the reason why not."""
    if not paragraph.text.strip():
        yield "paragraphs without text"
    elif held_out.has(paragraph):
        yield "paragraphs that development questions rest on"
    elif not paragraphs.add_to_pool(paragraph):
        yield "paragraphs that are there twice"


def _usable(files: HotpotFiles, held_out: _HeldOut, left_out: Counter[str]) -> Iterator[HotpotItem]:
    """The questions that can be used; questions of both splits are refused or dropped."""
    asked: set[bytes] = set()
    for item in hotpot_items(files.items):
        if held_out.asks(item):
            if files.overlap == "refuse":
                raise DataError(
                    f"question {item.id} of {files.items} is a development question too (in "
                    f"{files.dev}); remove it, or drop such questions with `overlap=drop`"
                )
            left_out["questions that are development questions too"] += 1
        elif reason := _reason_against(item, asked):
            left_out[reason] += 1
        else:
            asked.add(_key(item.question))
            yield item


def _reason_against(item: HotpotItem, asked: set[bytes]) -> str | None:
    gold = _gold_of(item)
    if len(gold) < 2:
        return "questions without two gold paragraphs"
    if _key(item.question) in asked:
        return "questions that are asked twice"
    if item.answer in YES_NO or any(
        item.answer in paragraph.text or item.answer in paragraph.title for paragraph in gold
    ):
        return None
    return "questions whose answer is not in their gold paragraphs"


def _record(item: HotpotItem, paragraphs: _Paragraphs, held_out: _HeldOut) -> dict[str, Any]:
    gold = _gold_of(item)
    used = {_key(part) for paragraph in gold for part in (paragraph.title, paragraph.text)}
    distractors = []
    for paragraph in item.context:
        keys = {_key(paragraph.title), _key(paragraph.text)}
        if not used & keys and paragraph.text.strip() and not held_out.has(paragraph):
            distractors.append(paragraph)
            used |= keys
    own = [*gold, *distractors]
    return {
        "id": item.id,
        "question": item.question,
        "answer": item.answer,
        "type": item.type,
        "level": item.level,
        "gold": [[paragraphs.add(one), _spans(item, one)] for one in gold],
        "distractors": [paragraphs.add(one) for one in distractors],
        "taken": sorted({number for one in own for number in paragraphs.duplicates(one)}),
        "is_gold_in_dev": any(held_out.has(one) for one in gold),
    }


def _gold_of(item: HotpotItem) -> list[Paragraph]:
    """The gold paragraphs of a question, each title once."""
    by_title: dict[str, Paragraph] = {}
    for paragraph in item.context:
        by_title.setdefault(paragraph.title, paragraph)
    return [by_title[title] for title in item.gold_titles if by_title[title].text.strip()]


def _spans(item: HotpotItem, paragraph: Paragraph) -> list[tuple[int, int]]:
    """Spans of its marked sentences; the whole text where none is marked or sentences are not split."""
    marked = sorted(
        {fact.sentence for fact in item.supporting_facts if fact.title == paragraph.title}
    )
    spans = [paragraph.sentence_span(number) for number in marked]
    spans = [(start, end) for start, end in spans if start < end]
    if spans and len(paragraph.sentences) > 1:
        return spans
    text = paragraph.text
    start = len(text) - len(text.lstrip())
    return [(start, start + len(text.strip()))]


def _key(text: str) -> bytes:
    """The same for texts that differ in spaces, capitals or HTML escapes only."""
    bare = "".join(html.unescape(text).casefold().split())
    return hashlib.blake2b(bare.encode("utf-8", "surrogatepass"), digest_size=16).digest()


# --- the questions of a file -----------------------------------------------------------------------


class SelectedItems(NamedTuple):
    """Questions of a store, in the order of a file."""

    numbers: list[int]
    num_unknown: int
    """Questions of the file that the store does not have."""


def select_items(store: Store, file: Path) -> SelectedItems:
    """The questions of a store that a file names, each once."""
    by_id: dict[str, int] = {}
    by_wording: dict[str, int] = {}
    for number in range(store.num_items):
        item = store.item(number)
        by_id[item.id] = number
        by_wording.setdefault(_wording(item.question), number)
    found: dict[int, None] = {}
    num_unknown = 0
    for hotpotqa_id, question in _questions(file):
        at = by_id.get(hotpotqa_id) if hotpotqa_id else None
        at = by_wording.get(_wording(question)) if at is None else at
        if at is None:
            num_unknown += 1
        else:
            found[at] = None
    if not found:
        raise DataError(f"no question of {file} is among the {store.num_items:,} of this split")
    return SelectedItems(list(found), num_unknown)


def _questions(file: Path) -> Iterator[tuple[str | None, str]]:
    """HotpotQA's id, where the file has it, and the wording of each question."""
    kind = kind_of(file)
    if kind == "original-eval":  # without its texts, which may be numbers of documents elsewhere
        for _, record in read_records(file):
            yield None, str(record.get("input", ""))
        return
    examples = read_examples(file) if kind == "memagent" else read_original(file, kind)
    for example in examples:
        own = example.metadata.get("hotpotqa_id")
        yield own if isinstance(own, str) else None, example.question


def _wording(question: str) -> str:
    return " ".join(question.split()).casefold()

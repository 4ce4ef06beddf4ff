"""HotpotQA as a store: questions and paragraphs by number, in files that processes map into memory.

    train file ─┐                  ┌─▶ paragraphs.txt    title, line end, text; one after the other
    dev file   ─┼─▶ open_store ────┼─▶ items.jsonl       questions; paragraphs by their number
    paragraphs ─┘   (once)         └─▶ counts-*.bin      tokens of each paragraph, by tokenizer

    paragraph number   0 ............ num_pool ............ num_paragraphs
                       may fill a text      of questions only

They lie in the user's cache folder under the fingerprints of the sources, so another process, or
another length, starts at once. This module keeps training and development apart: a pool for training has
no gold paragraph of a development question, and no question may be in both files.
"""

from __future__ import annotations

import hashlib
import html
import json
import mmap
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

from filelock import FileLock
from platformdirs import user_cache_path

from memagent.data.example import Passage
from memagent.data.sources.cache import sha256_of
from memagent.data.sources.readers import HotpotItem, Paragraph, hotpot_items, hotpot_paragraphs
from memagent.errors import DataError
from memagent.files import write_atomically

FORMAT = 1
"""Raised whenever the files, or what is left out of them, change."""
CACHED_CHARS = 1 << 26
"""Text of paragraphs that a store keeps in memory."""
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
        about = json.loads((folder / "about.json").read_text())
        self.folder = folder
        self.fingerprints = fingerprints
        self.num_pool: int = about["num_pool"]
        """Paragraphs that may fill a text."""
        self.left_out: dict[str, int] = about["left_out"]
        """Questions and paragraphs that are not used, by reason."""
        self._items = _Records(folder / "items.jsonl")
        self._paragraphs = _Records(folder / "paragraphs.txt")
        self._passages: dict[int, Passage] = {}
        self._num_cached_chars = 0

    @property
    def num_items(self) -> int:
        return len(self._items)

    @property
    def num_paragraphs(self) -> int:
        return len(self._paragraphs)

    def item(self, number: int) -> StoredQuestion:
        """A question."""
        record = json.loads(self._items[number])
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
        """A paragraph; cached up to a limit, because fillers are used repeatedly."""
        passage = self._passages.get(number)
        if passage is None:
            title, _, text = self._paragraphs[number].decode().partition("\n")
            passage = Passage(title=title, text=text)
            if self._num_cached_chars < CACHED_CHARS:
                self._passages[number] = passage
                self._num_cached_chars += len(text)
        return passage

    def counts(self, tokenizer: str, count: Callable[[str], int]) -> Sequence[int]:
        """What `count` gives for each paragraph; counted once and kept on disk."""
        tried = range(0, self.num_paragraphs, max(self.num_paragraphs // NUM_TRIED, 1))
        sample = [count(_written(self.passage(number))) for number in tried]
        key = hashlib.sha256(json.dumps([tokenizer, sample]).encode()).hexdigest()[:24]
        path = self.folder / f"counts-{key}.bin"
        if not path.exists():
            numbers = range(self.num_paragraphs)
            counts = array("I", (count(_written(self.passage(number))) for number in numbers))
            write_atomically(path, counts.tobytes())
        return _numbers("I", path)


def open_store(files: HotpotFiles) -> Store:
    """The store of these files, built on first use."""
    fingerprints = files.fingerprints()
    key = json.dumps([FORMAT, files.split, files.overlap, fingerprints])
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    folder = user_cache_path("memagent", appauthor=False) / "hotpotqa" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if not (folder / "about.json").exists():
                _build(files, folder)
    except OSError as error:
        raise DataError(
            f"cannot write to {folder} ({error.strerror or error}); free some space there, or set "
            "XDG_CACHE_HOME to a folder of yours"
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

    def __init__(self, writer: _Writer) -> None:
        self._writer = writer
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
        written = f"{_one_line(paragraph.title)}\n{paragraph.text}".encode()
        key = hashlib.blake2b(written, digest_size=16).digest()
        if key not in self._numbers:
            self._numbers[key] = self._writer.write(written)
        return self._numbers[key]

    def duplicates(self, paragraph: Paragraph) -> Iterator[int]:
        """Paragraphs of the pool with its title, or with its text."""
        for known, key in ((self._by_title, paragraph.title), (self._by_text, paragraph.text)):
            if (number := known.get(_key(key))) is not None:
                yield number


def _build(files: HotpotFiles, folder: Path) -> None:
    held_out = _HeldOut()
    for item in hotpot_items(files.dev) if files.dev else ():
        held_out.add(item)
    left_out: Counter[str] = Counter()
    with _Writer(folder / "paragraphs.txt") as texts, _Writer(folder / "items.jsonl") as lines:
        paragraphs = _Paragraphs(texts)
        for paragraph in hotpot_paragraphs(files.paragraphs or files.items):
            left_out.update(_reasons_against(paragraph, paragraphs, held_out))
        num_pool = texts.num_written
        for item in _usable(files, held_out, left_out):
            lines.write(json.dumps(_record(item, paragraphs, held_out)).encode())
        if lines.num_written == 0:
            raise DataError(
                f"{files.items} holds no question that can be used: {_listed(left_out)}"
            )
    about = {"num_pool": num_pool, "left_out": dict(sorted(left_out.items()))}
    # the last: its presence means that the store is complete
    write_atomically(folder / "about.json", json.dumps(about).encode())


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


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _listed(left_out: Counter[str]) -> str:
    return ", ".join(f"{number} {reason}" for reason, number in left_out.items()) or "it has none"


# --- files ----------------------------------------------------------------------------------------


class _Writer:
    """Records one after the other, and where each begins."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts = array("Q", [0])
        self._stack = ExitStack()

    @property
    def num_written(self) -> int:
        return len(self._starts) - 1

    def __enter__(self) -> _Writer:
        self._file: BinaryIO = self._stack.enter_context(self._path.open("wb"))
        return self

    def write(self, data: bytes) -> int:
        """The number of the record."""
        self._file.write(data)
        self._starts.append(self._starts[-1] + len(data))
        return self.num_written - 1

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()
        write_atomically(_starts_file(self._path), self._starts.tobytes())


class _Records:
    """What a `_Writer` wrote, by number."""

    def __init__(self, path: Path) -> None:
        self._starts = _numbers("Q", _starts_file(path))
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> bytes:
        return self._data[self._starts[number] : self._starts[number + 1]]


def _written(passage: Passage) -> str:
    return f"{passage.title}\n{passage.text}"


def _starts_file(path: Path) -> Path:
    return path.with_suffix(".starts")


def _numbers(kind: Literal["Q", "I"], path: Path) -> array[int]:
    numbers = array(kind)
    numbers.frombytes(path.read_bytes())
    return numbers


def paragraphs_of(store: Store, numbers: Iterable[int]) -> tuple[Passage, ...]:
    """Paragraphs in this order."""
    passage = store.passage
    return tuple(passage(number) for number in numbers)

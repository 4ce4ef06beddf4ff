"""Sources: the published files that datasets are made from, by name, and what is in them.

    path = open_source("hotpotqa-dev")                     # fetched once, then from the cache
    path = open_source("hotpotqa-dev", "my/dev.jsonl.gz")  # or a file or folder of yours
    for item in hotpot_items(path): ...

    ~/.cache/memagent/sources/
      hotpot_dev_distractor_v1.json            as published
      hotpot_dev_distractor_v1.json.sha256     its checksum when it arrived; compared ever after

Files of yours may be .json (an array) or .jsonl, plain or gzipped, with the official field names.
"""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from filelock import FileLock
from platformdirs import user_cache_path
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from memagent.data.formats.json_stream import opened, parse_json, place, read_records
from memagent.data.sources.download import Fetched, Watcher, download
from memagent.errors import ConfigError, DataError

HOTPOT_ADDRESS = "http://curtis.ml.cmu.edu/datasets/hotpot"
SQUAD_ADDRESS = "https://rajpurkar.github.io/SQuAD-explorer/dataset"
CC_BY_SA = "CC BY-SA 4.0"
TEXT_ENDINGS = (".txt", ".txt.gz", ".md", ".md.gz")

Kind = Literal["hotpotqa", "paragraphs", "squad", "texts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A published file, or a kind of folder, that datasets are made from."""

    kind: Kind
    what: str
    """One line for people."""
    licence: str | None
    """None when it is that of your own texts."""
    url: str | None = None
    """Where it is published; None when it is derived from other sources, or your own."""
    num_bytes: int | None = None
    """Size as published; None when not known."""
    sha256: str | None = None
    """Checksum as published; None when not known, then the first download's is kept."""
    names: tuple[str, ...] = ()
    """What the file is called in a folder of yours; the first that is there is taken."""

    @property
    def file(self) -> str:
        """What the file is called in the cache."""
        return self.url.rpartition("/")[2] if self.url else self.names[0]


def _names(*stems: str) -> tuple[str, ...]:
    endings = (".json", ".json.gz", ".jsonl", ".jsonl.gz")
    return tuple(stem + ending for stem in stems for ending in endings)


SOURCES: dict[str, Source] = {
    "hotpotqa-train": Source(
        kind="hotpotqa",
        what="HotpotQA 1.1, training questions with ten paragraphs each (90,447)",
        licence=CC_BY_SA,
        url=f"{HOTPOT_ADDRESS}/hotpot_train_v1.1.json",
        num_bytes=566_426_227,
        sha256="26650cf50234ef5fb2e664ed70bbecdfd87815e6bffc257e068efea5cf7cd316",
        names=_names("hotpot_train_v1.1", "hotpotqa_train", "train"),
    ),
    "hotpotqa-dev": Source(
        kind="hotpotqa",
        what="HotpotQA 1, development questions, distractor setting (7,405); never train on them",
        licence=CC_BY_SA,
        url=f"{HOTPOT_ADDRESS}/hotpot_dev_distractor_v1.json",
        num_bytes=46_320_117,
        sha256="4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea",
        names=_names("hotpot_dev_distractor_v1", "hotpotqa_dev", "dev"),
    ),
    "hotpotqa-paragraphs": Source(
        kind="paragraphs",
        what="distinct Wikipedia paragraphs; those of both files above unless a file is given",
        licence=CC_BY_SA,
        names=("hotpotqa-paragraphs.jsonl.gz", *_names("paragraphs")),
    ),
    "squad-dev": Source(
        kind="squad",
        what="SQuAD 2.0, development questions (11,873, half without an answer)",
        licence=CC_BY_SA,
        url=f"{SQUAD_ADDRESS}/dev-v2.0.json",
        num_bytes=4_370_528,
        sha256="80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",
        names=_names("dev-v2.0", "squad"),
    ),
    "essays": Source(
        kind="texts",
        what="prose to hide things in: any folder of .txt and .md files, which may be gzipped",
        licence=None,
    ),
}
"""Sources by name. Sizes and checksums are those under which the files are published."""


# --- finding --------------------------------------------------------------------------------------


def open_source(name: str, path: str | Path | None = None, *, watch: Watcher | None = None) -> Path:
    """The file or folder of a source: `path` if it is given, else from the cache, fetched if needed.

    `path` may be a folder that holds the file under one of its usual names. Without `watch`, a
    download tells on standard error what it fetches.
    """
    source = find_source(name)
    if path is not None:
        return _own(name, source, Path(path).expanduser())
    if source.kind == "texts":
        raise ConfigError(
            f"{name} are texts of your own; name a folder of .txt files as the source"
        )
    target = cached_path(name)
    with _only_one(target):
        if target.exists():
            _verify(target)
        elif source.url is None:
            _derive_paragraphs(target, watch)
        else:
            _download(name, source, target, watch)
    return target


def find_source(name: str) -> Source:
    """What is known of a source; an error with the nearest name if there is none."""
    if name not in SOURCES:
        near = get_close_matches(name, SOURCES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(SOURCES)}"
        raise ConfigError(f"there is no source {name!r}; {hint}")
    return SOURCES[name]


def cached_path(name: str) -> Path:
    """Where a source lies once it has been fetched."""
    folder = user_cache_path("memagent", appauthor=False) / "sources"
    return folder / find_source(name).file


_checksums: dict[tuple[str, int, int], str] = {}


def sha256_of(path: str | Path) -> str:
    """SHA-256 of a file, or of the names and contents of a folder's texts; known ones are kept."""
    path = Path(path)
    if path.is_dir():
        parts = (f"{file.name} {sha256_of(file)}\n" for file in _text_files(path))
        return hashlib.sha256("".join(parts).encode()).hexdigest()
    try:
        state = path.stat()
        key = (str(path.resolve()), state.st_size, state.st_mtime_ns)
        if key not in _checksums:
            with path.open("rb") as stream:
                _checksums[key] = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    return _checksums[key]


def _own(name: str, source: Source, path: Path) -> Path:
    if not path.exists():
        raise DataError(f"{path} does not exist; name the file or folder of {name}")
    if source.kind == "texts":
        if path.is_dir():
            _text_files(path)
        return path
    if not path.is_dir():
        return path
    for candidate in source.names:
        if (path / candidate).is_file():
            return path / candidate
    raise DataError(
        f"{path} holds no {name}: no {source.names[0]} or {source.names[-1]}; name a file"
    )


def _only_one(target: Path) -> FileLock:
    """A second process that wants the same file waits, then finds it there."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(target.with_name(f".{target.name}.lock"))
    except OSError as error:
        raise DataError(
            f"cannot write to {target.parent} ({error.strerror}); set XDG_CACHE_HOME to a folder "
            "of yours"
        ) from None


def _download(name: str, source: Source, target: Path, watch: Watcher | None) -> None:
    assert source.url is not None
    with _Shown(name, source, watch) as shown:
        download(
            source.url, target, num_bytes=source.num_bytes, sha256=source.sha256, watch=shown.watch
        )
    _record(target)


def _record(target: Path) -> None:
    """Keep the checksum beside the file, in the form that `sha256sum -c` takes."""
    _checksum_file(target).write_text(f"{sha256_of(target)}  {target.name}\n")


def _verify(target: Path) -> None:
    recorded = _checksum_file(target)
    if not recorded.exists():
        _record(target)
    elif recorded.read_text().split()[:1] != [sha256_of(target)]:
        raise DataError(
            f"{target} is not what was fetched (its checksum in {recorded.name} differs); delete "
            "it to have it fetched again"
        )


def _checksum_file(target: Path) -> Path:
    return target.with_name(f"{target.name}.sha256")


def _derive_paragraphs(target: Path, watch: Watcher | None) -> None:
    """The distinct paragraphs of the official files, as one file of its own."""
    files = [open_source(name, watch=watch) for name in ("hotpotqa-train", "hotpotqa-dev")]
    part = target.with_name(f"{target.name}.part")
    with part.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
        pool = _distinct(chain.from_iterable(hotpot_paragraphs(file) for file in files))
        for paragraph in pool:
            line = _ParagraphRecord(title=paragraph.title, text=paragraph.text).model_dump_json()
            packed.write(line.encode() + b"\n")
    part.replace(target)
    _record(target)


class _Shown:
    """Tells what is fetched, from where and under which licence; a bar on a terminal."""

    def __init__(self, name: str, source: Source, watch: Watcher | None) -> None:
        self._name = name
        self._source = source
        self.watch = watch or self._show

    def __enter__(self) -> _Shown:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        console = Console(stderr=True, highlight=False, soft_wrap=True)
        size = f", {self._source.num_bytes / 1e6:,.0f} MB" if self._source.num_bytes else ""
        licence = f", licence {self._source.licence}" if self._source.licence else ""
        console.print(f"fetching {self._name}: {self._source.url}{size}{licence}", markup=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(self._name, total=self._source.num_bytes)
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def _show(self, fetched: Fetched) -> None:
        self._bar.update(self._task, completed=fetched.num_bytes, total=fetched.total_bytes)


# --- reading --------------------------------------------------------------------------------------


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
        """Where a sentence stands in the text, without the space around it."""
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
    """bridge or comparison; empty where the file does not say."""
    level: str
    """easy, medium or hard; empty where the file does not say."""
    context: tuple[Paragraph, ...]
    gold_titles: tuple[str, ...]
    """Titles of the paragraphs that are needed, distinct, as far as they are in the context."""
    supporting_facts: tuple[SupportingFact, ...]
    """Marked sentences, as far as they exist: some files do not keep the boundaries of sentences."""
    num_missing_facts: int
    """Marked sentences whose title or index does not exist."""


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
    """Where each answer stands in the context."""
    is_impossible: bool


def hotpot_items(path: str | Path) -> Iterator[HotpotItem]:
    """The questions of a HotpotQA file, checked, in its order."""
    path = Path(path)
    for number, record in read_records(path):
        yield _hotpot_item(_checked(_HotpotRecord, record, path, number))


def hotpot_paragraphs(path: str | Path) -> Iterator[Paragraph]:
    """The paragraphs of a file, each title once: lines of title and text, or HotpotQA questions."""
    return _distinct(_paragraphs(Path(path)))


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
        article = _checked(_SquadArticle, record, path, number)
        for paragraph in article.paragraphs:
            for question in paragraph.qas:
                yield _squad_item(article.title, paragraph, question, path, number)


def texts_in(folder: str | Path) -> Iterator[tuple[str, str]]:
    """Name and text of each .txt and .md file of a folder, gzipped or not, by name; or of one file."""
    for path in _text_files(Path(folder)):
        with opened(path) as stream:
            text = stream.read().decode("utf-8-sig")
        if not text.strip():
            raise DataError(f"{path} is empty; remove it or fill it")
        yield path.name, text.replace("\r\n", "\n").replace("\r", "\n")


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


def _listed(value: Any) -> Any:
    """A single value where several are usual: some files give a title's sentences as one list."""
    return value if isinstance(value, list) else [value]


class _HotpotRecord(_Record):
    """A question as HotpotQA publishes it."""

    id: str = Field(alias="_id", min_length=1)
    question: str = Field(min_length=1)
    answer: str
    type: str = ""
    level: str = ""
    context: list[tuple[str, Annotated[list[str], BeforeValidator(_listed)]]] = Field(min_length=1)
    supporting_facts: list[tuple[str, Annotated[list[int], BeforeValidator(_listed)]]] = []


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


class _SQUAD_ParagraphRecord(_Record):
    context: str
    qas: list[_SquadQuestion]


class _SquadArticle(_Record):
    title: str = ""
    paragraphs: list[_SQUAD_ParagraphRecord]


R = TypeVar("R", bound=_Record)


def _checked(schema: type[R], record: Any, path: Path, number: int) -> R:
    try:
        return schema.model_validate(_as_tuples(record) if schema is _HotpotRecord else record)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(str(part) for part in problem["loc"]) or "the record"
        raise DataError(f"{place(path, number)}: {name}: {problem['msg'].lower()}") from None


def _as_tuples(record: Any) -> Any:
    """Pairs arrive from JSON as lists; strict checking wants them as tuples."""
    if not isinstance(record, dict):
        return record
    pairs = {
        name: [tuple(pair) if isinstance(pair, list) else pair for pair in record[name]]
        for name in ("context", "supporting_facts")
        if isinstance(record.get(name), list)
    }
    return {**record, **pairs}


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
        num_missing_facts=len(marked) - len(facts),
    )


def _squad_item(
    title: str,
    paragraph: _SQUAD_ParagraphRecord,
    question: _SquadQuestion,
    path: Path,
    number: int,
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
            yield from _hotpot_item(_checked(_HotpotRecord, record, path, number)).context
        else:
            checked = _checked(_ParagraphRecord, record, path, number)
            yield Paragraph(title=checked.title, sentences=(checked.text,))


def _distinct(paragraphs: Iterable[Paragraph]) -> Iterator[Paragraph]:
    seen: set[str] = set()
    for paragraph in paragraphs:
        if paragraph.title not in seen:
            seen.add(paragraph.title)
            yield paragraph


def _text_files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise DataError(f"{folder} does not exist; name a folder of .txt files")
    with os.scandir(folder) as entries:
        names = sorted(e.name for e in entries if e.name.endswith(TEXT_ENDINGS) and e.is_file())
    if not names:
        raise DataError(f"{folder} holds no texts; put .txt or .md files in it")
    return [folder / name for name in names]

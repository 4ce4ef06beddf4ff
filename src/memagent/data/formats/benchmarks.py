"""Files of other long-context benchmarks, read as examples: LongBench, LongBench v2, HELMET and LOFT.

    longbench       a line each: input, context, answers, dataset, _id
    longbench-v2    an array or lines: question, choice_A to choice_D, answer, context, _id
    helmet          lines: question, answers, ctxs; or context with query or question, and answer or outputs;
                    or context, input, answer, options (InfiniteBench)
    loft            SPLIT_queries.jsonl: qid, query_text, answers; with corpus.jsonl beside it

    for example in read_dataset("longbench/hotpotqa.jsonl"): ...

The files are yours: nothing is downloaded. Questions that a benchmark words in its prompts are worded here in our
own words; docs/data.md has the graders. What cannot be graded (rankings, citations, SQL, several turns) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from memagent.data.example import Evidence, Example, Passage
from memagent.data.formats.files import read_examples
from memagent.data.formats.json_stream import checked_record, place, read_records
from memagent.errors import DataError
from memagent.rewards.verifiers import Match

BenchmarkKind = Literal["longbench", "longbench-v2", "helmet", "loft"]

CORPUS = "corpus.jsonl"
ENDINGS = (".json", ".json.gz", ".jsonl", ".jsonl.gz")
SUMMARIES = ("gov_report", "qmsum", "multi_news", "vcsum", "samsum")
CODE = ("lcc", "repobench-p")
CLASSES = ("trec", "lsht")
SEVERAL = ("qampari", "quest")
"""Datasets of LOFT whose answers are all required."""
LETTERS = "ABCDEFGH"

_length = re.compile(r"(\d+)([km])", re.I)


def read_dataset(path: str | Path) -> Iterator[Example]:
    """The examples of a file: ours, or of a benchmark that is known by its first record."""
    path = Path(path)
    kind = benchmark_of(path)
    return read_examples(path) if kind is None else read_benchmark(path, kind)


def benchmark_of(path: Path) -> BenchmarkKind | None:
    """The benchmark that a file is of, by its first record; None where it is of none that we know."""
    if not path.name.endswith(ENDINGS):
        return None
    try:
        _, first = next(read_records(path), (0, None))
    except DataError:
        return None  # whoever reads it names what is wrong
    if not isinstance(first, dict) or "documents" in first:
        return None
    names = first.keys()
    if {"qid", "query_text", "answers"} <= names:
        return "loft"
    if {"choice_A", "choice_B", "context", "question", "answer"} <= names:
        return "longbench-v2"
    if {"context", "input", "answers", "dataset"} <= names:
        return "longbench"
    is_helmet = {"ctxs", "question", "answers"} <= names or {"ctxs", "query"} <= names
    asks = names & {"query", "question", "type_needle_v", "options"}
    is_helmet |= "context" in names and bool(asks) and bool(names & {"answer", "outputs"})
    return "helmet" if is_helmet else None


def read_benchmark(
    path: str | Path, kind: BenchmarkKind, *, task: str | None = None
) -> Iterator[Example]:
    """Examples of a benchmark's file. `task` names their task; None takes it from the file."""
    path = Path(path)
    readers: dict[BenchmarkKind, Callable[[Any, Path, int], Example]] = {
        "longbench": _from_longbench,
        "longbench-v2": _from_longbench_v2,
        "helmet": _from_helmet,
        "loft": _Loft(path).example if kind == "loft" else _from_helmet,
    }
    for number, record in read_records(path):
        example = readers[kind](record, path, number)
        yield example if task is None else replace(example, task=task)


def files_of(path: Path) -> list[Path]:
    """The files that a dataset is read from: itself, and the corpus beside queries of LOFT."""
    return [path, path.parent / CORPUS] if benchmark_of(path) == "loft" else [path]


class _Record(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


# --- LongBench ------------------------------------------------------------------------------------


class _LongBench(_Record):
    input: str
    context: str
    answers: list[str] = Field(min_length=1)
    dataset: str
    all_classes: list[str] | None = None


def _from_longbench(record: Any, path: Path, number: int) -> Example:
    checked = checked_record(_LongBench, record, path, number)
    name = checked.dataset.removesuffix("_e")
    question, grader = checked.input, "f1"
    if name in SUMMARIES:
        asked = f" It should answer this: {question}" if name == "qmsum" else ""
        question = f"Write a summary of the text.{asked}"
    elif name in CODE:
        question = f"{question}\nWrite the next line of code.".strip()
    elif name in CLASSES:
        classes = ", ".join(checked.all_classes or [])
        question = f"{question}\nWhich class is it? The classes are: {classes}".strip()
        grader = "contains"
    elif name == "passage_count":
        question, grader = "How many different paragraphs are there? Some are repeated.", "lenient"
    elif name.startswith("passage_retrieval"):
        question = f"Which paragraph is summarised here? Reply with its number.\n{question}"
        grader = "recall"
    return Example(
        id=str(record.get("_id") or f"{_stem(path)}/{number - 1}"),
        task=f"longbench/{name}",
        question=question,
        answers=tuple(checked.answers),
        grader=grader,
        documents=(Passage(text=checked.context),),
        metadata={"longbench": _kept(record, "input", "context", "answers")},
    )


class _LongBenchV2(_Record):
    question: str
    answer: str
    context: str
    choice_A: str
    choice_B: str
    choice_C: str
    choice_D: str


def _from_longbench_v2(record: Any, path: Path, number: int) -> Example:
    checked = checked_record(_LongBenchV2, record, path, number)
    choices = [checked.choice_A, checked.choice_B, checked.choice_C, checked.choice_D]
    if checked.answer not in list(LETTERS[: len(choices)]):
        raise DataError(f"{place(path, number)}: answer is {checked.answer!r}, not one of A to D")
    return Example(
        id=str(record.get("_id") or f"{_stem(path)}/{number - 1}"),
        task=f"longbench-v2/{_slug(str(record.get('domain') or 'all'))}",
        question=_with_choices(checked.question, choices),
        answers=_choice_answers(choices, LETTERS.index(checked.answer)),
        grader="lenient",
        documents=(Passage(text=checked.context),),
        metadata={"longbench-v2": _kept(record, "question", "context")},
    )


# --- HELMET ---------------------------------------------------------------------------------------


class _Document(_Record):
    text: str
    title: str | None = None


class _HelmetDocuments(_Record):
    question: str
    answers: list[str] = Field(min_length=1)
    ctxs: list[_Document] = Field(min_length=1)


class _HelmetContext(_Record):
    context: str
    answer: str | list[str] | None = None
    outputs: list[str] | None = None
    query: str | None = None
    question: str | None = None
    input: str | None = None
    options: list[str] | None = None
    type_needle_v: str | None = None


def _from_helmet(record: Any, path: Path, number: int) -> Example:
    if isinstance(record, dict) and "ctxs" in record and "answers" not in record:
        raise DataError(f"{place(path, number)}: rankings of HELMET cannot be graded here")
    if isinstance(record, dict) and "ctxs" in record:
        return _helmet_documents(record, path, number)
    checked = checked_record(_HelmetContext, record, path, number)
    answers = checked.answer if checked.answer is not None else checked.outputs
    golds = (answers,) if isinstance(answers, str) else tuple(answers or ())
    if not golds:
        raise DataError(f"{place(path, number)}: it has neither answer nor outputs")
    question, grader, match = _helmet_question(checked, path, number)
    if checked.options:
        letters = [f"{letter}" for letter in LETTERS[: len(checked.options)]]
        right = next((n for n, one in enumerate(checked.options) if one in golds), None)
        if right is None and golds[0] in letters:
            right = letters.index(golds[0])
        if right is None:
            raise DataError(f"{place(path, number)}: the answer is none of the options")
        question = _with_choices(question, checked.options)
        golds, grader = _choice_answers(checked.options, right), "lenient"
    return Example(
        id=_helmet_id(record, path, number),
        task=f"helmet/{_stem(path)}",
        question=question,
        answers=golds,
        match=match,
        grader=grader,
        documents=(Passage(text=checked.context),),
        metadata={"helmet": _kept(record, "context", "query", "question", "input")},
    )


def _helmet_documents(record: Any, path: Path, number: int) -> Example:
    checked = checked_record(_HelmetDocuments, record, path, number)
    return Example(
        id=_helmet_id(record, path, number),
        task=f"helmet/{_stem(path)}",
        question=checked.question,
        answers=tuple(checked.answers),
        grader="contains",
        documents=tuple(Passage(title=one.title or "", text=one.text) for one in checked.ctxs),
        metadata={"helmet": _kept(record, "question", "answers", "ctxs")},
    )


def _helmet_question(record: _HelmetContext, path: Path, number: int) -> tuple[str, str, Match]:
    """The question of a record with one context, its grader, and whether all answers are required."""
    asked = record.query or record.question or record.input or ""
    name = f"{path.parent.name}/{path.name}".lower()
    if record.type_needle_v is not None:
        kind = record.type_needle_v
        question = f"What are all the special magic {kind} for {asked} mentioned in the text?"
        return question, "ruler_all", "all"
    if record.model_extra and "num_kvs" in record.model_extra:
        return f"What is the value of the key {asked} in the JSON object?", "contains", "any"
    if record.outputs is not None or "ruler" in name:
        if "vt" in name:
            return f"Which variables are assigned the value {asked}?", "ruler_all", "all"
        if "cwe" in name:
            return "What are the 10 most common words in the list?", "ruler_all", "all"
        if "fwe" in name:
            question = "What are the three most frequent coded words, dots aside?"
            return question, "ruler_all", "all"
        if asked:
            return asked, "ruler_part", "any"
    if not asked:
        raise DataError(f"{place(path, number)}: it has no question")
    return asked, "f1", "any"


def _helmet_id(record: dict[str, Any], path: Path, number: int) -> str:
    """HELMET repeats questions with their evidence at other depths: the place in the file tells them apart."""
    return f"{_stem(path)}/{number - 1}" + (f"/{record['id']}" if record.get("id") else "")


# --- LOFT -----------------------------------------------------------------------------------------


class _LoftQuery(_Record):
    qid: str
    query_text: str
    answers: list[Any] = Field(min_length=1)
    metadata: dict[str, Any] = Field(default_factory=dict)


class _LoftPassage(_Record):
    pid: str
    title_text: str = ""
    passage_text: str


class _Loft:
    """Queries over one corpus, which stands beside them."""

    def __init__(self, path: Path) -> None:
        self._corpus = path.parent / CORPUS
        self._passages: dict[str, _LoftPassage] | None = None
        self._documents: dict[bool, tuple[Passage, ...]] = {}

    def example(self, record: Any, path: Path, number: int) -> Example:
        if isinstance(record, dict) and isinstance(record.get("query_text"), list):
            raise DataError(f"{place(path, number)}: queries of several turns cannot be asked here")
        checked = checked_record(_LoftQuery, record, path, number)
        passages = self._load()
        is_retrieval = all(isinstance(one, list) and one for one in checked.answers)
        golds = [str(one[0]) if is_retrieval else one for one in checked.answers]
        if not all(isinstance(gold, str) for gold in golds):
            raise DataError(
                f"{place(path, number)}: answers that are no texts cannot be graded here"
            )
        folder = [part.lower() for part in path.resolve().parent.parts[-3:]]
        needs_all = any(name in part for part in folder for name in SEVERAL)
        needs_all |= is_retrieval and len(golds) > 1
        question = checked.query_text.strip()
        if is_retrieval:
            question = f"Which documents help to answer this? Reply with their IDs.\n{question}"
        return Example(
            id=checked.qid,
            task=f"loft/{_loft_name(folder, is_retrieval=is_retrieval)}",
            question=question,
            answers=tuple(golds),
            match="all" if needs_all else "any",
            grader="contains",
            documents=self._texts(with_ids=is_retrieval),
            evidence=self._evidence(checked, passages),
            target_tokens=_named_length(folder[-1]),
            metadata={"loft": _kept(record, "query_text", "answers")},
        )

    def _load(self) -> dict[str, _LoftPassage]:
        if self._passages is None:
            if not self._corpus.is_file():
                raise DataError(
                    f"{self._corpus} does not exist; queries of LOFT need the corpus beside them"
                )
            self._passages = {
                checked.pid: checked
                for number, record in read_records(self._corpus)
                for checked in [checked_record(_LoftPassage, record, self._corpus, number)]
            }
        return self._passages

    def _texts(self, *, with_ids: bool) -> tuple[Passage, ...]:
        if with_ids not in self._documents:
            self._documents[with_ids] = tuple(
                Passage(
                    title=f"ID {one.pid}: {one.title_text}".strip() if with_ids else one.title_text,
                    text=one.passage_text,
                )
                for one in self._load().values()
            )
        return self._documents[with_ids]

    def _evidence(
        self, query: _LoftQuery, passages: dict[str, _LoftPassage]
    ) -> tuple[Evidence, ...]:
        """The passages that the query's judgements name."""
        judged = query.metadata.get("qrels")
        named = {str(one[0]) for one in judged or () if isinstance(one, list) and one}
        return tuple(
            Evidence(document=number, start=0, end=len(one.passage_text), text=one.passage_text)
            for number, (pid, one) in enumerate(passages.items())
            if pid in named and one.passage_text
        )


def _loft_name(folder: list[str], *, is_retrieval: bool) -> str:
    """`rag/nq/128k` is rag-nq."""
    kind = "retrieval" if is_retrieval else "rag"
    has_length = _named_length(folder[-1]) is not None
    dataset = folder[-2] if has_length and len(folder) > 1 else folder[-1]
    return f"{kind}-{_slug(dataset)}"


def _named_length(name: str) -> int | None:
    """Tokens that a folder is named for: 32k, 128k, 1m."""
    found = _length.fullmatch(name)
    return int(found[1]) * (1024 if found[2].lower() == "k" else 1024 * 1024) if found else None


# --- what they share ------------------------------------------------------------------------------


def _with_choices(question: str, choices: list[str]) -> str:
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
    return "\n".join([question, *lines, "Reply with the letter of the right choice."])


def _choice_answers(choices: list[str], right: int) -> tuple[str, ...]:
    """The letter, the choice, and both."""
    letter, choice = LETTERS[right], choices[right]
    return tuple(one for one in (letter, choice, f"{letter}. {choice}") if one.strip())


def _kept(record: dict[str, Any], *left_out: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in left_out}


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-") or "all"


def _stem(path: Path) -> str:
    return path.name.partition(".")[0]

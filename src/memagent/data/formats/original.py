"""The file formats of the original MemAgent project, read and written.

    original-train   parquet: prompt, context, reward_model.ground_truth, extra_info, ...
    original-eval    a JSON array: context, input, answers (HotpotQA) or outputs (RULER), ...

    for example in read_original("eval_200.json", "original-eval"): ...
    write_original("eval_200.json", "original-eval", examples)

Its files do not say where the evidence is, so imported examples have none. Lengths come from `num_docs`, 50
of which are 7K, and from `length`. Fields without a place in an
Example are kept in its `metadata` under the name of the format; importing and then exporting
gives the same content. Above 10,000 documents its evaluation files hold numbers of documents instead of
text: then `pool` names the file with the documents.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from memagent.data.example import Example, Passage, join
from memagent.data.formats.files import (
    RowWriter,
    arrow,
    columns_of,
    disk_errors,
    dump_json,
    read_rows,
    replacing_dataset,
    text_file,
)
from memagent.data.formats.json_stream import checked_record, place, read_records
from memagent.data.sources.readers import hotpot_items
from memagent.data.tasks.lengths import nominal_tokens
from memagent.data.tasks.registry import TASKS, rebuild
from memagent.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa
from typing import NamedTuple, cast, get_args

from memagent.data.formats.benchmarks import BenchmarkKind, benchmark_of, read_benchmark
from memagent.data.formats.files import read_examples, write_examples
from memagent.errors import ConfigError

DatasetKind = Literal["memagent", "original-train", "original-eval"]

LEAST_OF_TARGET = 0.8
"""A text of RULER has at least this share of the tokens that were requested."""
SAMPLE_ROWS = 64
"""Rows that decide the types of columns without a published type."""

_DIGITS = re.compile(r"\d+")
_HEADING = re.compile(r"(?:\A|\n\n)Document (\d+):\n")


def kind_of(path: str | Path) -> DatasetKind:
    """Which kind of file this is, by its columns or its first record."""
    path = Path(path)
    if path.suffix == ".parquet":
        names = columns_of(path)
        if "reward_model" in names:
            return "original-train"
        if "answers" in names:
            return "memagent"
        raise _unknown(path)
    if not path.name.endswith((".json", ".json.gz", ".jsonl", ".jsonl.gz")):
        raise DataError(f"{path}: a dataset ends in .jsonl, .parquet or .json; rename it")
    _, first = next(read_records(path), (0, None))
    if isinstance(first, dict) and {"context", "input"} <= first.keys():
        return "original-eval"
    if isinstance(first, dict) and {"id", "question", "answers"} <= first.keys():
        return "memagent"
    raise _unknown(path)


def read_original(
    path: str | Path, kind: DatasetKind, *, pool: str | Path | None = None, task: str | None = None
) -> Iterator[Example]:
    """Examples of a file of the original project.

    `pool` has the documents of files that hold only their numbers. `task` names the task of the
    examples; None takes it from the file.
    """
    path = Path(path)
    if kind == "original-train":
        return (_from_train(row, path, number, task) for number, row in read_rows(path))
    assert kind == "original-eval", f"{kind} is not of the original project"
    documents = _Pool(pool)
    return (_from_eval(row, path, number, documents, task) for number, row in read_records(path))


def write_original(path: str | Path, kind: DatasetKind, examples: Iterable[Example]) -> int:
    """Write examples as the original project does; how many. Texts are rebuilt where needed."""
    path = Path(path)
    endings = {"original-train": (".parquet",), "original-eval": (".json", ".json.gz")}[kind]
    if not path.name.endswith(endings):
        raise DataError(f"{path}: a file of {kind} ends in {' or '.join(endings)}; name it so")
    records = (
        _to_train(index, rebuild(example)) if kind == "original-train" else _to_eval(index, example)
        for index, example in enumerate(examples)
    )
    write = _write_rows if kind == "original-train" else _write_array
    with replacing_dataset(path) as part:
        return write(path, part, records)


# --- training files -------------------------------------------------------------------------------


class _Record(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Message(_Record):
    role: str
    content: str


class _Reward(_Record):
    ground_truth: list[str] | str


class _TrainRow(_Record):
    prompt: list[_Message] = Field(min_length=1)
    context: str
    reward_model: _Reward
    data_source: str = "original"


def _from_train(row: Any, path: Path, number: int, task: str | None) -> Example:
    checked = checked_record(_TrainRow, row, path, number)
    question = checked.prompt[-1].content
    truth = checked.reward_model.ground_truth
    kept = {name: value for name, value in row.items() if name not in ("context", "prompt")}
    if row["prompt"] != _prompt(question):
        kept["prompt"] = row["prompt"]
    if isinstance(truth, list):
        kept["reward_model"] = {**row["reward_model"]}
        del kept["reward_model"]["ground_truth"]
    return Example(
        id=f"{_stem(path)}/{number - 1}",
        task=task or checked.data_source,
        question=question,
        answers=(truth,) if isinstance(truth, str) else tuple(truth),
        documents=split_documents(checked.context),
        metadata={"original-train": kept},
    )


def _to_train(index: int, example: Example) -> dict[str, Any]:
    kept = example.metadata.get("original-train", {})
    reward = {"style": "rule", "ground_truth": list(example.answers)}
    return {
        "data_source": example.task,
        "prompt": _prompt(example.question),
        "context": example.text(),
        "ability": "memory",
        "extra_info": {
            "index": index,
            "question": example.question,
            "num_docs": len(example.passages),
        },
        **kept,
        "reward_model": {**reward, **kept.get("reward_model", {})},
    }


def _prompt(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def _write_rows(path: Path, part: Path, rows: Iterator[dict[str, Any]]) -> int:
    sample = list(islice(rows, SAMPLE_ROWS))
    num_written = 0
    with ExitStack() as stack:
        with disk_errors(path):
            writer = stack.enter_context(RowWriter(part, _schema(sample)))
        for row in chain(sample, rows):
            with disk_errors(path):
                writer.write(row, num_chars=len(row["context"]))
            num_written += 1
    return num_written


def _schema(sample: list[dict[str, Any]]) -> pa.Schema:
    """The published columns as they are; further ones as the first rows have them."""
    pa, _ = arrow()
    text, number = pa.string(), pa.int64()
    published = {
        "data_source": text,
        "prompt": pa.list_(pa.struct({"role": text, "content": text})),
        "context": text,
        "ability": text,
        "reward_model": pa.struct({"style": text, "ground_truth": pa.list_(text)}),
        "extra_info": pa.struct({"index": number, "question": text, "num_docs": number}),
    }
    columns: dict[str, Any] = {} if sample else dict(published)
    for name in dict.fromkeys(name for row in sample for name in row):
        values = [row.get(name) for row in sample]
        try:
            found = pa.array(values).type
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DataError(f"{name} differs in type from row to row: {error}") from None
        columns[name] = _merged(pa, published.get(name), found)
    return pa.schema(columns)


def _merged(pa: Any, published: Any, found: Any) -> Any:
    """The published type where the rows agree with it, with the fields they have beyond it."""
    if published is None or (pa.types.is_string(found) and not pa.types.is_string(published)):
        return found  # also a single answer where a list is usual
    if pa.types.is_struct(published) and pa.types.is_struct(found):
        known = {field.name: field.type for field in published}
        return pa.struct(
            [(field.name, _merged(pa, known.get(field.name), field.type)) for field in found]
        )
    return published


# --- evaluation files -----------------------------------------------------------------------------


class _EvalRecord(_Record):
    input: str
    context: str | list[int]
    answers: list[str] | None = None
    outputs: list[str] | None = None


def _from_eval(record: Any, path: Path, number: int, pool: _Pool, task: str | None) -> Example:
    checked = checked_record(_EvalRecord, record, path, number)
    where = place(path, number)
    if (checked.answers is None) == (checked.outputs is None):
        raise DataError(f"{where}: it needs answers (HotpotQA) or outputs (RULER), one of them")
    is_ruler = checked.outputs is not None
    name = task or (_ruler_task(path) if is_ruler else "hotpotqa")
    is_question_answering = not is_ruler or "/qa" in name
    left_out = {"input", "answers", "outputs"}
    if isinstance(checked.context, str):
        documents = split_documents(checked.context, have_titles=not is_ruler)
        left_out.add("context")
    else:
        documents = tuple(pool.document(index, where) for index in checked.context)
    return Example(
        id=f"{_stem(path)}/{number - 1}",
        task=name,
        question=checked.input,
        answers=tuple(checked.outputs if checked.outputs is not None else checked.answers or ()),
        match="any" if is_question_answering else "all",
        grader="lenient"
        if not is_ruler
        else "ruler_part"
        if is_question_answering
        else "ruler_all",
        documents=documents,
        target_tokens=_target(record, path),
        num_tokens=_number(record, "length"),
        metadata={
            "original-eval": {key: value for key, value in record.items() if key not in left_out}
        },
    )


def _target(record: dict[str, Any], path: Path) -> int | None:
    """The length that the file was generated for: its number of documents, or its tokens rounded up.

    Texts are a little shorter than requested: the length is one that the file or its folder names, or a power
    of two; None where there is none near.
    """
    num_docs, length = _number(record, "num_docs"), _number(record, "length")
    if num_docs is not None:
        return nominal_tokens(num_docs)
    if length is None:
        return None
    named = [int(digits) for digits in _DIGITS.findall(f"{path.parent.name}/{path.name}")]
    power = 1 << (length - 1).bit_length()
    near = [target for target in (*named, power) if LEAST_OF_TARGET * target <= length <= target]
    return min(near, default=None)


def _number(record: dict[str, Any], name: str) -> int | None:
    """A positive whole number of a record; None where it has none."""
    value = record.get(name)
    return value if type(value) is int and value > 0 else None


def _to_eval(index: int, example: Example) -> dict[str, Any]:
    kept: dict[str, Any] | None = example.metadata.get("original-eval")
    context = (kept or {}).get("context")  # numbers of documents stay numbers
    if context is None:
        example = rebuild(example)
        context = example.text()
    answers = list(example.answers)
    if example.grader.startswith("ruler"):
        record = {"index": index, "input": example.question, "context": context, "outputs": answers}
        further = {"answer_prefix": "", "length": example.num_tokens}
    else:
        record = {"context": context, "input": example.question, "answers": answers, "index": index}
        further = {"num_docs": len(example.documents or ())}
    return {**record, **(further if kept is None else kept)}


def _write_array(path: Path, part: Path, records: Iterator[dict[str, Any]]) -> int:
    num_written = 0
    with ExitStack() as stack:
        with disk_errors(path):
            write = stack.enter_context(text_file(part, is_packed=path.suffix == ".gz"))
        for record in records:
            with disk_errors(path):
                write(("[\n" if num_written == 0 else ",\n") + dump_json(record))
            num_written += 1
        write("[]\n" if num_written == 0 else "\n]\n")
    return num_written


# --- texts ----------------------------------------------------------------------------------------


def split_documents(context: str, *, have_titles: bool = True) -> tuple[Passage, ...]:
    """The numbered documents of a text; the whole as one where it does not have that form.

    They join to the text again, exactly.
    """
    _, *parts = _HEADING.split(context)
    numbers, bodies = parts[::2], parts[1::2]
    if numbers == [str(number) for number in range(1, len(bodies) + 1)]:
        passages = tuple(_titled(body) if have_titles else Passage(text=body) for body in bodies)
        if passages and join(passages) == context:
            return passages
    return (Passage(text=context),)


def _titled(body: str) -> Passage:
    title, newline, text = body.partition("\n")
    return Passage(title=title, text=text) if title and newline else Passage(text=body)


class _Pool:
    """The documents that evaluation files of the largest sizes number; read when first needed."""

    def __init__(self, path: str | Path | None) -> None:
        self._path = None if path is None else Path(path)
        self._documents: list[Passage] | None = None

    def document(self, index: int, where: str) -> Passage:
        """A document by its number."""
        if self._path is None:
            raise DataError(
                f"{where}: context holds numbers of documents; give the file that has them as "
                "`pool` (the HotpotQA file it was built from)"
            )
        if self._documents is None:
            self._documents = _pool_documents(self._path)
        if not 0 <= index < len(self._documents):
            raise DataError(
                f"{where}: there is no document {index} in {self._path}, which has "
                f"{len(self._documents):,}; name the file that it was built from"
            )
        return self._documents[index]


def _pool_documents(path: Path) -> list[Passage]:
    """Texts in the order of the file; of HotpotQA questions, the distinct paragraphs, sorted."""
    _, first = next(read_records(path), (0, None))
    if isinstance(first, dict) and "supporting_facts" in first:
        paragraphs = (one for item in hotpot_items(path) for one in item.context)
        return [
            _titled(text) for text in sorted({f"{one.title}\n{one.text}" for one in paragraphs})
        ]
    return [_pooled(record, place(path, number)) for number, record in read_records(path)]


def _pooled(record: Any, where: str) -> Passage:
    if isinstance(record, str):
        return _titled(record)
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return Passage(title=str(record.get("title", "")), text=record["text"])
    raise DataError(f"{where}: a document is a text, or an object with title and text")


# --- what they share ------------------------------------------------------------------------------


def _ruler_task(path: Path) -> str:
    """The task of RULER that a file's path names; just "ruler" where it names none."""
    names = sorted((name for name in TASKS if name.startswith("ruler/")), key=len, reverse=True)
    where = f"{path.parent.name}/{path.name}"
    return next((name for name in names if name.removeprefix("ruler/") in where), "ruler")


def _stem(path: Path) -> str:
    return path.name.partition(".")[0]


def _unknown(path: Path) -> DataError:
    return DataError(
        f"{path} is neither a dataset of memagent nor of the original project; name its format with "
        "`source_kind`"
    )


# --- conversion -----------------------------------------------------------------------------------

# convert_dataset("eval_200.json", "hotpotqa-200.jsonl").num_examples


class Conversion(NamedTuple):
    """What was converted."""

    num_examples: int
    source_kind: DatasetKind | BenchmarkKind
    target_kind: DatasetKind


def convert_dataset(
    source: str | Path,
    target: str | Path,
    *,
    source_kind: DatasetKind | BenchmarkKind | None = None,
    target_kind: DatasetKind | None = None,
    pool: str | Path | None = None,
    task: str | None = None,
) -> Conversion:
    """Write the examples of `source` to `target`.

    Kinds that are not given follow from the contents of `source` and from the name of `target`. `pool`
    and `task` are for files of the original project; see `read_original`.
    """
    source, target = Path(source), Path(target)
    if source.resolve() == target.resolve():
        raise ConfigError(f"{source} would be converted to itself; name another file to write")
    source_kind = source_kind or benchmark_of(source) or kind_of(source)
    if target_kind is None:
        is_array = target.name.endswith((".json", ".json.gz"))
        target_kind = "original-eval" if is_array else "memagent"
    if source_kind in get_args(BenchmarkKind):
        if pool:
            raise ConfigError(f"`pool` is for files of the original project; {source} is none")
        examples = read_benchmark(source, cast(BenchmarkKind, source_kind), task=task)
    elif source_kind == "memagent":
        if pool or task:
            raise ConfigError(
                f"`pool` and `task` are for files of the original project; {source} is ours"
            )
        examples = read_examples(source)
    else:
        examples = read_original(source, cast(DatasetKind, source_kind), pool=pool, task=task)
    if target_kind == "memagent":
        num_examples = write_examples(target, examples)
    else:
        num_examples = write_original(target, target_kind, examples)
    return Conversion(num_examples, source_kind, target_kind)

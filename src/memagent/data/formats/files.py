"""Examples in files: `.jsonl`, `.jsonl.gz` and `.parquet`, streamed, checked, the same bytes each time.

    write_examples("dev.jsonl", examples)
    for example in read_examples("dev.jsonl"): ...

One example per line, all fields in the order of `Example`, keys of free dicts sorted, UTF-8:

    {"id": "...", "task": "...", "question": "...", "answers": ["..."], ..., "metadata": {}}

In parquet the free dicts (`metadata`, the settings of the origin) are columns of JSON. A file is
written under another name and renamed when it is complete.
"""

from __future__ import annotations

import errno
import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, Self, cast

from pydantic import TypeAdapter, ValidationError

from memagent.data.example import Example
from memagent.data.formats.json_stream import numbered_lines, opened, parse_json, place
from memagent.errors import DataError, one_line
from memagent.files import make_folders, reason_of, replacing

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


# --- rows of a parquet file -----------------------------------------------------------------------

GROUP_CHARS = 1 << 24
"""Characters of text that a row group holds before the next one begins."""
GROUP_ROWS = 4096
BATCH_BYTES = 1 << 23
"""About how much is unpacked at once when reading."""


def arrow() -> tuple[ModuleType, ModuleType]:
    """pyarrow and pyarrow.parquet; an error that names the extra where they are missing."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            'parquet files need the library pyarrow: pip install "memagent[data]"'
        ) from None
    return pyarrow, pyarrow.parquet


def columns_of(path: Path) -> list[str]:
    """Names of the columns."""
    with _opened(path) as file:
        return list(file.schema_arrow.names)


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[int, Any]]:
    """Each row as a dict, with its number from 1; all columns unless some are named."""
    number = 0
    with _opened(path) as file:
        for group in range(file.num_row_groups):
            about = file.metadata.row_group(group)
            share = max(about.total_byte_size // BATCH_BYTES, 1)
            size = min(max(about.num_rows // share, 1), GROUP_ROWS)
            for batch in file.iter_batches(size, [group], columns, use_threads=False):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row


class RowWriter:
    """Writes rows in groups of bounded size."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._arrow, parquet = arrow()
        self._schema = schema
        self._writer = parquet.ParquetWriter(path, schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._num_chars = 0

    def write(self, row: dict[str, Any], *, num_chars: int) -> None:
        """Add a row; `num_chars` is its approximate size."""
        self._rows.append(row)
        self._num_chars += num_chars
        if self._num_chars >= GROUP_CHARS or len(self._rows) >= GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        """Write the remaining rows and the footer."""
        self._flush()
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self.close()
        else:
            self._writer.close()

    def _flush(self) -> None:
        if not self._rows:
            return
        try:
            table = self._arrow.Table.from_pylist(self._rows, schema=self._schema)
        except (self._arrow.ArrowInvalid, self._arrow.ArrowTypeError, OverflowError) as error:
            raise DataError(f"a row does not fit the columns: {one_line(error)}") from None
        self._writer.write_table(table)
        self._rows, self._num_chars = [], 0


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    pyarrow, parquet = arrow()
    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is damaged or not a parquet file: {one_line(error)}") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {one_line(error)}") from None


_FIELDS = tuple(field.name for field in fields(Example))
_example = TypeAdapter(Example)

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def read_examples(path: str | Path) -> Iterator[Example]:
    """The examples of a file in its order, each checked; errors name the line or row."""
    path = Path(path)
    return _format_of(path).read(path)


def write_examples(path: str | Path, examples: Iterable[Example]) -> int:
    """Write examples; how many. The file appears when it is complete."""
    with ExampleWriter(path) as writer:
        for example in examples:
            writer.write(example)
    return writer.num_written


class ExampleWriter:
    """Writes examples one by one. The file appears when the `with` block ends well."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.num_written = 0
        self._open = _format_of(self.path).write
        self._stack = ExitStack()
        self._write: Callable[[Example], None] | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            part = stack.enter_context(replacing_dataset(self.path))
            with disk_errors(self.path):
                self._write = stack.enter_context(self._open(part))
            self._stack = stack.pop_all()
        return self

    def write(self, example: Example) -> None:
        """Add an example."""
        assert self._write is not None, "use the writer in a `with` block"
        with disk_errors(self.path):
            self._write(example)
        self.num_written += 1

    def __exit__(self, *exception: Any) -> None:
        self._write = None
        with disk_errors(self.path):
            self._stack.__exit__(*exception)


def to_json(example: Example) -> str:
    """An example as one line without its end; the same example gives the same line."""
    return dump_json(_plain(example, _sorted))


def from_json(line: str | bytes, where: str) -> Example:
    """The example that a line holds, checked; `where` names the line in errors."""
    try:
        example = _example.validate_json(line)
    except ValidationError as error:
        raise DataError(f"{where}: {_explain(error)}") from None
    if not example.documents and example.origin is not None:
        example = replace(example, documents=None)  # left out of the line
    return check_evidence(example, where)


def check_evidence(example: Example, where: str) -> Example:
    """The example; an error if its evidence does not match its documents."""
    if example.documents is None:
        return example
    for number, item in enumerate(example.evidence):
        if not 0 <= item.document < len(example.documents):
            raise DataError(
                f"{where}: evidence.{number} is in document {item.document}, "
                f"but there are {len(example.documents)}"
            )
        if (
            item.start < 0
            or example.documents[item.document].text[item.start : item.end] != item.text
        ):
            raise DataError(
                f"{where}: evidence.{number} differs from characters {item.start} to {item.end} of "
                f"document {item.document}"
            )
    return example


def dump_json(value: Any) -> str:
    """JSON as we write it: letters as they are, no NaN."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


@contextmanager
def replacing_dataset(path: Path) -> Iterator[Path]:
    """A path to write to, as of `memagent.files.replacing`, in a folder that is created if needed."""
    with ExitStack() as stack:
        with disk_errors(path):
            make_folders(path.parent)
            part = stack.enter_context(replacing(path))
        yield part
        with disk_errors(path):
            stack.close()


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """What the disk refuses, as a DataError of one line."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in DISK_FULL
        hint = "; free some space and run it again" if is_full else ""
        raise DataError(f"cannot write {path}: {reason_of(error)}{hint}") from None


@contextmanager
def text_file(path: Path, *, is_packed: bool) -> Iterator[Callable[[str], None]]:
    """Writes text to a file, gzipped or not; the same text gives the same bytes."""
    with ExitStack() as stack:
        file: IO[bytes] = stack.enter_context(path.open("wb"))
        if is_packed:
            packed = gzip.GzipFile("", "wb", 6, file, mtime=0)  # no name, no time in its head
            file = cast(IO[bytes], stack.enter_context(packed))

        def write(text: str) -> None:
            try:
                file.write(text.encode("utf-8"))
            except UnicodeEncodeError as error:
                raise DataError(
                    f"an example has a lone surrogate ({text[error.start]!r}), which UTF-8 cannot "
                    "hold; repair its source"
                ) from None

        yield write


# --- formats --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    read: Callable[[Path], Iterator[Example]]
    write: Callable[[Path], Any]
    """A context manager that gives the function which writes one example."""


def _read_jsonl(path: Path) -> Iterator[Example]:
    with opened(path) as stream:
        for number, line in numbered_lines(stream, path):
            if line.strip():
                yield from_json(line, place(path, number))


@contextmanager
def _jsonl_writer(path: Path, *, is_packed: bool = False) -> Iterator[Callable[[Example], None]]:
    with text_file(path, is_packed=is_packed) as write:
        yield lambda example: write(to_json(example) + "\n")


def _read_parquet(path: Path) -> Iterator[Example]:
    names = _FIELDS
    if missing := [name for name in names if name not in columns_of(path)]:
        raise DataError(
            f"{path} is not a dataset of memagent: it has no column {missing[0]}; "
            "`memagent data convert` reads other formats"
        )
    for number, row in read_rows(path, names):
        where = place(path, number)
        row["metadata"] = parse_json(row["metadata"] or "{}", where)
        if row["origin"] is not None:
            for name in ("settings", "sources"):
                row["origin"][name] = parse_json(row["origin"][name] or "{}", where)
        try:
            example = _example.validate_python(row, strict=False)
        except ValidationError as error:
            raise DataError(f"{where}: {_explain(error)}") from None
        yield check_evidence(example, where)


@contextmanager
def _parquet_writer(path: Path) -> Iterator[Callable[[Example], None]]:
    with RowWriter(path, _schema()) as rows:

        def write(example: Example) -> None:
            row = _plain(example, lambda free: dump_json(_sorted(free)))
            num_chars = sum(len(passage.text) for passage in example.documents or ())
            rows.write(row, num_chars=num_chars + 1000)

        yield write


def _schema() -> pa.Schema:
    pa, _ = arrow()
    text, number = pa.string(), pa.int64()
    passage = pa.struct({"text": text, "title": text})
    evidence = pa.struct(
        {"document": number, "start": number, "end": number, "text": text, "note": text}
    )
    origin = pa.struct({"task": text, "settings": text, "index": number, "sources": text})
    special = {
        "answers": pa.list_(text),
        "documents": pa.list_(passage),
        "evidence": pa.list_(evidence),
        "origin": origin,
        "target_tokens": number,
        "num_tokens": number,
        "seed": number,
    }
    return pa.schema([(name, special.get(name, text)) for name in _FIELDS])


FORMATS: dict[str, _Format] = {
    ".jsonl": _Format(read=_read_jsonl, write=_jsonl_writer),
    ".jsonl.gz": _Format(read=_read_jsonl, write=lambda path: _jsonl_writer(path, is_packed=True)),
    ".parquet": _Format(read=_read_parquet, write=_parquet_writer),
}
"""Endings of dataset files."""


def _format_of(path: Path) -> _Format:
    for ending, format in FORMATS.items():
        if path.name.endswith(ending):
            return format
    raise DataError(f"{path}: a dataset ends in {', '.join(FORMATS)}; rename it or convert it")


# --- values ---------------------------------------------------------------------------------------


def _plain(example: Example, free: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """An example as dicts and lists, in the order of its fields; what `free` makes of dicts with any keys."""
    record = asdict(example)
    record["metadata"] = free(example.metadata)
    if example.origin is not None:
        record["origin"]["settings"] = free(example.origin.settings)
        record["origin"]["sources"] = free(example.origin.sources)
    return record


def _sorted(value: Any) -> Any:
    """Keys of dicts in order, however deep."""
    if isinstance(value, dict):
        return {str(key): _sorted(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_sorted(item) for item in value]
    return value


def _explain(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "unexpected_keyword_argument":
        return f"{name} is not known; has it been written by a later version of memagent?"
    message = problem["msg"][:1].lower() + problem["msg"][1:]
    return f"{name}: {message}" if name else message

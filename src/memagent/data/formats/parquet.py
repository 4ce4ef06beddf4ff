"""Rows of a parquet file, one after another in both directions, in little memory.

for number, row in read_rows(path): ...
with RowWriter(path, schema) as rows:
    rows.write({"question": "..."}, num_chars=3)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

from memagent.errors import DataError, one_line

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

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

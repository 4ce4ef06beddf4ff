"""JSON records of a file, one after another: an array of any size, or a line each, plain or gzipped.

    for number, record in read_records(path): ...      # counted from 1, as errors name them

    [{...}, {...},          a window of the file slides over the array; memory is that of one record
     {...}, ...]

Damage (a truncated file, not JSON, not gzip, not UTF-8) is an error of one line that names file and place.

Why not ijson: it is as fast, but it replaces lone surrogates by "?" without a word, has no integers above 64
bits beside floats, and a file of 100 kB with deep nesting exhausts the memory.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar, cast

from pydantic import BaseModel, ValidationError

from memagent.errors import DataError

GZIP_MAGIC = b"\x1f\x8b"
BLOCK_BYTES = 1 << 18
"""How much of an array is read at once."""
NEAR_END = 16
"""An error this close to the end of what was read may be a truncated literal."""
_space = re.compile(r"[ \t\n\r]*")


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked if it is gzip; errors in the block become DataErrors."""
    try:
        with path.open("rb") as raw:
            is_gzip = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            if not is_gzip:
                yield raw
                return
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield cast(IO[bytes], unpacked)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise DataError(f"{path} is a folder; name a file") from None
    except EOFError:
        raise DataError(f"{path} is truncated: its gzip data ends early; fetch it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged ({error}); fetch it again") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error.reason}); repair it") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


def read_records(path: Path, *, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, Any]]:
    """Each record with its number from 1: those of a JSON array, or the lines of a JSONL file.

    An array is read `block_bytes` at a time; more while a record is longer.
    """
    with opened(path) as stream:
        head = _first_char(stream)
        if not head:
            raise DataError(f"{path} is empty")
        if head == b"[":
            yield from _array(_Window(stream, path, block_bytes))
        else:
            for number, line in numbered_lines(stream, path):
                if line.strip():
                    yield number, parse_json(line, place(path, number))


def numbered_lines(stream: IO[bytes], path: Path) -> Iterator[tuple[int, bytes]]:
    """Each line with its number from 1."""
    number = 0
    try:
        for line in stream:
            number += 1
            yield number, line
    except EOFError:
        raise DataError(
            f"{path} is truncated after line {number}: its gzip data ends early; fetch it again"
        ) from None


def place(path: Path, number: int) -> str:
    """Where a record is, for errors: by line in a JSONL file, by row or record elsewhere."""
    has_lines = path.name.endswith((".jsonl", ".jsonl.gz"))
    unit = "line" if has_lines else "row" if path.suffix == ".parquet" else "record"
    return f"{path}, {unit} {number}"


def parse_json(text: str | bytes, where: str) -> Any:
    """The value of a JSON text, strictly: NaN and Infinity are errors."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 ({error.reason})") from None
    except RecursionError:
        raise DataError(f"{where}: nested too deeply") from None
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error})") from None


M = TypeVar("M", bound=BaseModel)


def checked_record(schema: type[M], record: Any, path: Path, number: int) -> M:
    """A record that satisfies a schema; an error names the field."""
    try:
        return schema.model_validate(record)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(str(part) for part in problem["loc"]) or "the record"
        raise DataError(f"{place(path, number)}: {name}: {problem['msg'].lower()}") from None


def _first_char(stream: IO[bytes]) -> bytes:
    """The first byte that is not space, without consuming it; empty at the end."""
    while char := stream.read(1):
        if char.strip():
            stream.seek(-1, 1)
            return char
    return b""


def _array(window: _Window) -> Iterator[tuple[int, Any]]:
    window.expect("[")
    while window.next_char() != "]":
        if window.number > 0:
            window.expect(",")
        yield window.number + 1, window.value()
        window.number += 1
    window.expect("]")
    if window.next_char():
        window.refuse("something follows the end of the array")


class _Window:
    """The part of a file that is being decoded."""

    def __init__(self, stream: IO[bytes], path: Path, block_bytes: int) -> None:
        self.number = 0
        """Records decoded so far."""
        self._stream = stream
        self._path = path
        self._decode = codecs.getincrementaldecoder("utf-8")()
        self._decoder = json.JSONDecoder(parse_constant=_no_constant)
        self._text = ""
        self._at = 0
        self._block_bytes = block_bytes
        self._block = block_bytes
        self._is_at_end = False

    def next_char(self) -> str:
        """The next character that is not space; empty at the end."""
        while True:
            self._at = _space.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or self._is_at_end:
                return self._text[self._at : self._at + 1]
            self._fill()

    def expect(self, char: str) -> None:
        """Take a character that must come next."""
        found = self.next_char()
        if found != char:
            self.refuse(f"expected {char!r}, found {found!r}" if found else "it is truncated")
        self._at += 1

    def value(self) -> Any:
        """Take a value."""
        if self.next_char() not in ("{", "[", '"'):  # a truncated number would look complete
            self.refuse("a record must be an object, an array or a string")
        self._block = self._block_bytes
        while True:
            try:
                value, self._at = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                may_go_on = error.msg.startswith("Unterminated") or (
                    error.pos >= len(self._text) - NEAR_END
                )
                if self._is_at_end:
                    self.refuse(f"it is truncated, or not JSON ({error.msg})")
                if not may_go_on:
                    self.refuse(f"not JSON ({error.msg})")
                self._fill()
                self._block *= 2  # so that a long record is not decoded too often
            except ValueError as error:
                self.refuse(f"not JSON ({error})")
            except RecursionError:
                self.refuse("nested too deeply")
            else:
                return value

    def _fill(self) -> None:
        try:
            data = self._stream.read(self._block)
        except EOFError:
            self.refuse("the file is truncated: its gzip data ends early; fetch it again")
        self._is_at_end = not data
        self._text = self._text[self._at :] + self._decode.decode(data, final=not data)
        self._at = 0

    def refuse(self, reason: str) -> NoReturn:
        """An error at the record that comes next."""
        raise DataError(f"{self._path}, record {self.number + 1}: {reason}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")

"""The header of a GGUF file, read with limits: files come from strangers.

    little-endian:  "GGUF" | version | number of tensors | number of fields
                    fields:   name, type, value
                    tensors:  name, sizes (columns first), type, offset in the data
                    padding to the alignment, then the data

Every count is compared with the bytes that are left before anything is allocated.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
HEADER_BYTES = 32 << 20
"""Maximum size of a header; those of today's models have up to 15 MB."""
MAX_DIMENSIONS = 4
STRING, ARRAY = 8, 9
SCALARS: dict[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""GGUF's number of a type, and numpy's name."""


class GgufDamage(ValueError):
    """The file does not follow the format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Location of a weight in the file."""

    name: str
    """GGUF's name, such as "blk.0.attn_q.weight"."""
    shape: tuple[int, ...]
    """In torch's order: rows first."""
    kind: int
    """GGML's number of the storage type."""
    offset: int
    """First byte in the file."""

    @property
    def num_bytes(self) -> int:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(self.kind)]
        return math.prod(self.shape) // block * size


class GgufContents(NamedTuple):
    """What a header says."""

    fields: dict[str, Any]
    tensors: list[GgufTensor]


def read_contents(path: Path) -> GgufContents:
    """The header of a file. Raises GgufDamage where it does not follow the format."""
    with path.open("rb") as file:
        cursor = _Cursor(file.read(HEADER_BYTES))
    if cursor.take(4) != MAGIC:
        raise GgufDamage("it does not begin with GGUF")
    version = cursor.number("<I")
    if version not in VERSIONS:
        raise GgufDamage(f"version {version} is not known")
    num_tensors, num_fields = cursor.number("<Q"), cursor.number("<Q")
    fields: dict[str, Any] = {}
    for _ in range(cursor.checked_count(num_fields, num_bytes=13)):
        name = cursor.text()
        if name in fields:
            raise GgufDamage(f"the field {name[:80]!r} is there twice")
        fields[name] = cursor.value(cursor.number("<I"))
    infos = [cursor.tensor() for _ in range(cursor.checked_count(num_tensors, num_bytes=24))]
    start = cursor.place + -cursor.place % _alignment(fields)
    tensors = [
        GgufTensor(name=name, shape=shape, kind=kind, offset=start + offset)
        for name, shape, kind, offset in infos
    ]
    _check_tensors(tensors)
    return GgufContents(fields, tensors)


class _Cursor:
    """Reads the header piece by piece."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.place = 0

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > len(self.data) - self.place:
            reason = "is longer than 32 MB" if len(self.data) == HEADER_BYTES else "ends too early"
            raise GgufDamage(f"the header {reason}")
        self.place += num_bytes
        return self.data[self.place - num_bytes : self.place]

    def number(self, form: str) -> int:
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return int(value)

    def checked_count(self, count: int, *, num_bytes: int) -> int:
        """A count of things that take at least so many bytes each."""
        if count * num_bytes > len(self.data) - self.place:
            raise GgufDamage(f"{count} entries do not fit the header")
        return count

    def text(self) -> str:
        try:
            return self.take(self.number("<Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise GgufDamage("a string is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            inner = self.number("<I")
            return self._array(inner, self.number("<Q"))
        return self._scalars(kind, 1)[0]

    def _array(self, kind: int, length: int) -> list[Any]:
        if kind == STRING:
            return [self.text() for _ in range(self.checked_count(length, num_bytes=8))]
        return self._scalars(kind, length)

    def _scalars(self, kind: int, length: int) -> list[Any]:
        if kind not in SCALARS:
            raise GgufDamage(f"values of type {kind} are not known")
        form = np.dtype(SCALARS[kind])
        data = self.take(self.checked_count(length, num_bytes=form.itemsize) * form.itemsize)
        values: list[Any] = np.frombuffer(data, dtype=form).tolist()
        return values

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_sizes = self.text(), self.number("<I")
        if not 1 <= num_sizes <= MAX_DIMENSIONS:
            raise GgufDamage(f"{name[:80]!r} has {num_sizes} dimensions")
        sizes = [self.number("<Q") for _ in range(num_sizes)]
        return name, tuple(reversed(sizes)), self.number("<I"), self.number("<Q")


def _alignment(fields: dict[str, Any]) -> int:
    alignment = fields.get("general.alignment", ALIGNMENT)
    is_power = isinstance(alignment, int) and alignment > 0 and alignment & (alignment - 1) == 0
    if not is_power or alignment > MAX_ALIGNMENT:
        raise GgufDamage(f"an alignment of {alignment!r:.80} is not possible")
    return int(alignment)


def _check_tensors(tensors: Sequence[GgufTensor]) -> None:
    """Each has a name of its own, a known type, whole blocks, and bytes that no other one has."""
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise GgufDamage("a weight is there twice")
    kinds = {kind.value: kind for kind in GGML_QUANT_SIZES}
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.kind not in kinds:
            raise GgufDamage(f"{tensor.name[:80]!r} is stored as type {tensor.kind}, not known")
        block, _ = GGML_QUANT_SIZES[kinds[tensor.kind]]
        if min(tensor.shape) < 1 or max(tensor.shape) >= 1 << 32 or tensor.shape[-1] % block:
            raise GgufDamage(f"{tensor.name[:80]!r} has a size of {tensor.shape}")
        if tensor.offset < end:
            raise GgufDamage(f"{tensor.name[:80]!r} overlaps another weight")
        end = tensor.offset + tensor.num_bytes

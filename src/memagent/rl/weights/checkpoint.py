"""Checkpoints of a run: each is complete or does not exist, and older ones are removed.

    RUN/checkpoints/
      warm-000140/               after step 140 of the warm start
      step-000010/               after step 10 of reinforcement learning
        state.json               progress of the trainer, and the version that wrote it
        optimizer.safetensors    state of the optimizer; or
        optimizer/               the same of several ranks, in the shards of torch.distributed.checkpoint
        model/                   all weights, as a Hugging Face folder with its tokenizer; or
        adapter/                 a LoRA folder of peft, where an adapter is trained
      .step-000020/              incomplete, left by a crash; removed at the next write

    with new_checkpoint(run, "step-000010", state={"position": 160}, keep=2, kept="step-000005") as part:
        write_weights(model, tokenizer, part)
        write_optimizer(optimizer.state_dict(), part)
    checkpoint = latest_checkpoint(run)
    load_weights(model, checkpoint)
    optimizer.load_state_dict(read_optimizer(checkpoint, optimizer.state_like))
    export(find_checkpoint(run), Path("my-model"), merge=True)

A folder gets its name when all of it is on disk; only then are older checkpoints removed. Weights are
written in their own precision and restored bit for bit.
"""

from __future__ import annotations

import base64
import copy
import json
import os
import random
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from memagent._version import __version__
from memagent.engines import store
from memagent.engines.llamacpp.adapters import PREFIX, WEIGHTS, write_adapter
from memagent.engines.local.gguf_files import open_header
from memagent.engines.local.loading import LoadedModel, load, quietly
from memagent.errors import ConfigError, RunError, one_line
from memagent.files import make_folders, reason_of, replacing_folder
from memagent.foreign import foreign_file
from memagent.rl.weights.models import gathered, like
from memagent.run_files import check_tree, make_folder, read_file
from memagent.tracking import METRICS, read_metrics

if TYPE_CHECKING:
    from memagent.rl.weights.gguf_export import GgufKind

FORMAT = 1
CHECKPOINTS = "checkpoints"
STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"
SHARDS = "optimizer"
MODEL = "model"
ADAPTER = "adapter"
LOADING_KEYS = ("backend", "is_local", "local_files_only")
"""How a tokenizer was loaded, which transformers saves with it; removed."""
NAME = re.compile(r"(warm|step)-(\d{6,})")


@contextmanager
def new_checkpoint(
    run: Path,
    name: str,
    *,
    state: Mapping[str, Any],
    keep: int,
    kept: str | None = None,
) -> Iterator[Path]:
    """A folder for weights and optimizer, which is the checkpoint when the block ends.

    Then all but the newest `keep`, and `kept`, are removed. `state` must be serializable as JSON.
    """
    folder = run / CHECKPOINTS
    path = folder / name
    with disk_errors(path):
        make_folders(run, mode=0o700)
        make_folder(run, CHECKPOINTS)
        for incomplete in folder.glob(".*"):
            shutil.rmtree(incomplete)
        with replacing_folder(path) as part:
            yield part
            header = {"format": FORMAT, "memagent": __version__}
            text = json.dumps({**header, "state": dict(state)}, ensure_ascii=False)
            (part / STATE).write_text(text, encoding="utf-8")
        for old in list_checkpoints(run)[:-keep]:
            if old.name != kept:
                hidden = old.with_name(f".{old.name}")
                old.rename(hidden)  # atomic, unlike the removal of its files
                shutil.rmtree(hidden)


def list_checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, in the order of its steps: the warm start comes first."""
    folder = check_tree(run / CHECKPOINTS)
    found = (
        [path for path in folder.iterdir() if NAME.fullmatch(path.name)] if folder.is_dir() else []
    )
    return sorted(found, key=lambda path: (path.name.startswith("step"), _number(path)))


def latest_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint, if there is one."""
    return next(reversed(list_checkpoints(run)), None)


def find_checkpoint(run: Path, step: int | None = None, *, best: bool = False) -> Path:
    """The checkpoint of a step, by default the newest; refused in one line if there is none.

    A step of the warm start is found where reinforcement learning has no checkpoint of that number.
    `best` finds the one with the highest validation reward. The folder of an adapter is taken as it is.
    """
    if not run.is_dir():
        raise RunError(f"{run} is not a run folder")
    if step is None and not best and _is_adapter(run):
        return run
    found = list_checkpoints(run)
    if not found:
        raise RunError(f"{run} has no checkpoint yet")
    if best:
        return _best_of(run, found)
    if step is None:
        return found[-1]
    fitting = [path for path in found if _number(path) == step]
    if not fitting:
        names = ", ".join(path.name for path in found)
        raise ConfigError(f"there is no checkpoint of step {step}; there are {names}")
    return fitting[-1]


class BestValidation(NamedTuple):
    """The validation with the highest reward."""

    step: int
    """After which it ran; 0 is before the first."""
    reward: float


def best_of_run(run: Path) -> BestValidation | None:
    """The best validation in the metrics of a run; of equal ones the first. Raises RunError where they are damaged."""
    with foreign_file(run / METRICS, "is damaged", error=RunError):
        rewards = {
            int(record["step"]): float(record["reward"])
            for record in read_metrics(run)
            if record["kind"] == "validation"
        }
    if not rewards:
        return None
    return BestValidation(*max(rewards.items(), key=lambda item: item[1]))


def _best_of(run: Path, found: Sequence[Path]) -> Path:
    best = best_of_run(run)
    if best is None:
        raise RunError(f"{run} has no validation, so no checkpoint is the best")
    fitting = [
        path
        for path in found
        if path.name.startswith("warm" if best.step == 0 else "step")
        and (best.step == 0 or _number(path) == best.step)
    ]
    if not fitting:
        when = f"after step {best.step}" if best.step else "before the first step"
        raise RunError(
            f"{run}: the best validation is that {when}, with a reward of {best.reward:.3f}, and there is "
            "no checkpoint of it"
        )
    return fitting[-1]


def _number(path: Path) -> int:
    return int(path.name.partition("-")[2])


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The `state` that was saved."""
    path = checkpoint / STATE
    try:
        contents = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"cannot read {path}: {one_line(error)}; remove {checkpoint}") from None
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        raise RunError(f"{path} has a format this version of memagent does not know")
    state = contents.get("state")
    if not isinstance(state, dict):
        raise RunError(f"{path} is damaged; remove {checkpoint}")
    return state


def write_optimizer(state: Mapping[str, torch.Tensor], part: Path) -> None:
    """Write the whole state of an optimizer into a new checkpoint."""
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, part / OPTIMIZER)


def write_shards(state: Mapping[str, torch.Tensor], part: Path) -> None:
    """Write the shards of an optimizer's state into a new checkpoint. All ranks must call it."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(path=str(part / SHARDS), save_distributed=True)
    with _quiet_shards():
        save(dict(state), storage_writer=writer)


def read_optimizer(
    checkpoint: Path, state_like: Callable[[Iterable[str]], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """The state of the optimizer, as one process or several ranks wrote it.

    `state_like` makes the tensors that stored shards are read into, which may be shards themselves, on any
    number of ranks; then all ranks must call it. A state that one process wrote is whole, on the CPU.
    """
    folder = checkpoint / SHARDS
    if not folder.is_dir():
        return _read_tensors(checkpoint / OPTIMIZER)
    from torch import distributed as dist
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    # safetensors: the default format of torch has a pickled file
    reader = HuggingFaceStorageReader(path=str(folder))
    with _quiet_shards(), foreign_file(folder, f"is damaged; remove {checkpoint}", error=RunError):
        state = state_like(reader.read_metadata().state_dict_metadata)
        load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    return state


@contextmanager
def _quiet_shards() -> Iterator[None]:
    """torch warns where a process reads or writes shards alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
        yield


def load_weights(model: Any, checkpoint: Path) -> None:
    """Put the values of a checkpoint into the parameters of a model, in place.

    The model must be the one that was saved: the same names, shapes and precision.
    """
    folder = _weights_folder(checkpoint)
    has_adapter = _has_adapter(model)
    if has_adapter != (folder.name == ADAPTER):
        what = "an adapter" if folder.name == ADAPTER else "a whole model"
        raise RunError(f"{checkpoint} contains {what}; resume with the settings of the run")
    own = _adapter_weights(model) if has_adapter else dict(model.named_parameters())
    stored: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored |= _read_tensors(path)
    kinds = [
        {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        for tensors in (own, stored)
    ]
    if wrong := [name for name, _ in kinds[0].items() ^ kinds[1].items()]:
        raise RunError(
            f"{checkpoint} has another model or precision: {min(wrong)} differs; resume with the "
            "settings of the run"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(like(tensor, stored[name]))


def export(checkpoint: Path, out: Path, *, merge: bool = False, model: str | None = None) -> None:
    """Write the model or adapter of a checkpoint to a new folder, with tokenizer and chat template.

    With `merge`, an adapter is merged into its model, which must be on this machine, and the whole model is
    written in the precision that it is stored in. `model` names it where the adapter's own name for it is not known here.
    """
    folder = _weights_folder(checkpoint)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise RunError(f"{out} already exists; name a new folder")
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing_folder(out) as part:
            if merge and _is_adapter(folder):
                base = _base_of(folder, model)
                loaded = _load_merged(folder, base)
                with quietly():
                    whole: Any = loaded.model
                    whole.to(_stored_dtype(base, loaded)).save_pretrained(part)
                    _write_tokenizer(loaded.tokenizer, part)
            else:
                shutil.copytree(folder, part, dirs_exist_ok=True)


def export_gguf(
    checkpoint: Path, out: Path, *, kind: GgufKind | None, model: str | None = None
) -> None:
    """Write the model of an adapter, merged, as one GGUF file, or, without a kind, the adapter itself.

    The model must be a GGUF file on this machine.
    """
    folder = _weights_folder(checkpoint)
    if out.exists():
        raise RunError(f"{out} already exists; name a new file")
    if not _is_adapter(folder):
        raise ConfigError(
            f"{checkpoint} contains a whole model, not an adapter of a GGUF file; export it as a folder, which "
            "llama.cpp's converter reads"
        )
    source = store.find(base := _base_of(folder, model))
    if source is None or not source.is_file():
        raise ConfigError(
            f"the adapter's model {base} is no GGUF file here, so there is no header to copy; export it with "
            "`merge`, and convert the folder with llama.cpp's converter"
        )
    from memagent.rl.weights.gguf_export import write_gguf

    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        if kind is None:
            write_adapter(folder, source, open_header(source), out)
            return
        loaded = _load_merged(folder, base)
        write_gguf(loaded, out, source=source, kind=kind)


def random_state() -> dict[str, Any]:
    """State of the global random generators, as JSON. Only agents and rewards of users draw from these."""
    version, values, gauss = random.getstate()
    torch_state = torch.get_rng_state().numpy().tobytes()
    numpy_state: Any = np.random.get_state(legacy=True)
    kind, keys, *rest = numpy_state
    return {
        "python": [version, list(values), gauss],
        "torch": base64.b64encode(torch_state).decode("ascii"),
        "numpy": [kind, keys.tolist(), *rest],
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Put the global random generators into a saved state."""
    version, values, gauss = state["python"]
    random.setstate((version, tuple(values), gauss))
    stored = np.frombuffer(base64.b64decode(state["torch"]), dtype=np.uint8)
    torch.set_rng_state(torch.from_numpy(stored.copy()))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


# --- weights --------------------------------------------------------------------------------------


def _has_adapter(model: Any) -> bool:
    return bool(getattr(model, "peft_config", None))


def write_weights(model: Any, tokenizer: Any, part: Path, *, is_writer: bool = True) -> None:
    """Write the weights of a model, or of its adapter, into a new checkpoint.

    All processes that share the model must call it, and one of them writes.
    """
    folder = part / (ADAPTER if _has_adapter(model) else MODEL)
    named = _adapter_weights(model) if _has_adapter(model) else dict(model.named_parameters())
    weights = gathered(named.items(), is_kept=is_writer)
    if not is_writer:
        return
    with quietly():
        if _has_adapter(model):
            _write_adapter(model, weights, folder)
        else:
            model.save_pretrained(folder, state_dict=weights)
        _write_tokenizer(tokenizer, folder)


def _write_tokenizer(tokenizer: Any, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config = {name: value for name, value in config.items() if name not in LOADING_KEYS}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that transformers 4 knows
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_adapter(model: Any, folder: Path) -> None:
    """Write the adapter of a model in the format of peft."""
    _write_adapter(model, _adapter_weights(model), folder)


def save_adapter_config(model: Any, folder: Path) -> None:
    """Write the settings of a model's adapter, without its weights."""
    (config,) = model.peft_config.values()
    config = copy.copy(config)
    base = Path(model.name_or_path)
    config.base_model_name_or_path = str(base.resolve() if base.exists() else base)
    config.save_pretrained(str(folder))


def _write_adapter(model: Any, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    save_adapter_config(model, folder)
    whole = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})


def _adapter_weights(model: Any) -> dict[str, torch.Tensor]:
    """The adapter's tensors, by the names under which peft stores them."""
    from peft import get_peft_model_state_dict

    weights = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {f"{PREFIX}{name}": tensor for name, tensor in weights.items()}


def _is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


def _base_of(adapter: Path, model: str | None) -> str:
    """The model of an adapter, which must be on this machine."""
    from peft import PeftConfig

    base = model or str(PeftConfig.from_pretrained(str(adapter)).base_model_name_or_path)
    if store.find(base) is None:
        raise ConfigError(
            f"the adapter's model {base} is not on this machine; name it with `model`"
        )
    return base


def _load_merged(adapter: Path, base: str) -> LoadedModel:
    """The model of an adapter with the adapter merged into it, in float32."""
    return load(base, adapter=str(adapter), merged=True, dtype=torch.float32)


def _stored_dtype(base: str, loaded: LoadedModel) -> torch.dtype:
    """The precision of a model's files; bfloat16 for GGUF files, which are quantized."""
    path = store.find(base)
    if path is not None and path.is_file():
        return torch.bfloat16
    config = json.loads((loaded.tokenizer_folder / "config.json").read_text(encoding="utf-8"))
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _weights_folder(checkpoint: Path) -> Path:
    if _is_adapter(checkpoint):
        return checkpoint
    for name in (MODEL, ADAPTER):
        if (checkpoint / name).is_dir():
            return checkpoint / name
    raise RunError(f"{checkpoint} is not a checkpoint: it has neither {MODEL} nor {ADAPTER}")


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise RunError(f"cannot read {path}: {error}; remove {path.parent}") from None


# --- folders --------------------------------------------------------------------------------------


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise RunError if writing weights fails because of the disk."""
    try:
        yield
    except Exception as error:  # libraries that write weights raise their own types
        found = re.search(r"\(os error (\d+)\)", str(error))
        if isinstance(error, OSError):
            reason = reason_of(error)
        elif found is not None:
            reason = os.strerror(int(found[1]))
        else:
            raise
        raise RunError(f"cannot write {path}: {reason}; what was there before is kept") from None

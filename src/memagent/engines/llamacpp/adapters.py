"""LoRA adapters as GGUF files for llama.cpp, written from the folders that peft saves.

    adapter_file(folder, Path("base.gguf"), open_header(Path("base.gguf")))     # in the cache, written once
    write_adapter(folder, base, header, out)

Rows of Llama's queries and keys are in the order of the base file. Nothing but numpy is needed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFType, GGUFWriter
from platformdirs import user_cache_path

from memagent.engines.local.gguf_files import GgufHeader, known_name, permuted
from memagent.errors import ConfigError
from memagent.files import evict_oldest, mark_used, replacing
from memagent.foreign import foreign_file, plain

WEIGHTS, INDEX = "adapter_model.safetensors", "adapter_model.safetensors.index.json"
PREFIX = "base_model.model."
FORMAT = 1
"""Version of the files in the cache; incremented when their contents change."""
MAX_CACHE_BYTES = 500_000_000
SECONDS = 60.0
MORE_THAN_LORA = (
    *(
        "use_dora",
        "lora_bias",
        "fan_in_fan_out",
        "rank_pattern",
        "alpha_pattern",
        "modules_to_save",
    ),
    *("layer_replication", "megatron_config"),
)
"""Settings of peft that a GGUF file has no place for."""


def adapter_file(folder: Path, base: Path, header: GgufHeader) -> Path:
    """The GGUF file of an adapter for a base model, in the cache."""
    digest = hashlib.sha256(header.folder.name.encode())
    for file in [_config_file(folder), *_weight_files(folder)]:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    path = (
        user_cache_path("memagent", appauthor=False)
        / "adapters"
        / f"{digest.hexdigest()[:32]}-{FORMAT}.gguf"
    )
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_adapter(folder, base, header, path)
        evict_oldest(path.parent, max_bytes=MAX_CACHE_BYTES, keep=path)
    mark_used(path)
    return path


def write_adapter(folder: Path, base: Path, header: GgufHeader, out: Path) -> None:
    """Write an adapter as a GGUF file for a base model."""
    with foreign_file(folder, "is not an adapter for llama.cpp", seconds=SECONDS):
        alpha = _alpha(folder)
        shapes = {known_name(tensor): tensor for tensor in header.tensors}
        with replacing(out, sync=False) as part:
            writer = GGUFWriter(part, header.architecture)
            writer.add_type(GGUFType.ADAPTER)
            writer.add_string("adapter.type", "lora")
            writer.add_float32("adapter.lora.alpha", alpha)
            for file in _weight_files(folder):
                for name, weight in _weights(file):
                    stem, _, kind = (
                        name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
                    )
                    tensor = shapes.get(f"{stem}.weight")
                    side = {"lora_A": 1, "lora_B": 0}.get(kind)
                    if tensor is None or side is None or weight.shape[side] != tensor.shape[side]:
                        raise ConfigError(
                            f"{folder} belongs to another model than {base}: {plain(name, 120)} has no counterpart"
                        )
                    if side == 0:
                        weight = permuted(tensor.name, weight, header)
                    writer.add_tensor(f"{tensor.name}.{kind.lower()}", weight.astype(np.float16))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()


def _alpha(folder: Path) -> float:
    """What the product of the two matrices is multiplied by, times the rank."""
    config = json.loads(_config_file(folder).read_text(encoding="utf-8"))
    more = [name for name in MORE_THAN_LORA if config.get(name)]
    if config["peft_type"] != "LORA" or more or config.get("bias", "none") != "none":
        what = ", ".join(more) or plain(str(config["peft_type"]), 40)
        raise ConfigError(f"{folder} is more than plain LoRA ({what}); use `runtime=torch`")
    return float(config["lora_alpha"]) * (math.sqrt(config["r"]) if config.get("use_rslora") else 1)


def _config_file(folder: Path) -> Path:
    file = folder / "adapter_config.json"
    if not file.is_file():
        raise ConfigError(
            f"{folder} has no adapter_config.json; name a LoRA folder as peft saves it"
        )
    return file


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise ConfigError(f"{folder} has no {WEIGHTS}")
    with foreign_file(folder / INDEX, "is not an index of weights"):
        names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        files = [folder / name for name in sorted(names)]
    for file in files:
        if file.parent != folder or not file.is_file():
            raise ConfigError(f"{folder} lacks {plain(file.name, 80)}, a part of its weights")
    return files


def _weights(file: Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """The weights of a safetensors file in float32; numpy has no type for BF16."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        raw = data[start + begin : start + end]
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
        else:
            values = np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[entry["dtype"]]).astype("<f4")
        yield name, values.reshape(entry["shape"])

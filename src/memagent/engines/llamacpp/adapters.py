"""LoRA adapters as GGUF files for llama.cpp, written from the folders that peft saves.

    adapter_file(folder, Path("base.gguf"), open_header(Path("base.gguf")))     # in the cache, written once
    write_adapter(folder, base, header, out)

Weights keep their type; rows of Llama's queries and keys are in the order of the base file.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from platformdirs import user_cache_path

from memagent.engines.local.gguf_files import GgufHeader, known_name, row_order
from memagent.errors import ConfigError, plain
from memagent.files import evict_oldest, mark_used, write_atomically
from memagent.foreign import foreign_file
from memagent.gguf_format import ALIGNMENT, BLOCKS, MAGIC, STRING, VERSIONS

WEIGHTS, INDEX = "adapter_model.safetensors", "adapter_model.safetensors.index.json"
PREFIX = "base_model.model."
"""What the names of weights begin with."""
SIDES = {"lora_A": 1, "lora_B": 0}
"""The two matrices of a weight, and which of their sizes is the weight's."""
KINDS = {"F32": 0, "F16": 1, "BF16": 30}
"""Types of safetensors files, and GGML's numbers of them."""
FLOAT = 6
FORMAT = 2
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
    for file in [config_file(folder), *weight_files(folder)]:
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
        tensors = {known_name(tensor): tensor for tensor in header.tensors}
        infos, parts, end = [], [], 0
        for name, kind, shape, raw in chain.from_iterable(map(_weights, weight_files(folder))):
            stem, _, part = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
            tensor, side = tensors.get(f"{stem}.weight"), SIDES.get(part)
            if tensor is None or side is None or shape[side] != tensor.shape[side]:
                raise ConfigError(
                    f"{folder} belongs to another model than {base}: {plain(name, 120)} has no counterpart"
                )
            order = row_order(tensor.name, shape[0], header) if side == 0 else None
            if order is not None:
                width = len(raw) // shape[0]
                raw = b"".join(raw[row * width : (row + 1) * width] for row in order)
            info = struct.pack("<IQQIQ", 2, *reversed(shape), kind, end)
            infos.append(_text(f"{tensor.name}.{part.lower()}") + info)
            parts += [raw, bytes(-len(raw) % ALIGNMENT)]
            end += len(raw) + len(parts[-1])
        texts = {
            "general.architecture": header.architecture,
            "general.type": "adapter",
            "adapter.type": "lora",
        }
        fields = [
            _text(name) + struct.pack("<I", STRING) + _text(text) for name, text in texts.items()
        ]
        fields.append(_text("adapter.lora.alpha") + struct.pack("<If", FLOAT, alpha))
        start = MAGIC + struct.pack("<IQQ", VERSIONS[-1], len(infos), len(fields))
        start += b"".join([*fields, *infos])
        write_atomically(out, b"".join([start, bytes(-len(start) % ALIGNMENT), *parts]), sync=False)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _alpha(folder: Path) -> float:
    """What the product of the two matrices is multiplied by, times the rank."""
    config = json.loads(config_file(folder).read_text(encoding="utf-8"))
    more = [name for name in MORE_THAN_LORA if config.get(name)]
    if config["peft_type"] != "LORA" or more or config.get("bias", "none") != "none":
        what = ", ".join(more) or plain(str(config["peft_type"]), 40)
        raise ConfigError(f"{folder} is more than plain LoRA ({what}); use `runtime=torch`")
    return float(config["lora_alpha"]) * (math.sqrt(config["r"]) if config.get("use_rslora") else 1)


def config_file(folder: Path) -> Path:
    """The settings of an adapter."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        raise ConfigError(
            f"{folder} has no adapter_config.json; name a LoRA folder as peft saves it"
        )
    return file


def weight_files(folder: Path) -> list[Path]:
    """The files with an adapter's weights: one, or those that an index names."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise ConfigError(f"{folder} has no {WEIGHTS}")
    return indexed_files(folder / INDEX)


def indexed_files(index: Path) -> list[Path]:
    """The files beside an index of weights that it names."""
    with foreign_file(index, "is not an index of weights"):
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        files = [index.parent / name for name in sorted(names)]
    for file in files:
        if file.parent != index.parent or not file.is_file():
            raise ConfigError(f"{index.parent} lacks {plain(file.name, 80)}, a part of its weights")
    return files


def _weights(file: Path) -> Iterator[tuple[str, int, tuple[int, int], bytes]]:
    """The weights of a safetensors file: name, GGML's number of the type, shape and bytes."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            num_rows, num_columns = entry["shape"]
            kind = KINDS[entry["dtype"]]
            raw = data[start + begin : start + end]
            if len(raw) != num_rows * num_columns * BLOCKS[kind][1]:
                raise ConfigError(f"{file}: {plain(name, 120)} does not have the size of its shape")
            yield name, kind, (num_rows, num_columns), raw

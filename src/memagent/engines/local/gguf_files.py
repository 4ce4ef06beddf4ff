"""GGUF files: their header as a Hugging Face folder, their weights as float32 arrays.

    path = Path("model.gguf")
    header = open_header(path, architectures=("llama",))     # config, tokenizer and index
    for name, array in weights(path, header): ...

Reading a header takes seconds, most of them for the vocabulary, so its contents are cached under its
fingerprint and later loads read only the weights. The tokenizer is built from the type that the file
names: the generic conversion of transformers loses the splitting of digits, the decoder and the end
token. A file that could not be run faithfully is refused.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, dequantize
from platformdirs import user_cache_path
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from memagent.errors import ConfigError
from memagent.files import replacing_folder

FORMAT = 1
"""Version of the cached header; incremented when its contents change."""
HEADER_BYTES = 32 << 20
"""The fingerprint covers this many bytes of a file and its size; headers are smaller."""
CONTROL_TOKEN, USER_TOKEN = 3, 4
"""GGUF's types of tokens such as <|im_start|>, and of words added to a vocabulary."""

LAYER_NAMES: dict[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Parts of a layer: GGUF's and transformers' names."""
OTHER_NAMES: dict[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Location of a weight in the file."""

    name: str
    """GGUF's name, such as "blk.0.attn_q.weight"."""
    shape: tuple[int, ...]
    """In torch's order: rows first."""
    kind: int
    """GGML's number of the storage type."""
    offset: int
    """First byte in the file."""

    @property
    def num_bytes(self) -> int:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(self.kind)]
        return int(np.prod(self.shape)) // block * size


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """The metadata of a GGUF file."""

    folder: Path
    """config.json, generation_config.json, and the tokenizer with its chat template."""
    architecture: str
    num_heads: int
    num_kv_heads: int
    tensors: tuple[GgufTensor, ...]


def open_header(path: Path, *, architectures: tuple[str, ...]) -> GgufHeader:
    """The header of a file; converted once, then read from the cache."""
    folder = _kept_folder(path)
    try:
        header = _load(folder)
    except FileNotFoundError:
        header = _convert(path, folder, architectures)
    except (OSError, ValueError, TypeError, KeyError):  # damaged
        shutil.rmtree(folder, ignore_errors=True)
        header = _convert(path, folder, architectures)
    _check_length(path, header)
    return header


def weights(path: Path, header: GgufHeader) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Weights as float32 arrays, under transformers' names."""
    for tensor, packed in _stored(path, header):
        try:
            array = dequantize(packed, GGMLQuantizationType(tensor.kind))
        except NotImplementedError:
            kind = GGMLQuantizationType(tensor.kind).name
            raise ConfigError(f"{path} stores weights as {kind}, which cannot be read") from None
        yield _known_name(tensor), _unpermuted(tensor.name, array, header)


def matrices(
    path: Path, header: GgufHeader
) -> Iterator[tuple[str, GGMLQuantizationType, np.ndarray[Any, Any]]]:
    """Matrices under transformers' names: storage type and the bytes of the rows."""
    for tensor, packed in _stored(path, header):
        if packed.ndim == 2:
            kind = GGMLQuantizationType(tensor.kind)
            yield _known_name(tensor), kind, _unpermuted(tensor.name, packed, header)


def _stored(path: Path, header: GgufHeader) -> Iterator[tuple[GgufTensor, np.ndarray[Any, Any]]]:
    contents = np.asarray(np.memmap(path, mode="r", dtype=np.uint8))
    for tensor in header.tensors:
        packed = contents[tensor.offset : tensor.offset + tensor.num_bytes]
        yield tensor, packed.reshape(*tensor.shape[:-1], -1)


def _known_name(tensor: GgufTensor) -> str:
    name = _name(tensor.name)
    assert name is not None, "unknown names are refused when the header is converted"
    return name


# --- the cached header ----------------------------------------------------------------------------


def _kept_folder(path: Path) -> Path:
    digest = hashlib.sha256(str(path.stat().st_size).encode())
    try:
        with path.open("rb") as stream:
            digest.update(stream.read(HEADER_BYTES))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    cache = user_cache_path("memagent", appauthor=False) / "gguf"
    return cache / f"{digest.hexdigest()[:32]}-{FORMAT}"


def _load(folder: Path) -> GgufHeader:
    kept = json.loads((folder / "header.json").read_text(encoding="utf-8"))
    if not (folder / "config.json").is_file() or not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} is incomplete")
    tensors = [
        GgufTensor(name=name, shape=tuple(shape), kind=kind, offset=offset)
        for name, shape, kind, offset in kept.pop("tensors")
    ]
    return GgufHeader(folder=folder, tensors=tuple(tensors), **kept)


def _convert(path: Path, folder: Path, architectures: tuple[str, ...]) -> GgufHeader:
    """Write the cached header; another process may do the same at the same time."""
    reader = _read(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _check_runnable(path, fields, reader, architectures)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replacing_folder(folder, is_shared=True) as part:
            _write_tokenizer(path, fields, part)
            _write_config(fields, reader, part)
            _write_index(fields, reader, part)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder.parent} ({error.strerror}); make it writable, or set "
            "XDG_CACHE_HOME to another folder"
        ) from None
    return _load(folder)


def _read(path: Path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except OSError:  # no memory to map it
        raise
    except Exception as error:  # a damaged file makes the library and numpy raise many types
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"{path} is not a readable GGUF file ({reason}); it may be truncated, download it again"
        ) from None


def _check_length(path: Path, header: GgufHeader) -> None:
    end = max(tensor.offset + tensor.num_bytes for tensor in header.tensors)
    size = path.stat().st_size
    if size < end:
        raise ConfigError(f"{path} is truncated: {size:,} of {end:,} bytes; download it again")


def _check_runnable(
    path: Path, fields: dict[str, Any], reader: GGUFReader, architectures: tuple[str, ...]
) -> None:
    architecture = fields.get("general.architecture")
    if architecture not in architectures:
        raise ConfigError(
            f"{path} is a {architecture} model; the local engine runs {', '.join(architectures)}"
        )
    if fields.get("split.count", 1) > 1:
        raise ConfigError(f"{path} is one of several parts; merge them into one GGUF file first")
    scaling = fields.get(f"{architecture}.rope.scaling.type", "none")
    names = {tensor.name for tensor in reader.tensors}
    if scaling != "none" or "rope_freqs.weight" in names:
        raise ConfigError(
            f"{path} uses RoPE scaling, which GGUF describes only in part; use the Hugging "
            "Face folder of the model"
        )
    unknown = sorted(name for name in names if _name(name) is None)
    if unknown or "token_embd.weight" not in names:
        raise ConfigError(f"{path} has unknown weights for a {architecture} model: {unknown[:3]}")


# --- configuration ----------------------------------------------------------------------------------


def _write_config(fields: dict[str, Any], reader: GGUFReader, folder: Path) -> None:
    from transformers import AutoConfig, GenerationConfig

    architecture = fields["general.architecture"]
    shapes = {tensor.name: [int(size) for size in tensor.shape] for tensor in reader.tensors}
    values = {
        "hidden_size": fields[f"{architecture}.embedding_length"],
        "intermediate_size": fields[f"{architecture}.feed_forward_length"],
        "num_hidden_layers": fields[f"{architecture}.block_count"],
        "num_attention_heads": fields[f"{architecture}.attention.head_count"],
        "num_key_value_heads": _num_kv_heads(fields),
        "max_position_embeddings": fields[f"{architecture}.context_length"],
        "rms_norm_eps": _as_written(fields[f"{architecture}.attention.layer_norm_rms_epsilon"]),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _as_written(fields.get(f"{architecture}.rope.freq_base", 10000.0)),
        },
        "vocab_size": shapes["token_embd.weight"][-1],
        "tie_word_embeddings": "output.weight" not in shapes,
        "head_dim": shapes["blk.0.attn_q.weight"][-1]
        // fields[f"{architecture}.attention.head_count"],
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_ids(fields)[0] if _end_ids(fields) else None,
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }
    if architecture in ("llama", "qwen3"):
        values["attention_bias"] = "blk.0.attn_q.bias" in shapes
    AutoConfig.for_model(architecture, **values).save_pretrained(folder)
    generation = GenerationConfig(eos_token_id=_end_ids(fields) or None)
    generation.save_pretrained(folder)


def _write_index(fields: dict[str, Any], reader: GGUFReader, folder: Path) -> None:
    architecture = fields["general.architecture"]
    tensors = [
        (
            tensor.name,
            [int(size) for size in reversed(tensor.shape)],  # GGUF lists columns first
            int(tensor.tensor_type),
            int(tensor.data_offset),
        )
        for tensor in reader.tensors
    ]
    kept = {
        "architecture": architecture,
        "num_heads": fields[f"{architecture}.attention.head_count"],
        "num_kv_heads": _num_kv_heads(fields),
        "tensors": tensors,
    }
    (folder / "header.json").write_text(json.dumps(kept), encoding="utf-8")


def _num_kv_heads(fields: dict[str, Any]) -> int:
    architecture = fields["general.architecture"]
    num_heads = fields[f"{architecture}.attention.head_count"]
    return int(fields.get(f"{architecture}.attention.head_count_kv", num_heads))


def _end_ids(fields: dict[str, Any]) -> list[int]:
    """Tokens that end a reply."""
    names = ("eos", "eot", "eom")
    found = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    return list(dict.fromkeys(int(token) for token in found if token is not None))


def _as_written(value: float) -> float:
    """1e-05 for the float32 value 9.999999747378752e-06."""
    return float(str(np.float32(value)))


# --- tokenizer --------------------------------------------------------------------------------------


def _write_tokenizer(path: Path, fields: dict[str, Any], folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = fields["tokenizer.ggml.tokens"]

    def token(name: str) -> str | None:
        number = fields.get(f"tokenizer.ggml.{name}_token_id")
        return None if number is None else tokens[number]

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(path, fields),
        bos_token=token("bos"),
        eos_token=token("eos"),
        pad_token=token("padding"),
        chat_template=fields.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)


def _tokenizer(path: Path, fields: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a file, with the pre-tokenizer of its type."""
    model, kind = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if model != "gpt2" or kind not in PRE_TOKENIZERS:
        raise ConfigError(
            f"{path} has a tokenizer of type {model}/{kind}; known: "
            f"{', '.join(f'gpt2/{name}' for name in PRE_TOKENIZERS)}; use the Hugging Face folder"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[kind])
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    for token, mark in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True):
        if mark == CONTROL_TOKEN:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif mark == USER_TOKEN:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    return tokenizer


PRE_TOKENIZERS: dict[str, list[Any]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)],
    "qwen2": [
        pre_tokenizers.Split(Regex(QWEN_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ],
}
"""How text is split before merging, by GGUF's names."""


# --- weights ----------------------------------------------------------------------------------------


def _name(gguf_name: str) -> str | None:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`; None if unknown."""
    stem, _, suffix = gguf_name.rpartition(".")
    if stem in OTHER_NAMES:
        return f"{OTHER_NAMES[stem]}.{suffix}"
    parts = stem.split(".")
    if len(parts) != 3 or parts[0] != "blk" or parts[2] not in LAYER_NAMES:
        return None
    return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{suffix}"


def _unpermuted(
    gguf_name: str, array: np.ndarray[Any, Any], header: GgufHeader
) -> np.ndarray[Any, Any]:
    """Llama's queries and keys: GGUF interleaves the two halves of each rotated pair."""
    part = gguf_name.split(".")[-2]
    if header.architecture != "llama" or part not in ("attn_q", "attn_k"):
        return array
    num_heads = header.num_heads if part == "attn_q" else header.num_kv_heads
    pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)

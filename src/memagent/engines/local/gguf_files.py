"""GGUF files: their header as a Hugging Face folder, their weights as float32 arrays.

    header = open_header(Path("model.gguf"))     config, tokenizer and index, kept in the user's cache
    for name, array in weights(path, header): ...

Reading the header takes seconds, most of them for the vocabulary, so what it says is kept under its
fingerprint and the next loading only touches the weights. The tokenizer is written by the kind that
the file names: the generic conversion in transformers loses the splitting of digits, the decoder and
the end token. What could not be run faithfully is refused, never guessed.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
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

FORMAT = 1
"""Raised when what is kept of a header changes, so that older copies are not used."""
HEADER_BYTES = 32 << 20
"""The fingerprint covers this much of a file and its size; headers are smaller."""
CONTROL_TOKEN, USER_TOKEN = 3, 4
"""GGUF's marks for tokens such as <|im_start|>, and for words added to a vocabulary."""

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
"""Parts of a layer, as GGUF and as transformers call them."""
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
class Tensor:
    """Where a weight lies in the file."""

    name: str
    """As GGUF calls it, such as "blk.0.attn_q.weight"."""
    shape: tuple[int, ...]
    """As torch has it: rows first."""
    kind: int
    """GGML's number for how it is stored."""
    offset: int
    """First byte in the file."""

    @property
    def num_bytes(self) -> int:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(self.kind)]
        return int(np.prod(self.shape)) // block * size


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a GGUF file says before its weights."""

    folder: Path
    """config.json, generation_config.json, and the tokenizer with its chat template."""
    architecture: str
    num_heads: int
    num_kv_heads: int
    tensors: tuple[Tensor, ...]


def open_header(path: Path, *, architectures: tuple[str, ...]) -> Header:
    """The header of a file, converted the first time."""
    folder = _kept_folder(path)
    try:
        header = _load(folder)
    except FileNotFoundError:
        header = _convert(path, folder, architectures)
    except (OSError, ValueError, TypeError, KeyError):  # the copy was damaged
        shutil.rmtree(folder, ignore_errors=True)
        header = _convert(path, folder, architectures)
    _check_length(path, header)
    return header


def weights(path: Path, header: Header) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Names as transformers has them, and float32 arrays."""
    for tensor, packed in _stored(path, header):
        try:
            array = dequantize(packed, GGMLQuantizationType(tensor.kind))
        except NotImplementedError:
            kind = GGMLQuantizationType(tensor.kind).name
            raise ConfigError(f"{path} stores weights as {kind}, which cannot be read") from None
        yield _known_name(tensor), _unpermuted(tensor.name, array, header)


def matrices(
    path: Path, header: Header
) -> Iterator[tuple[str, GGMLQuantizationType, np.ndarray[Any, Any]]]:
    """Names as transformers has them, how each matrix is stored, and the bytes of its rows."""
    for tensor, packed in _stored(path, header):
        if packed.ndim == 2:
            kind = GGMLQuantizationType(tensor.kind)
            yield _known_name(tensor), kind, _unpermuted(tensor.name, packed, header)


def _stored(path: Path, header: Header) -> Iterator[tuple[Tensor, np.ndarray[Any, Any]]]:
    contents = np.asarray(np.memmap(path, mode="r", dtype=np.uint8))
    for tensor in header.tensors:
        packed = contents[tensor.offset : tensor.offset + tensor.num_bytes]
        yield tensor, packed.reshape(*tensor.shape[:-1], -1)


def _known_name(tensor: Tensor) -> str:
    name = _name(tensor.name)
    assert name is not None, "unknown names are refused when the header is converted"
    return name


# --- the kept copy of a header --------------------------------------------------------------------


def _kept_folder(path: Path) -> Path:
    digest = hashlib.sha256(str(path.stat().st_size).encode())
    try:
        with path.open("rb") as stream:
            digest.update(stream.read(HEADER_BYTES))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    cache = user_cache_path("memagent", appauthor=False) / "gguf"
    return cache / f"{digest.hexdigest()[:32]}-{FORMAT}"


def _load(folder: Path) -> Header:
    kept = json.loads((folder / "header.json").read_text(encoding="utf-8"))
    if not (folder / "config.json").is_file() or not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} is incomplete")
    tensors = [
        Tensor(name=name, shape=tuple(shape), kind=kind, offset=offset)
        for name, shape, kind, offset in kept.pop("tensors")
    ]
    return Header(folder=folder, tensors=tuple(tensors), **kept)


def _convert(path: Path, folder: Path, architectures: tuple[str, ...]) -> Header:
    """Write the copy under another name first: a half-written one must never be found."""
    reader = _read(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _check_runnable(path, fields, reader, architectures)
    temporary = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        _write_tokenizer(path, fields, temporary)
        _write_config(fields, reader, temporary)
        _write_index(fields, reader, temporary)
        os.rename(temporary, folder)
    except OSError as error:
        if not folder.is_dir():  # else another process was quicker
            raise ConfigError(
                f"cannot write to {folder.parent} ({error.strerror}); allow it, or set "
                "XDG_CACHE_HOME to a folder of yours"
            ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return _load(folder)


def _read(path: Path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except OSError:  # no memory to map it
        raise
    except Exception as error:  # a damaged file makes the library and numpy raise all kinds
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"{path} is not a GGUF file that can be read ({reason}); it may be cut short, fetch it "
            "again"
        ) from None


def _check_length(path: Path, header: Header) -> None:
    end = max(tensor.offset + tensor.num_bytes for tensor in header.tensors)
    size = path.stat().st_size
    if size < end:
        raise ConfigError(f"{path} is cut short: {size:,} of {end:,} bytes; fetch it again")


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
            f"{path} scales its positions in a way GGUF describes only in part; use the Hugging "
            "Face folder of the model"
        )
    unknown = sorted(name for name in names if _name(name) is None)
    if unknown or "token_embd.weight" not in names:
        raise ConfigError(f"{path} has weights of no {architecture} model we know: {unknown[:3]}")


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
            [int(size) for size in reversed(tensor.shape)],  # GGUF names the columns first
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
    """1e-05, where float32 in the file gives 9.999999747378752e-06."""
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
    """The vocabulary of a file, split as its kind of tokenizer splits."""
    model, kind = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if model != "gpt2" or kind not in PRE_TOKENIZERS:
        raise ConfigError(
            f"{path} has a tokenizer of the kind {model}/{kind}; known: "
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
"""How text is split before merging, by the name that GGUF files give it."""


# --- weights ----------------------------------------------------------------------------------------


def _name(gguf_name: str) -> str | None:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`; None for unknown ones."""
    stem, _, suffix = gguf_name.rpartition(".")
    if stem in OTHER_NAMES:
        return f"{OTHER_NAMES[stem]}.{suffix}"
    parts = stem.split(".")
    if len(parts) != 3 or parts[0] != "blk" or parts[2] not in LAYER_NAMES:
        return None
    return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{suffix}"


def _unpermuted(
    gguf_name: str, array: np.ndarray[Any, Any], header: Header
) -> np.ndarray[Any, Any]:
    """Llama's queries and keys: GGUF has the two halves of each rotated pair side by side."""
    part = gguf_name.split(".")[-2]
    if header.architecture != "llama" or part not in ("attn_q", "attn_k"):
        return array
    num_heads = header.num_heads if part == "attn_q" else header.num_kv_heads
    pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)

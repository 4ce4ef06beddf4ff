"""GGUF files: their header as a Hugging Face folder, and which weights they have.

    path = Path("model.gguf")
    header = open_header(path)                               # config, tokenizer and index

Reading a header takes seconds, most of them for the vocabulary, so its contents are cached under its
fingerprint and later loads read only the weights. The tokenizer is built from the type that the file
names: the generic conversion of transformers loses the splitting of digits, the decoder and the end
token. llama.cpp runs any architecture whose tokenizer is known here; the header says why torch does not run
a file, where it could not do so faithfully.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from memagent.engines.yarn import ARCHITECTURES
from memagent.errors import ConfigError, plain
from memagent.files import evict_oldest, mark_used, reason_of, replacing_folder
from memagent.foreign import foreign_file
from memagent.gguf_format import HEADER_BYTES, GgufContents, GgufDamage, GgufTensor, read_contents

FORMAT = 3
"""Version of the cached header; incremented when its contents change."""
MAX_CACHE_BYTES = 500_000_000
"""The size of all cached headers; those that were not used for longest are dropped. One takes 3 to 12 MB."""
CONVERSION_SECONDS = 60.0
MAX_COUNT = 1 << 31
"""The highest number of layers, heads, tokens, and of each size."""
NORMAL_TOKEN, UNKNOWN_TOKEN, CONTROL_TOKEN, USER_TOKEN = 1, 2, 3, 4
"""GGUF's types of tokens: parts of words, what stands for others, <|im_start|> and its like, words that were added."""

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
LLAMA_PATTERN = QWEN_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
QWEN35_PATTERN = QWEN_PATTERN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
WHOLE_WORDS = ("lfm2", "llama-bpe")
"""Pre-tokenizers of models that take a word of the vocabulary as it is, whatever its merges say."""
COMPOSED = ("qwen2", "qwen35")
"""Pre-tokenizers of models whose texts are normalised to composed characters."""
SENTENCE_PIECE, SPACE = "llama", "\u2581"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """The metadata of a GGUF file."""

    folder: Path
    """config.json, generation_config.json, and the tokenizer with its chat template."""
    architecture: str
    num_heads: int
    num_kv_heads: int
    tensors: tuple[GgufTensor, ...]
    window: int
    """Context length in tokens."""
    cache_bytes: int
    """Bytes that keys and values of one token take in 16 bits, at most."""
    refusal: str | None
    """Why torch does not run the model; None where it does."""


def open_header(path: Path) -> GgufHeader:
    """The header of a file; converted once, then read from the cache."""
    try:
        digest = hashlib.sha256(str(path.stat().st_size).encode())
        with path.open("rb") as stream:
            digest.update(stream.read(HEADER_BYTES))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {reason_of(error)}") from None
    cache = user_cache_path("memagent", appauthor=False) / "gguf"
    folder = cache / f"{digest.hexdigest()[:32]}-{FORMAT}"
    try:
        header = _load(folder)
    except FileNotFoundError:
        header = _convert(path, folder)
    except (OSError, ValueError, TypeError, KeyError):  # damaged
        shutil.rmtree(folder, ignore_errors=True)
        header = _convert(path, folder)
    mark_used(folder)
    end = max((tensor.offset + tensor.num_bytes for tensor in header.tensors), default=0)
    size = path.stat().st_size
    if size < end:
        raise ConfigError(f"{path} is truncated: {size:,} of {end:,} bytes; download it again")
    return header


def known_name(tensor: GgufTensor) -> str:
    """The name of a weight in transformers."""
    name = _name(tensor.name)
    assert name is not None, "unknown names are refused when the header is converted"
    return name


# --- the cached header ----------------------------------------------------------------------------


def _load(folder: Path) -> GgufHeader:
    kept = json.loads((folder / "header.json").read_text(encoding="utf-8"))
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} is incomplete")
    tensors = [
        GgufTensor(name=name, shape=tuple(shape), kind=kind, offset=offset)
        for name, shape, kind, offset in kept.pop("tensors")
    ]
    return GgufHeader(folder=folder, tensors=tuple(tensors), **kept)


def _convert(path: Path, folder: Path) -> GgufHeader:
    """Write the cached header; another process may do the same at the same time."""
    contents = _read(path)
    fields = _Fields(path, contents.fields)
    if fields.integer("split.count", default=1) > 1:
        raise ConfigError(f"{path} is one of several parts; merge them into one GGUF file first")
    refusal = _refusal(fields, contents)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (
            replacing_folder(folder, is_shared=True) as part,
            foreign_file(
                path,
                "cannot be converted",
                seconds=CONVERSION_SECONDS,
                unless=lambda error: isinstance(error, OSError),
            ),
        ):
            _write_tokenizer(path, fields, part)
            if refusal is None:
                _write_config(fields, contents, part)
            _write_index(fields, contents, refusal, part)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder.parent} ({error.strerror}); make it writable, or set "
            "XDG_CACHE_HOME to another folder"
        ) from None
    evict_oldest(folder.parent, max_bytes=MAX_CACHE_BYTES, keep=folder)
    return _load(folder)


def _read(path: Path) -> GgufContents:
    try:
        return read_contents(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {reason_of(error)}") from None
    except GgufDamage as error:
        raise ConfigError(
            f"{path} is not a readable GGUF file ({error}); it may be truncated, download it again"
        ) from None


def _refusal(fields: _Fields, contents: GgufContents) -> str | None:
    """Why torch does not run a model; None where it does."""
    architecture = fields.text("general.architecture", default="model of unknown kind")
    if architecture not in ARCHITECTURES:
        return (
            f"is a {plain(architecture, 80)} model; torch runs {', '.join(ARCHITECTURES)} here, "
            "others run with `runtime=llama.cpp`"
        )
    scaling = fields.text(f"{architecture}.rope.scaling.type", default="none")
    names = {tensor.name for tensor in contents.tensors}
    if scaling != "none" or "rope_freqs.weight" in names:
        return (
            "uses RoPE scaling, which GGUF describes only in part; use the Hugging Face folder of the "
            "model, or `runtime=llama.cpp`"
        )
    unknown = sorted(name for name in names if _name(name) is None)
    if unknown:
        return f"has unknown weights for a {architecture} model: {unknown[:3]}"
    missing = {"token_embd.weight", "blk.0.attn_q.weight"} - names
    if missing:
        return f"is missing weights, such as {min(missing)}"
    num_blocks = len({name.split(".")[1] for name in names if name.startswith("blk.")})
    expected = fields.integer(f"{architecture}.block_count")
    if num_blocks != expected:
        return f"has weights of {num_blocks} layers, its header says {expected}"
    return None


class _Fields:
    """The fields of a header, with the types that they must have."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path = path
        self._values = values

    def integer(self, name: str, *, default: int | None = None, low: int = 1) -> int:
        value = self._values.get(name, default)
        if type(value) is not int or not low <= value < MAX_COUNT:
            raise self._error(name, f"a number from {low} on")
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        value = self._values.get(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self._error(name, "a positive number")
        return float(value)

    def text(self, name: str, *, default: str | None = None) -> str:
        value = self._values.get(name, default)
        if not isinstance(value, str):
            raise self._error(name, "a text")
        return value

    def optional_text(self, name: str) -> str | None:
        return self.text(name) if name in self._values else None

    def list_of(self, name: str, *kinds: type, what: str = "numbers") -> list[Any]:
        value = self._values.get(name)
        if not isinstance(value, list) or not all(type(one) in kinds for one in value):
            raise self._error(name, f"a list of {what}")
        return value

    def counts(self, name: str, *, default: str | None = None) -> list[int]:
        """A count, or one for each layer, of which some have none. `default` is another field."""
        if default is not None and name not in self._values:
            return self.counts(default)
        value = self._values.get(name)
        counts: list[Any] = value if isinstance(value, list) else [value]
        if not all(type(one) is int and 0 <= one < MAX_COUNT for one in counts) or not any(counts):
            raise self._error(name, "a number from 1 on")
        return counts

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._values.get(name, default)
        if type(value) is not bool:
            raise self._error(name, "true or false")
        return value

    def token(self, name: str) -> int | None:
        """The number of a token in the vocabulary; None where the file names none."""
        field = f"tokenizer.ggml.{name}_token_id"
        if field not in self._values:
            return None
        number = self.integer(field, low=0)
        if number >= len(self.list_of("tokenizer.ggml.tokens", str, what="texts")):
            raise self._error(field, "a token of the vocabulary")
        return number

    def _error(self, name: str, expected: str) -> ConfigError:
        value = self._values.get(name)
        found = "nothing" if value is None else repr(value)
        found = found if len(found) <= 60 else found[:57] + "..."
        return ConfigError(f"{self._path}: the field {plain(name, 80)} is {found}, not {expected}")


# --- configuration ----------------------------------------------------------------------------------


def _write_config(fields: _Fields, contents: GgufContents, folder: Path) -> None:
    architecture = fields.text("general.architecture")
    shapes = {tensor.name: tensor.shape for tensor in contents.tensors}
    num_heads = fields.integer(f"{architecture}.attention.head_count")
    values = {
        "model_type": architecture,
        "hidden_size": fields.integer(f"{architecture}.embedding_length"),
        "intermediate_size": fields.integer(f"{architecture}.feed_forward_length"),
        "num_hidden_layers": fields.integer(f"{architecture}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(_kv_heads(fields)),
        "max_position_embeddings": fields.integer(f"{architecture}.context_length"),
        "rms_norm_eps": _as_written(
            fields.number(f"{architecture}.attention.layer_norm_rms_epsilon")
        ),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _as_written(
                fields.number(f"{architecture}.rope.freq_base", default=10000.0)
            ),
        },
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "head_dim": shapes["blk.0.attn_q.weight"][0] // num_heads,
        "bos_token_id": fields.token("bos"),
        "eos_token_id": _end_ids(fields)[0] if _end_ids(fields) else None,
        "pad_token_id": fields.token("padding"),
    }
    if architecture in ("llama", "qwen3"):
        values["attention_bias"] = "blk.0.attn_q.bias" in shapes
    _write_json(folder / "config.json", values)
    _write_json(folder / "generation_config.json", {"eos_token_id": _end_ids(fields) or None})


def _write_index(
    fields: _Fields, contents: GgufContents, refusal: str | None, folder: Path
) -> None:
    architecture = fields.text("general.architecture")
    kept = {
        "architecture": architecture,
        "num_heads": max(fields.counts(f"{architecture}.attention.head_count")),
        "num_kv_heads": max(_kv_heads(fields)),
        "window": fields.integer(f"{architecture}.context_length"),
        "cache_bytes": _cache_bytes(fields),
        "refusal": refusal,
        "tensors": [
            (tensor.name, list(tensor.shape), tensor.kind, tensor.offset)
            for tensor in contents.tensors
        ],
    }
    _write_json(folder / "header.json", kept)


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values), encoding="utf-8")


def _kv_heads(fields: _Fields) -> list[int]:
    """Heads of keys and values: of all layers, or of each."""
    architecture = fields.text("general.architecture")
    name = f"{architecture}.attention.head_count"
    return fields.counts(f"{name}_kv", default=name)


def _cache_bytes(fields: _Fields) -> int:
    """Bytes of the keys and values of a token in 16 bits; layers that keep less are counted in full."""
    architecture = fields.text("general.architecture")
    num_layers, heads = fields.integer(f"{architecture}.block_count"), _kv_heads(fields)
    num_heads = max(fields.counts(f"{architecture}.attention.head_count"))
    size = fields.integer(f"{architecture}.embedding_length") // num_heads
    sizes = (f"{architecture}.attention.{part}_length" for part in ("key", "value"))
    per_head = sum(fields.integer(name, default=size) for name in sizes)
    total = sum(heads) if len(heads) > 1 else heads[0] * num_layers
    return 2 * max(per_head * total, 1)


def _end_ids(fields: _Fields) -> list[int]:
    """Tokens that end a reply."""
    found = [fields.token(name) for name in ("eos", "eot", "eom")]
    return list(dict.fromkeys(token for token in found if token is not None))


def _as_written(value: float) -> float:
    """1e-05 for the float32 value 9.999999747378752e-06."""
    short = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((one for one in short if struct.pack("<f", one) == struct.pack("<f", value)), value)


# --- tokenizer --------------------------------------------------------------------------------------


def _write_tokenizer(path: Path, fields: _Fields, folder: Path) -> None:
    tokens = fields.list_of("tokenizer.ggml.tokens", str, what="texts")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, ours in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")):
        number = fields.token(name)
        if number is not None:
            settings[ours] = tokens[number]
    _tokenizer(path, fields, tokens).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", settings)
    template = fields.optional_text("tokenizer.chat_template")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _tokenizer(path: Path, fields: _Fields, tokens: list[str]) -> Tokenizer:
    """The tokenizer of a file, with the pre-tokenizer of its type."""
    model = fields.optional_text("tokenizer.ggml.model")
    kind = fields.optional_text("tokenizer.ggml.pre")
    if model != SENTENCE_PIECE and (model != "gpt2" or kind not in PRE_TOKENIZERS):
        raise ConfigError(
            f"{path} has a tokenizer of type {plain(f'{model}/{kind}', 80)}; known: {SENTENCE_PIECE}, "
            f"{', '.join(f'gpt2/{name}' for name in PRE_TOKENIZERS)}; use an endpoint, or the Hugging Face folder"
        )
    kinds = fields.list_of("tokenizer.ggml.token_type", int)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens) or len(kinds) != len(tokens):
        raise ConfigError(
            f"{path} has a vocabulary of {len(tokens)} tokens, {len(vocabulary)} different ones, "
            f"and {len(kinds)} types of tokens"
        )
    if model == SENTENCE_PIECE:
        tokenizer = _sentence_pieces(fields, vocabulary)
    else:
        assert kind is not None, "it is in PRE_TOKENIZERS"
        pairs = fields.list_of("tokenizer.ggml.merges", str, what="texts")
        merges: list[Any] = [tuple(one.split(" ")) for one in pairs]
        ignores = kind in WHOLE_WORDS
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignores))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[kind])
        tokenizer.decoder = decoders.ByteLevel()
        if kind in COMPOSED:
            tokenizer.normalizer = normalizers.NFC()
    marked = list(zip(tokens, kinds, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(one, special=True, normalized=False) for one, k in marked if k == CONTROL_TOKEN]
    )
    tokenizer.add_tokens(
        [AddedToken(one, normalized=False) for one, k in marked if k == USER_TOKEN]
    )
    return tokenizer


def _sentence_pieces(fields: _Fields, vocabulary: Mapping[str, int]) -> Tokenizer:
    """The tokenizer of Gemma and Llama 2: a pair is merged if the whole is in the vocabulary, that with the best score first."""
    scores = fields.list_of("tokenizer.ggml.scores", int, float)
    kinds = fields.list_of("tokenizer.ggml.token_type", int)
    pairs = [
        (-scores[number], number, (token[:cut], token[cut:]))
        for token, number in vocabulary.items()
        if kinds[number] == NORMAL_TOKEN
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=dict(vocabulary),
            merges=[pair for _, _, pair in sorted(pairs)],
            unk_token=next(
                (one for one, n in vocabulary.items() if kinds[n] == UNKNOWN_TOKEN), None
            ),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = fields.flag("tokenizer.ggml.add_space_prefix", default=True)
    spaces: list[Any] = [normalizers.Replace(" ", SPACE)]
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), *spaces] if has_prefix else spaces
    )
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] * has_prefix)])
    return tokenizer


def _split(pattern: str) -> list[Any]:
    return [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


PRE_TOKENIZERS: dict[str, list[Any]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)],
    "lfm2": _split(LLAMA_PATTERN),
    "llama-bpe": _split(LLAMA_PATTERN),
    "qwen2": _split(QWEN_PATTERN),
    "qwen35": _split(QWEN35_PATTERN),
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


def unpermuted(gguf_name: str, array: Any, header: GgufHeader) -> Any:
    """Llama's queries and keys: GGUF interleaves the two halves of each rotated pair."""
    order = row_order(gguf_name, len(array), header)
    return array if order is None else array[sorted(range(len(array)), key=order.__getitem__)]


def row_order(gguf_name: str, num_rows: int, header: GgufHeader) -> list[int] | None:
    """The rows of a weight in the order in which a GGUF file stores them; None where it is their own."""
    part = gguf_name.split(".")[-2]
    if header.architecture != "llama" or part not in ("attn_q", "attn_k"):
        return None
    half = num_rows // (header.num_heads if part == "attn_q" else header.num_kv_heads) // 2
    starts = range(0, num_rows, 2 * half)
    return [start + side * half + row for start in starts for row in range(half) for side in (0, 1)]

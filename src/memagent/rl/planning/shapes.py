"""Sizes of a model, known before its weights are here.

find_shape("Qwen2.5-7B-Instruct").num_parameters      # 7.6e9, from the table
find_shape("./my-model")                              # from its config.json
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memagent.engines import store
from memagent.errors import ConfigError
from memagent.foreign import foreign_file
from memagent.names import hint
from memagent.rl.settings import ModelSettings, ScratchSettings

BF16 = 2
"""Bytes of a number in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder with grouped queries and a gated feed-forward part, as Llama and Qwen are."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    is_tied: bool = False
    """One matrix is both embedding and output."""

    @property
    def attention_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Width of all key heads."""
        return self.num_kv_heads * self.head_size

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers: what every token is multiplied with."""
        attention = 2 * self.hidden_size * (self.attention_size + self.kv_size)
        norms = 2 * self.hidden_size
        return self.num_layers * (attention + 3 * self.hidden_size * self.ffn_size + norms)

    @property
    def num_parameters(self) -> int:
        """All parameters."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.is_tied else 2)
        return self.layer_parameters + embeddings

    @property
    def weight_bytes(self) -> int:
        """Of the weights in bfloat16."""
        return BF16 * self.num_parameters

    @property
    def kv_bytes(self) -> int:
        """Of the keys and values of one token."""
        return 2 * BF16 * self.num_layers * self.kv_size

    @property
    def traffic_width(self) -> int:
        """Of all layers: what operations between matrix products read and write is in proportion to it."""
        return self.num_layers * (4 * self.hidden_size + 2 * self.ffn_size)

    def lora_parameters(self, rank: int) -> int:
        """Parameters of an adapter of all linear layers."""
        hidden, ffn = self.hidden_size, self.ffn_size
        widths = 2 * (hidden + self.attention_size) + 2 * (hidden + self.kv_size)
        widths += 3 * (hidden + ffn)
        return self.num_layers * rank * widths


def _shape(
    layers: int, hidden: int, ffn: int, heads: int, kv: int, head: int, vocab: int, tied: bool
) -> ModelShape:
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        ffn_size=ffn,
        num_heads=heads,
        num_kv_heads=kv,
        head_size=head,
        vocab_size=vocab,
        is_tied=tied,
    )


SHAPES: dict[str, ModelShape] = {
    "smollm2-135m": _shape(30, 576, 1536, 9, 3, 64, 49152, True),
    "smollm2-360m": _shape(32, 960, 2560, 15, 5, 64, 49152, True),
    "smollm2-1.7b": _shape(24, 2048, 8192, 32, 32, 64, 49152, True),
    "qwen2.5-0.5b": _shape(24, 896, 4864, 14, 2, 64, 151936, True),
    "qwen2.5-1.5b": _shape(28, 1536, 8960, 12, 2, 128, 151936, True),
    "qwen2.5-3b": _shape(36, 2048, 11008, 16, 2, 128, 151936, True),
    "qwen2.5-7b": _shape(28, 3584, 18944, 28, 4, 128, 152064, False),
    "qwen2.5-14b": _shape(48, 5120, 13824, 40, 8, 128, 152064, False),
    "qwen2.5-32b": _shape(64, 5120, 27648, 40, 8, 128, 152064, False),
    "qwen2.5-72b": _shape(80, 8192, 29568, 64, 8, 128, 152064, False),
    "qwen3-0.6b": _shape(28, 1024, 3072, 16, 8, 128, 151936, True),
    "qwen3-1.7b": _shape(28, 2048, 6144, 16, 8, 128, 151936, True),
    "qwen3-4b": _shape(36, 2560, 9728, 32, 8, 128, 151936, True),
    "qwen3-8b": _shape(36, 4096, 12288, 32, 8, 128, 151936, False),
    "qwen3-14b": _shape(40, 5120, 17408, 40, 8, 128, 151936, False),
    "llama-3.1-8b": _shape(32, 4096, 14336, 32, 8, 128, 128256, False),
}
"""By name, without what says how it was trained: Instruct, Coder."""
_ALIASES = {"memagent-135m": "smollm2-135m", "memagent-1.5b": "qwen2.5-1.5b"}
_VARIANT = re.compile(r"-(instruct|coder|base|chat|it|1m|math)(?=-|$)|[.-](q\d\w*|gguf)(?=[.-]|$)")


def model_shape(settings: ModelSettings) -> ModelShape:
    """Sizes of the model that a config trains."""
    if settings.scratch is not None:
        return scratch_shape(settings.scratch)
    assert settings.source is not None, "a config names its model"
    return find_shape(settings.source)


def find_shape(source: str) -> ModelShape:
    """Sizes of a model by its folder, or by its name."""
    for place in (Path(source).expanduser(), _installed(source)):
        if place is not None and (place / "config.json").is_file():
            return read_shape(place / "config.json")
    name = _bare(source)
    if name not in SHAPES:
        raise ConfigError(
            f"the sizes of the model {source} are not known: `model.source` is no folder with a config.json, "
            f"and {hint(name, SHAPES)}"
        )
    return SHAPES[name]


def _installed(source: str) -> Path | None:
    """Where a model that was pulled lies; None for other names."""
    try:
        return store.find(source)
    except ConfigError:
        return None


def _bare(source: str) -> str:
    """`Qwen/Qwen2.5-Coder-1.5B-Instruct` is `qwen2.5-1.5b`."""
    name = Path(source).name.lower()
    return _VARIANT.sub("", _ALIASES.get(name, name))


def read_shape(path: Path) -> ModelShape:
    """Sizes from a config.json."""
    with foreign_file(path, "does not describe a decoder"):
        return _from_json(json.loads(path.read_text(encoding="utf-8")))


def _from_json(values: dict[str, Any]) -> ModelShape:
    heads = int(values["num_attention_heads"])
    hidden = int(values["hidden_size"])
    return ModelShape(
        num_layers=int(values["num_hidden_layers"]),
        hidden_size=hidden,
        ffn_size=int(values["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=int(values.get("num_key_value_heads") or heads),
        head_size=int(values.get("head_dim") or hidden // heads),
        vocab_size=int(values["vocab_size"]),
        is_tied=bool(values.get("tie_word_embeddings", False)),
    )


def scratch_shape(settings: ScratchSettings) -> ModelShape:
    """Sizes of a model with random weights."""
    return ModelShape(
        num_layers=settings.num_layers,
        hidden_size=settings.hidden_size,
        ffn_size=2 * settings.hidden_size,
        num_heads=settings.num_heads,
        num_kv_heads=settings.num_heads,
        head_size=settings.hidden_size // settings.num_heads,
        vocab_size=settings.vocab_size,
        is_tied=True,
    )

"""Sizes of a model in training, in bytes: weights, optimizer, activations, keys and values.

    shape = find_shape("Qwen2.5-7B-Instruct")      from a table by name, or from the config.json of a folder
    trainer_memory(shape, config, num_ranks=8)     what a trainer rank holds
    cache_bytes(free)                              what the engine of the trainer's process takes for its cache

`plan.py` adds these up before a run; `weights/models.py` allocates by them. Weights are in bfloat16; masters,
gradients and the two moments of what is trained are in float32. FSDP2 gives each rank an equal shard of them and
gathers a layer when it is computed. No torch here.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memagent.engines import store
from memagent.errors import ConfigError
from memagent.foreign import foreign_file
from memagent.names import hint
from memagent.rl.settings import ModelSettings, ScratchSettings, TrainConfig

GIB = 2**30
BF16 = 2
"""Bytes of a number in bfloat16."""
MASTER_BYTES = 4
GRADIENT_BYTES = 4
MOMENT_BYTES = 8
CHECKPOINT_BYTES = BF16 + MASTER_BYTES + MOMENT_BYTES
"""On disk for each trained parameter."""
ACTIVATION_BYTES = 35
"""For each token, layer and unit of width. Measured: 23 GiB for 16,384 more tokens at 1.5B; 20 GiB for
packs of 32,768 at 135M."""
KEPT_BYTES = 2
"""The same for what gradient checkpointing keeps."""
GATHERED_LAYERS = 2
"""Layers that FSDP holds in full at a time."""
OVERHEAD = 2 * GIB
"""What the driver, kernels and libraries take."""
ADAPTER_RANK = 16
"""Rank of an adapter whose folder is not read."""
CACHE_SHARE = 0.3
"""Share of a GPU's free memory for the cache of an engine in the trainer's process; training needs the rest."""
REPLICA_CACHE_SHARE = 0.5
"""The same for an engine replica, as every engine takes it that is alone in its process."""


def cache_bytes(free: float, *, has_trainer: bool = True) -> float:
    """The size of an engine's KV cache, where this much of its GPU is free."""
    return free * (CACHE_SHARE if has_trainer else REPLICA_CACHE_SHARE)


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
        """Bytes of the weights in bfloat16."""
        return BF16 * self.num_parameters

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * BF16 * self.num_layers * self.kv_size

    def lora_parameters(self, rank: int) -> int:
        """Parameters of an adapter of all linear layers."""
        hidden, ffn = self.hidden_size, self.ffn_size
        widths = 2 * (hidden + self.attention_size) + 2 * (hidden + self.kv_size)
        widths += 3 * (hidden + ffn)
        return self.num_layers * rank * widths


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """Bytes on one GPU, by what they are for."""

    weights: float = 0.0
    reference: float = 0.0
    """Frozen weights of the KL term."""
    masters: float = 0.0
    gradients: float = 0.0
    moments: float = 0.0
    gathered: float = 0.0
    """Layers that are held in full while they are computed."""
    activations: float = 0.0
    logits: float = 0.0
    engine_weights: float = 0.0
    """A copy for generation, where it is not the trainer's own."""
    cache: float = 0.0
    """Keys and values."""
    overhead: float = OVERHEAD

    @property
    def resident(self) -> float:
        """What stays when neither training nor generation is going on."""
        parts = (self.weights, self.reference, self.masters, self.gradients, self.moments)
        return sum(parts) + self.overhead

    @property
    def training(self) -> float:
        """While an update is computed."""
        return self.resident + self.gathered + self.activations + self.logits

    @property
    def generating(self) -> float:
        """While rollouts are sampled."""
        return self.resident + self.engine_weights + self.cache

    def generating_with(self, *, engine_weights: float, cache: float) -> GpuMemory:
        """The same GPU while it generates."""
        idle = replace(self, gathered=0.0, activations=0.0, logits=0.0)
        return replace(idle, engine_weights=engine_weights, cache=cache)


def num_trained(shape: ModelShape, config: TrainConfig) -> int:
    """Parameters that a run trains."""
    if config.has_adapter:
        return shape.lora_parameters(config.model.lora_rank or ADAPTER_RANK)
    return shape.num_parameters


def trainer_memory(
    shape: ModelShape, config: TrainConfig, *, num_ranks: int, loss_share: float = 1.0
) -> GpuMemory:
    """What one of some trainer ranks holds. `loss_share`: how many of a pack's tokens have logits."""
    cluster, update = config.cluster, config.update
    is_offloaded = cluster is not None and cluster.offload
    trained = 0.0 if is_offloaded else num_trained(shape, config) / num_ranks
    has_reference = config.objective.kl_coef > 0 and not (config.has_adapter or is_offloaded)
    shard = shape.weight_bytes / num_ranks
    layer = shape.layer_parameters / shape.num_layers
    gathered = BF16 * (GATHERED_LAYERS * layer + shape.vocab_size * shape.hidden_size)
    per_width = ACTIVATION_BYTES * shape.num_layers
    if update.checkpointing:
        per_width = ACTIVATION_BYTES + KEPT_BYTES * shape.num_layers
    return GpuMemory(
        weights=0.0 if is_offloaded else shard,
        reference=shard if has_reference else 0.0,
        masters=MASTER_BYTES * trained,
        gradients=GRADIENT_BYTES * trained,
        moments=MOMENT_BYTES * trained,
        gathered=gathered if num_ranks > 1 or is_offloaded else 0.0,
        activations=per_width * shape.hidden_size * update.max_tokens,
        logits=2 * BF16 * shape.vocab_size * loss_share * update.max_tokens,
    )


# --- shapes of models -----------------------------------------------------------------------------


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
    try:
        installed = store.find(source)
    except ConfigError:
        installed = None
    for place in (Path(source).expanduser(), installed):
        if place is not None and (file := place / "config.json").is_file():
            with foreign_file(file, "does not describe a decoder"):
                return _from_json(json.loads(file.read_text(encoding="utf-8")))
    name = Path(source).name.lower()
    name = _VARIANT.sub("", _ALIASES.get(name, name))  # `qwen2.5-coder-1.5b-instruct`
    if name not in SHAPES:
        raise ConfigError(
            f"the sizes of the model {source} are not known: `model.source` is no folder with a config.json, "
            f"and {hint(name, SHAPES)}"
        )
    return SHAPES[name]


def _from_json(values: dict[str, Any]) -> ModelShape:
    heads, hidden = int(values["num_attention_heads"]), int(values["hidden_size"])
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

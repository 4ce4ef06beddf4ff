"""The model in training, and the engine that samples replies from the same weights.

    trained = open_model(config.model, "smollm2-135m", seed=config.seed)
    engine = open_rollout_engine(config.rollout, trained, merged=open_merged(config.rollout, trained))

Without an adapter weights exist once: the engine in this process generates with the parameters that the
optimizer updates in place, so new weights reach it without a copy. With an adapter it may have a merged copy.

Tensors may be sharded over ranks (FSDP2). One of a process that trains alone is its own whole and its own part:

    parameter   DTensor on 4 ranks ── whole ──▶ the same tensor on every rank    (all ranks must call it)
                                   ── local ──▶ this rank's quarter, in place
    stored      a whole tensor     ── like ───▶ sharded as a parameter is, without communication
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from memagent.config import LocalConfig
from memagent.engines.addresses import key_of_named
from memagent.engines.base import BaseEngine, open_engine, split_spec
from memagent.engines.local.adapters import adapted_layers, merged_weight, replace_layer
from memagent.engines.local.engine import LocalEngine
from memagent.engines.local.loading import LoadedModel, load, quietly
from memagent.errors import ConfigError
from memagent.files import replacing
from memagent.rl.settings import ModelSettings, RolloutSettings, ScratchSettings
from memagent.rl.sizes import GIB, cache_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor. Shards are gathered, so all ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, on the same memory, without gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(pattern: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """A whole tensor that every rank has, sharded as the pattern is; a sharded one stays as it is."""
    if not isinstance(pattern, DTensor) or isinstance(stored, DTensor):
        return stored
    return distribute_tensor(
        stored.to(pattern.device), pattern.device_mesh, list(pattern.placements), src_data_rank=None
    )


def gathered(
    tensors: Iterable[tuple[str, torch.Tensor]], *, is_kept: bool = True
) -> dict[str, torch.Tensor]:
    """Whole tensors by name; those that were sharded come to the CPU, one at a time.

    All processes that share them must call it; where they are not kept the result is empty.
    """
    found = {}
    for name, tensor in tensors:
        one = whole(tensor.detach())
        if is_kept:
            found[name] = one.cpu() if isinstance(tensor, DTensor) else one
    return found


LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers, which get an adapter."""
PLAIN_ARGUMENTS = "--generation-config vllm"
"""Has vLLM ignore the sampling defaults of the model's generation_config.json."""
EXACT_TOKENS = {"return_token_ids": True, "logprobs": True}
"""Fields of requests to an endpoint: training needs exact token ids and log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A model in training."""

    loaded: LoadedModel
    parameters: tuple[tuple[str, torch.nn.Parameter], ...]
    """The trainable parameters, by name."""
    has_adapter: bool

    @property
    def model(self) -> Any:
        return self.loaded.model

    @property
    def is_sharded(self) -> bool:
        """Whether several processes share the parameters."""
        return any(isinstance(parameter, DTensor) for _, parameter in self.parameters)

    @property
    def num_trained(self) -> int:
        """Number of trainable parameters."""
        return sum(parameter.numel() for _, parameter in self.parameters)

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model."""
        return sum(parameter.numel() for parameter in self.loaded.model.parameters())


def open_model(
    settings: ModelSettings, source: str, *, seed: int, dtype: torch.dtype | None = None
) -> Trained:
    """Load the model of a run from `source` and select the trainable parameters.

    By default weights are in float32 on a CPU and in bfloat16 elsewhere.
    """
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    is_cpu = torch.device(device).type == "cpu"
    dtype = dtype or (torch.float32 if is_cpu else torch.bfloat16)
    loaded = load(source, adapter=settings.adapter, device=device, dtype=dtype)
    if settings.adapter is None and settings.lora_rank is not None:
        _add_adapter(loaded.model, settings, seed=seed)
    has_adapter = settings.adapter is not None or settings.lora_rank is not None
    for name, parameter in loaded.model.named_parameters():
        parameter.requires_grad_(not has_adapter or "lora_" in name)
    parameters = tuple((n, p) for n, p in loaded.model.named_parameters() if p.requires_grad)
    if not parameters:
        raise ConfigError(
            "the model has no trainable parameters; set `model.lora_rank`, or remove `model.adapter`"
        )
    return Trained(loaded=loaded, parameters=parameters, has_adapter=has_adapter)


def open_merged(settings: RolloutSettings, trained: Trained) -> MergedCopy | None:
    """The merged copy that replies are sampled from; None if the run has none."""
    is_merged = settings.merged
    if is_merged is None:
        is_merged = trained.model.device.type == "cuda" or settings.asynchronous
    if settings.engine is not None or not trained.has_adapter or not is_merged:
        return None
    return MergedCopy(trained.loaded)


def open_rollout_engine(
    settings: RolloutSettings, trained: Trained, *, merged: MergedCopy | None = None
) -> BaseEngine:
    """The engine that samples replies: on the weights in training, their merged copy, or outside this process."""
    values = dict(settings.engine_settings)
    if settings.engine is not None:
        return open_outside(settings.engine, values)
    device = trained.loaded.model.device
    if device.type == "cuda" and "cache_gb" not in values:
        free, _ = torch.cuda.mem_get_info(device)
        values["cache_gb"] = cache_bytes(free) / GIB
    for name in ("adapter", "device"):
        if name in values:
            raise ConfigError(f"set `model.{name}` instead of `rollout.engine_settings.{name}`")
    loaded = trained.loaded if merged is None else merged.loaded
    return LocalEngine(loaded, LocalConfig.parse(values))


def open_outside(name: str, values: dict[str, Any]) -> BaseEngine:
    """An engine outside this process that samples from the model's own distribution."""
    kind = split_spec(name)[0]
    if kind == "openai":
        values |= key_of_named(values, {})
        values["extra_body"] = {**EXACT_TOKENS, **values.get("extra_body", {})}
    if kind == "vllm":
        given = values.get("vllm_args") or ""
        values["token_ids"] = True
        if "--generation-config" not in given:
            values["vllm_args"] = f"{PLAIN_ARGUMENTS} {given}".strip()
    engine = open_engine(name, **values)
    if kind in ("openai", "vllm"):
        from memagent.engines.openai import EndpointEngine

        assert isinstance(engine, EndpointEngine)
        engine.sample_plainly()
    return engine


class Snapshot:
    """Values of the trainable parameters at one moment: the reference of the KL term."""

    def __init__(self, values: Mapping[str, torch.Tensor], *, offload: bool = False) -> None:
        """`values` are this process's parts. With `offload` they stay in CPU memory between uses."""
        self._values = {name: one.cpu() if offload else one for name, one in values.items()}
        self._offload = offload

    @classmethod
    def of(cls, trained: Trained, *, offload: bool = False) -> Snapshot:
        """A copy of the current values."""
        values = {name: local(parameter).clone() for name, parameter in trained.parameters}
        return cls(values, offload=offload)

    @contextmanager
    def in_place(self, trained: Trained) -> Iterator[None]:
        """Swap these values into the model until the block ends."""
        if self._offload or trained.is_sharded:
            with self._copied(trained):
                yield
            return
        own = {name: parameter.data for name, parameter in trained.parameters}
        try:
            for name, parameter in trained.parameters:
                parameter.data = self._values[name]
            yield
        finally:
            for name, parameter in trained.parameters:
                parameter.data = own[name]

    @contextmanager
    def _copied(self, trained: Trained) -> Iterator[None]:
        """FSDP2 keeps its own reference to the memory of a shard, so values are copied there and back."""
        device = "cpu" if self._offload else None
        own = {name: local(one).to(device, copy=True) for name, one in trained.parameters}
        try:
            _write(trained, self._values)
            yield
        finally:
            _write(trained, own)

    @classmethod
    def read(cls, path: Path, trained: Trained, *, offload: bool = False) -> Snapshot:
        """Saved values, on the device of the model."""
        from safetensors.torch import load_file

        stored = load_file(path)
        values = {
            name: local(like(one, stored[name])).to(one.device) for name, one in trained.parameters
        }
        return cls(values, offload=offload)


def save_values(trained: Trained, path: Path, *, is_writer: bool = True) -> None:
    """Write the whole values of the trainable parameters; the file is complete or does not exist.

    All processes that share the model must call it, and one of them writes.
    """
    from safetensors.torch import save_file

    values = gathered(trained.parameters, is_kept=is_writer)
    if is_writer:
        with replacing(path) as part:
            save_file({name: value.contiguous() for name, value in values.items()}, part)


def _write(trained: Trained, values: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in trained.parameters:
        local(parameter).copy_(values[name])


def _add_adapter(model: Any, settings: ModelSettings, *, seed: int) -> None:
    """Add LoRA layers to the model. The output is unchanged at first: one of the two factors is 0."""
    from peft import LoraConfig

    assert settings.lora_rank is not None
    torch.manual_seed(seed)
    alpha = settings.lora_alpha if settings.lora_alpha is not None else 2 * settings.lora_rank
    model.add_adapter(
        LoraConfig(
            r=settings.lora_rank,
            lora_alpha=alpha,  # type: ignore[arg-type]
            target_modules=list(LORA_TARGETS),
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
    )


# --- a copy with its adapter merged ---------------------------------------------------------------

#     model in training    q_proj: W, and A, B of the adapter      y = W x + scale B (A x)
#                               │ refresh, after each update
#     merged copy          q_proj: W + scale B A                   y = W' x
# An adapter adds two small products to each matrix, and their kernel launches dominate a decoding step. The copy
# has none. Only matrices with an adapter exist twice; embeddings, norms and biases are shared with the model.
# Sums are computed in float32 and written in place, so that captured graphs stay valid.


class MergedCopy:
    """The model of an engine; `refresh` copies the current values of the adapter."""

    def __init__(self, loaded: LoadedModel) -> None:
        model: Any = loaded.model
        shared = {id(parameter): parameter for parameter in model.parameters()}
        twin = copy.deepcopy(model, memo=shared)  # the modules, on the same parameters
        self._pairs: list[tuple[Any, torch.nn.Parameter]] = []
        """Each layer with an adapter, and the weights of its counterpart without."""
        for name, layer in adapted_layers(model, setting="rollout.merged"):
            plain = twin.get_submodule(name).get_base_layer()
            plain.weight = torch.nn.Parameter(plain.weight.detach().clone(), requires_grad=False)
            replace_layer(twin, name, plain)
            self._pairs.append((layer, plain.weight))
        # the file has the weights without the adapter
        self.loaded = replace(loaded, model=twin)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Merge the current adapter. Nothing may be generated meanwhile."""
        for layer, merged in self._pairs:
            merged.copy_(merged_weight(layer))


# --- a model with random weights ------------------------------------------------------------------

#     texts ──▶ byte pairs ──▶ tokenizer.json  ┐
#     settings, seed ──▶ random Llama          ├──▶ a Hugging Face folder like any other
#     roles ──▶ chat template, end of a turn   ┘
# Any text can be encoded: what no byte pair covers is encoded as bytes. Each digit is a token, so that all
# numbers use the same ten tokens. Texts cannot contain a role mark: the chat template splits what looks like
# one. The same arguments give the same bytes.

ROLES = ("system", "user", "assistant")
END = "<|end|>"
MARKS = (*(f"<|{role}|>" for role in ROLES), END)
MIN_FREQUENCY = 2
"""Byte pairs must occur this often to become a token."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message.role }}|>{{ message.content | replace('<|', '< |') }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# A word with the space before it, one digit, punctuation, or white space.
_PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def build_scratch(
    settings: ScratchSettings, texts: Iterable[str], folder: Path, *, seed: int
) -> Path:
    """Write the model and its tokenizer to a folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    with quietly():
        _save_tokenizer(_trained(texts, settings.vocab_size), folder, window=settings.window)
        _save_model(settings, folder, seed=seed)
    return folder


def _trained(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer trained on texts."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_FREQUENCY,
        special_tokens=list(MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _save_tokenizer(tokenizer: Tokenizer, folder: Path, *, window: int) -> None:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=window,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def _save_model(settings: ScratchSettings, folder: Path, *, seed: int) -> None:
    import torch
    from tokenizers import Tokenizer
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=settings.hidden_size,
        intermediate_size=2 * settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_heads,
        max_position_embeddings=settings.window,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=None,  # the embedding of a pad token is never trained
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=end)
    model.save_pretrained(folder)

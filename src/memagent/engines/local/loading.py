"""Load a model into this process: a name, a Hugging Face folder, or a GGUF file.

    load("smollm2-135m")                        # from the store, see `memagent models pull`
    load("./my-model", adapter="./my-lora")     # a folder and a LoRA adapter
    load("./model.gguf")                        # dequantised
    load("./my-model", yarn_window=131072)      # a longer window, see `yarn.py`

Only safetensors and GGUF files are read and no code of a model is run, so loading an untrusted model is
as safe as reading a file: what a model's files say is compared with the weights that they hold before
anything of that size is built, and any failure is one line with the file's name. Nothing is printed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from memagent.engines import store
from memagent.engines.llamacpp.adapters import indexed_files
from memagent.engines.local.gguf_files import GgufHeader, known_name, open_header, unpermuted
from memagent.engines.yarn import ARCHITECTURES, YarnSettings, yarn_settings
from memagent.errors import ConfigError, plain
from memagent.foreign import check_tokenizer, foreign_file
from memagent.plugins import require
from memagent.tokens.tokenizers import ModelTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

MODEL_CLASSES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Their classes in transformers."""
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYER_NAME = re.compile(r"model\.layers\.(\d{1,6})\.")
LOADING_SECONDS = 60.0
SLOW_DISK_BYTES = 10e6
"""Files may take this long to load: so many seconds, and one for so many bytes."""
MAX_WINDOW = 1 << 31
MAX_THREADS = 16
ROWS_BETWEEN = 16
QUANTISATION_ERROR = 0.15
"""Maximum relative difference of two copies of a matrix; quantisation to four bits causes about 0.08."""
SLIDING = "sliding_attention"
"""Layers that attend to the last tokens only."""
Stretch = Callable[[Mapping[str, Any]], YarnSettings | None]
"""`yarn_settings` with the window or factor of `load`."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in memory, with its tokenizer."""

    model: PreTrainedModel
    """In evaluation mode. With an adapter: the base model with LoRA layers, unless they were merged."""
    tokenizer: PreTrainedTokenizerFast
    """Has a chat template."""
    name: str
    """The `source` argument of `load`."""
    window: int
    """Context length in tokens."""
    eos_ids: tuple[int, ...]
    """Tokens that end a reply."""
    tokenizer_folder: Path
    """Where `tokens.tokenizers.open_tokenizer` finds the tokenizer and the chat template."""

    @cached_property
    def vocabulary(self) -> ModelTokenizer:
        """The tokenizer without transformers, as reading uses it."""
        return ModelTokenizer(self.tokenizer_folder, store.public_name(self.name))


def load(
    source: str,
    *,
    adapter: str | None = None,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    merged: bool = False,
    yarn_window: int | None = None,
    yarn_factor: float | None = None,
) -> LoadedModel:
    """The model that `source` names: in the store, a folder, or a .gguf file.

    `adapter` is a LoRA folder as peft saves it; its weights may be split over files, with an index. With `merged` it
    is merged into the weights. `dtype` defaults to float32 on the CPU, which is faster there than bfloat16, and
    elsewhere to the stored one (bfloat16 for a GGUF file).
    `yarn_window` or `yarn_factor` extends the window; the model's files are not changed.
    """
    _require("torch", "transformers")
    if adapter is None:
        store.check_is_whole(source)
    path = store.locate(source)
    stretch = partial(yarn_settings, window=yarn_window, factor=yarn_factor)
    with quietly(), _memory_errors(source, device):
        target = _device(device)
        if target.type == "cpu":
            dtype = dtype or torch.float32
        folder, model = _load_model(path, dtype, target, stretch)
        tokenizer = _load_tokenizer(folder, path)
        if adapter is not None:
            _require("peft")
            from memagent.engines.local.adapters import put_on

            put_on(model, Path(adapter).expanduser())
        model.to(target)  # type: ignore[arg-type]
        if adapter is not None and merged:
            from memagent.engines.local.adapters import merge

            merge(model)
        model.eval()
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=source,
        window=_window(path, model),
        eos_ids=_eos_ids(path, model, tokenizer),
        tokenizer_folder=folder,
    )


def _require(*libraries: str) -> None:
    for library in libraries:
        require(library, f'a local model in torch needs {library}; pip install "memagent[gpu]"')


def device_names() -> list[str]:
    """Where models can run, the fastest first: GPUs by their names, then the CPU."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return [*(f"cuda:{number} ({torch.cuda.get_device_name(number)})" for number in gpus), "cpu"]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise ConfigError(f"device {name!r} cannot be used here ({reason}); try cpu") from None
    return device


# --- weights --------------------------------------------------------------------------------------


def _load_model(
    path: Path, dtype: torch.dtype | None, device: torch.device, stretch: Stretch
) -> tuple[Path, PreTrainedModel]:
    """The folder with its tokenizer, and the model, which may still be on the CPU. `dtype` None: as stored."""
    if path.is_file():
        return _load_gguf(path, dtype, device, stretch)
    from transformers import AutoConfig  # noqa: F401  before the guard: an import takes its time

    architecture = _check_folder(path)
    model_class = _model_class(architecture)
    with loading(path, sum(file.stat().st_size for file in path.glob("*.safetensors"))):
        config = _config(path, stretch)
        _check_shapes(path, model_class, config, _stored_shapes(path))
        model = model_class.from_pretrained(
            path,
            config=config,
            dtype=dtype or "auto",
            attn_implementation="sdpa",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    return path, model


def loading(
    path: Path, num_bytes: int, failure: str = "cannot be loaded"
) -> AbstractContextManager[None]:
    """The guard around a model's files, with time for their size."""
    seconds = LOADING_SECONDS + num_bytes / SLOW_DISK_BYTES
    return foreign_file(path, failure, seconds=seconds, unless=is_out_of_memory)


def _load_gguf(
    path: Path, dtype: torch.dtype | None, device: torch.device, stretch: Stretch
) -> tuple[Path, PreTrainedModel]:
    from transformers import GenerationConfig

    _require("gguf")
    dtype = dtype or torch.bfloat16
    header = open_header(path)
    if header.refusal is not None:
        raise ConfigError(f"{path} {header.refusal}")
    model_class = _model_class(header.architecture)
    with loading(path, path.stat().st_size):
        config = _config(header.folder, stretch)
        _check_shapes(
            path, model_class, config, {known_name(each): each.shape for each in header.tensors}
        )
        weights = _read_weights(path, header, dtype=dtype, device=device)
        config.tie_word_embeddings = HEAD not in weights
        config.dtype = dtype
        model = _assembled(model_class, config, weights)
        model.generation_config = GenerationConfig.from_pretrained(
            header.folder, local_files_only=True
        )
    model.name_or_path = str(path)  # adapters record their base model
    return header.folder, model


def _assembled(
    model_class: Any, config: Any, weights: Mapping[str, torch.Tensor]
) -> PreTrainedModel:
    """The model of these weights, as `from_pretrained` makes it; they are used as they are, on any device."""
    config._attn_implementation = "sdpa"
    config.name_or_path = None  # it is part of the fingerprint of a model, and not a folder here
    with torch.device("meta"):
        model: PreTrainedModel = model_class(config)
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    backbone: Any = model.get_decoder()
    backbone.rotary_emb = type(backbone.rotary_emb)(config)  # computed, not stored
    model.eval()
    return model


def _check_shapes(
    path: Path, model_class: Any, config: Any, stored: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse a configuration that asks for other weights than the files hold, before any is read.

    The model is built without memory for its weights; only the number of its layers costs time.
    """
    num_layers = config.num_hidden_layers
    present = {found[1] for name in stored if (found := LAYER_NAME.match(name))}
    if type(num_layers) is not int or not 1 <= num_layers <= len(present):
        raise ConfigError(
            f"{path} has weights of {len(present)} layers, its configuration says "
            f"{plain(str(num_layers), 40)}"
        )
    with torch.device("meta"):
        expected = model_class(config).state_dict()
    for name, weight in expected.items():
        if name in stored and stored[name] != tuple(weight.shape):
            raise ConfigError(
                f"{path}: {name} has the shape {stored[name]}, the configuration says "
                f"{tuple(weight.shape)}"
            )
    is_tied = bool(config.tie_word_embeddings)
    missing = sorted(
        name for name in expected if name not in stored and not (is_tied and name == HEAD)
    )
    if missing:
        raise ConfigError(f"{path} is missing {len(missing)} weights, such as {missing[0]}")


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights in a folder, by name."""
    from safetensors import safe_open

    whole = folder / "model.safetensors"
    files = [whole] if whole.is_file() else indexed_files(folder / f"{whole.name}.index.json")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118  it is no mapping
                shapes[name] = tuple(weights.get_slice(name).get_shape())
    return shapes


def _config(folder: Path, stretch: Stretch) -> Any:
    """The configuration in a folder, with YaRN applied if requested."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    yarn = stretch(config.to_dict())
    if yarn is not None:
        for name, value in yarn.overrides.items():
            setattr(config, name, value)
    check_full_attention(config, str(folder))
    return config


def check_full_attention(config: Any, name: str) -> None:
    """Refuse a model whose tokens do not attend to all tokens before them, or whose angles depend on other rows."""
    window = getattr(config, "sliding_window", None)
    layers = set(getattr(config, "layer_types", None) or ([SLIDING] if window else []))
    if window and window >= config.max_position_embeddings:
        layers.discard(SLIDING)
    if others := layers - {"full_attention"}:
        raise ConfigError(
            f"{name} has layers that are not full attention ({plain(', '.join(sorted(others)), 80)}, `sliding_window` {window}), "
            "which would be computed wrong; use a model with full attention in all layers"
        )
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if kind in ("dynamic", "longrope"):
        raise ConfigError(
            f"{name} has rotary angles that depend on the longest row of a batch (`rope_type` {kind}); "
            "set a fixed kind such as yarn in its config.json"
        )


def _model_class(architecture: str) -> Any:
    """A subclass of PreTrainedModel. Any, because `from_pretrained` is not fully typed."""
    import transformers

    return getattr(transformers, MODEL_CLASSES[ARCHITECTURES.index(architecture)])


def _check_folder(folder: Path) -> str:
    """The architecture of the model in a folder, which is checked to be complete."""
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"{folder} has no config.json, so it is not a model folder")
    with foreign_file(file, "cannot be read"):
        architecture = json.loads(file.read_text(encoding="utf-8"))["model_type"]
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{folder} is a {plain(str(architecture), 80)} model; the local engine runs {', '.join(ARCHITECTURES)}"
        )
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{folder} has no tokenizer.json; copy the model's own there")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder} has no .safetensors weights")
    return str(architecture)


# --- tokenizer --------------------------------------------------------------------------------------


def _load_tokenizer(folder: Path, path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of tokenizer.json: model-specific classes would build their own instead."""
    from transformers import PreTrainedTokenizerFast

    if (file := folder / "tokenizer.json").is_file():
        check_tokenizer(file)
    with foreign_file(path, "has a broken tokenizer", seconds=LOADING_SECONDS):
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
            folder, local_files_only=True, clean_up_tokenization_spaces=False
        )
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{path} has no chat template, so it cannot take messages; use the instruct "
            "version of the model, or add a chat_template.jinja"
        )
    return tokenizer


def _eos_ids(
    path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> tuple[int, ...]:
    generation = model.generation_config
    assert generation is not None, "causal models have a generation config"
    ids = [*_as_ids(generation.eos_token_id), *_as_ids(tokenizer.eos_token_id)]
    if any(type(token) is not int for token in ids):
        raise ConfigError(f"{path} ends replies with {plain(str(ids), 80)}, which are no tokens")
    return tuple(dict.fromkeys(ids))


def _as_ids(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _window(path: Path, model: PreTrainedModel) -> int:
    window = model.config.max_position_embeddings
    if type(window) is not int or not 1 <= window < MAX_WINDOW:
        raise ConfigError(f"{path} has a window of {plain(str(window), 40)} tokens")
    return window


# --- messages ---------------------------------------------------------------------------------------


@contextmanager
def quietly() -> Iterator[None]:
    """Silence progress bars, log messages and warnings of the libraries."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    has_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if has_bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def _memory_errors(source: str, device: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"{source} does not fit the memory of {device}; use a smaller model or another device"
        ) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch or Python means out of memory, or was raised on the way out of one that does."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if error.__context__ is not None and is_out_of_memory(error.__context__):
        return True
    # torch on the CPU, mmap and cuBLAS say it only in the message
    words = ("allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, (RuntimeError, OSError)) and any(word in str(error) for word in words)


# --- weights of GGUF files --------------------------------------------------------------------------


def _read_weights(
    path: Path, header: GgufHeader, *, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """The weights under transformers' names.

    Files store the matrix of a tied model twice where the copies are quantised differently. Then the one
    with more bits, the head's, is returned as the embeddings, and there is no head.
    """
    from gguf import GGMLQuantizationType, dequantize

    contents = np.asarray(np.memmap(path, mode="r", dtype=np.uint8))
    tensors = {known_name(tensor): tensor for tensor in header.tensors}

    def read(name: str, rows_between: int = 1) -> torch.Tensor:
        tensor = tensors[name]
        packed = contents[tensor.offset : tensor.offset + tensor.num_bytes]
        rows = packed.reshape(*tensor.shape[:-1], -1)[::rows_between]
        kind = GGMLQuantizationType(tensor.kind)
        try:
            with np.errstate(all="ignore"):
                weights = torch.from_numpy(dequantize(rows, kind).copy())
        except NotImplementedError:
            raise ConfigError(
                f"{path} stores weights as {kind.name}, which cannot be read"
            ) from None
        if rows_between == 1:
            weights = unpermuted(tensor.name, weights, header)
        return weights.to(device, dtype)

    if HEAD in tensors and _is_same_matrix(
        read(HEAD, ROWS_BETWEEN), read(EMBEDDINGS, ROWS_BETWEEN)
    ):
        tensors[EMBEDDINGS] = tensors.pop(HEAD)
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS)) as pool:
        return dict(zip(tensors, pool.map(read, tensors), strict=True))


def _is_same_matrix(head: torch.Tensor, embeddings: torch.Tensor) -> bool:
    """Whether some rows of two matrices differ by no more than quantisation does."""
    head, embeddings = head.float(), embeddings.float()
    return bool((head - embeddings).norm() <= QUANTISATION_ERROR * head.norm())

"""LoRA adapters: checked against the model and their own weights, then put into the model.

    put_on(model, Path("./my-lora"))     # a folder as peft saves it; its weights may be split over files
    merge(model)                         # W + scale B A in place of W, A and B: no further products

Regular expressions in a configuration are replaced by the names that they match, found with a limit of
time; peft would match them without one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import regex

from memagent.engines.llamacpp.adapters import PREFIX, config_file, weight_files
from memagent.engines.local.loading import LOADING_SECONDS, loading
from memagent.errors import ConfigError, plain
from memagent.foreign import foreign_file

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

PATTERN_SECONDS = 1.0
"""Time to match a regular expression with the names of all modules."""
NAME = re.compile(r"[\w.-]+")
EVERY_LINEAR = "all-linear"


def put_on(model: PreTrainedModel, adapter: Path) -> None:
    """Add LoRA layers to the model in place; its parameters then include the adapter's."""
    from peft import PeftConfig

    config_file(adapter)
    files = weight_files(adapter)
    with foreign_file(adapter, "is not an adapter", seconds=LOADING_SECONDS):
        config = PeftConfig.from_pretrained(str(adapter))
    if config.peft_type != "LORA":
        raise ConfigError(
            f"{adapter} is a {plain(str(config.peft_type), 80)} adapter; the local engine supports "
            "LoRA only"
        )
    num_bytes = sum(file.stat().st_size for file in files)
    with loading(adapter, num_bytes, "does not fit this model"):
        _check_sizes(adapter, config, files)
        _name_modules(adapter, config, [name for name, _ in model.named_modules() if name])
        _inject(model, adapter, files, config)


def adapted_layers(model: Any, *, setting: str) -> list[tuple[str, Any]]:
    """Layers with an adapter by name. Refuses those that cannot be merged; `setting` switches merging off."""
    from peft.tuners.lora import Linear, LoraLayer

    found = [(name, one) for name, one in model.named_modules() if isinstance(one, LoraLayer)]
    for name, layer in found:
        is_more = (*layer.lora_variant.values(), *layer.lora_bias.values())
        is_plain = isinstance(layer, Linear) and not any(is_more)
        if not is_plain or getattr(layer, "fan_in_fan_out", False):
            raise ConfigError(
                f"the adapter of {name} cannot be merged into its weights; set `{setting}=false`"
            )
    return found


def merged_weight(layer: Any) -> torch.Tensor:
    """The weights of a layer with its adapter added, in float32."""
    import torch

    total: torch.Tensor = layer.get_base_layer().weight.float()
    for name in layer.active_adapters:
        down, up = layer.lora_A[name].weight.float(), layer.lora_B[name].weight.float()
        total = torch.addmm(total, up, down, alpha=layer.scaling[name])
    return total


def merge(model: Any) -> None:
    """Merge the adapter of a model into its weights, in place; layers without one take its place."""
    import torch

    for name, layer in adapted_layers(model, setting="merged"):
        plain_layer = layer.get_base_layer()
        with torch.no_grad():
            plain_layer.weight.copy_(merged_weight(layer))
        replace_layer(model, name, plain_layer)
    del model.peft_config
    model._hf_peft_config_loaded = False  # or transformers would save an adapter


def replace_layer(model: Any, name: str, layer: Any) -> None:
    """Put a layer in the place of another one."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, layer)


def _check_sizes(adapter: Path, config: Any, files: Sequence[Path]) -> None:
    """Refuse ranks that the weights do not have, layers that are repeated, and modules to import."""
    from safetensors import safe_open

    largest = 0
    for file in files:
        with safe_open(file, framework="pt") as weights:
            shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118
        largest = max([largest, *(max(shape, default=0) for shape in shapes)])
    for rank in (config.r, *(config.rank_pattern or {}).values()):
        if type(rank) is not int or not 1 <= rank <= largest:
            raise ConfigError(f"{adapter} has no weights of rank {plain(str(rank), 40)}")
    if config.layer_replication or config.megatron_config:
        raise ConfigError(f"{adapter} is more than LoRA: it repeats layers or needs Megatron")


def _name_modules(adapter: Path, config: Any, modules: Sequence[str]) -> None:
    """Replace regular expressions by the names of the modules that they match."""
    if isinstance(config.target_modules, str) and config.target_modules != EVERY_LINEAR:
        config.target_modules = set(_matching(adapter, config.target_modules, modules))
    if isinstance(config.exclude_modules, str):
        config.exclude_modules = set(_matching(adapter, config.exclude_modules, modules)) or None
    config.rank_pattern = _by_module(adapter, config.rank_pattern or {}, modules)
    config.alpha_pattern = _by_module(adapter, config.alpha_pattern or {}, modules)
    for part in (config.modules_to_save, config.layers_pattern):
        for name in [part] if isinstance(part, str) else part or ():
            if not NAME.fullmatch(name):
                raise ConfigError(f"{adapter}: {plain(name, 80)} is not the name of a module")


def _by_module(adapter: Path, values: dict[str, Any], modules: Sequence[str]) -> dict[str, Any]:
    """Values by pattern as values by module, the first pattern that matches counting."""
    if all(NAME.fullmatch(pattern) for pattern in values):
        return values
    found: dict[str, Any] = {}
    for pattern, value in values.items():
        for name in _matching(adapter, rf"(.*\.)?({pattern})", modules):
            found.setdefault(name, value)
    return found


def _matching(adapter: Path, pattern: str, names: Iterable[str]) -> list[str]:
    end = time.monotonic() + PATTERN_SECONDS
    try:
        re.compile(pattern)  # as peft takes them: the other library has recursion, too
        compiled = regex.compile(pattern)
        return [
            name
            for name in names
            if compiled.fullmatch(name, timeout=max(end - time.monotonic(), 0.001))
        ]
    except (re.error, regex.error, RecursionError, OverflowError, TimeoutError) as error:
        reason = "never ends" if isinstance(error, TimeoutError) else "is no regular expression"
        raise ConfigError(f"{adapter}: the pattern {plain(pattern, 80)} {reason}") from None


def _inject(model: PreTrainedModel, adapter: Path, files: list[Path], config: Any) -> None:
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    config.inference_mode = False
    model.add_adapter(config)
    weights = {
        name.removeprefix(PREFIX): weight
        for file in files
        for name, weight in load_file(file).items()
    }
    report: Any = set_peft_model_state_dict(model, weights)
    missing = [name for name in report.missing_keys if "lora_" in name]
    if report.unexpected_keys or missing:
        wrong = [*report.unexpected_keys, *missing][0]
        raise ConfigError(
            f"{adapter} belongs to another model: {plain(wrong, 120)} has no counterpart"
        )

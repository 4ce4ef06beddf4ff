"""A copy of a model with its adapter merged into the weights, to generate from.

    model in training    q_proj: W, and A, B of the adapter      y = W x + scale B (A x)
                              │ refresh, after each update
    merged copy          q_proj: W + scale B A                   y = W' x

An adapter adds two small products to each matrix, and their kernel launches dominate a decoding step. The copy
has none. Only matrices with an adapter exist twice; embeddings, norms and biases are shared with the model.
Sums are computed in float32 and written in place, so that captured graphs stay valid.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from memagent.engines.local.loading import LoadedModel
from memagent.errors import ConfigError


class _Pair(NamedTuple):
    """A layer with an adapter, and the weights of its counterpart without."""

    layer: Any
    merged: torch.nn.Parameter


class MergedCopy:
    """The model of an engine; `refresh` copies the current values of the adapter."""

    def __init__(self, loaded: LoadedModel) -> None:
        model: Any = loaded.model
        twin = _twin(model)
        self._pairs = [_merged_pair(twin, name, layer) for name, layer in _adapted(model)]
        # the file has the weights without the adapter
        self.loaded = replace(loaded, model=twin, gguf=None)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Merge the current adapter. Nothing may be generated meanwhile."""
        for layer, merged in self._pairs:
            total = layer.get_base_layer().weight.float()
            for name in layer.active_adapters:
                down, up = layer.lora_A[name].weight.float(), layer.lora_B[name].weight.float()
                total = torch.addmm(total, up, down, alpha=layer.scaling[name])
            merged.copy_(total)


def _twin(model: Any) -> Any:
    """A copy of the modules on the same parameters."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, memo=shared)


def _adapted(model: Any) -> list[tuple[str, Any]]:
    """Layers with an adapter by name. Refuses those whose adapter is more than a product."""
    from peft.tuners.lora import Linear, LoraLayer

    found = [(name, one) for name, one in model.named_modules() if isinstance(one, LoraLayer)]
    for name, layer in found:
        is_plain = isinstance(layer, Linear) and not any(layer.use_dora.values())
        if not is_plain or getattr(layer, "fan_in_fan_out", False):
            raise ConfigError(
                f"the adapter of {name} cannot be merged into its weights; set `rollout.merged=false`"
            )
    return found


def _merged_pair(twin: Any, name: str, layer: Any) -> _Pair:
    """Replace a layer of the copy by one without an adapter that has its own weights."""
    parent, _, leaf = name.rpartition(".")
    plain = getattr(twin.get_submodule(parent), leaf).get_base_layer()
    plain.weight = torch.nn.Parameter(plain.weight.detach().clone(), requires_grad=False)
    setattr(twin.get_submodule(parent), leaf, plain)
    return _Pair(layer, plain.weight)

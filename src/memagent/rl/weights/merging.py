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

from memagent.engines.local.adapters import adapted_layers, merged_weight, replace_layer
from memagent.engines.local.loading import LoadedModel


class _Pair(NamedTuple):
    """A layer with an adapter, and the weights of its counterpart without."""

    layer: Any
    merged: torch.nn.Parameter


class MergedCopy:
    """The model of an engine; `refresh` copies the current values of the adapter."""

    def __init__(self, loaded: LoadedModel) -> None:
        model: Any = loaded.model
        twin = _twin(model)
        layers = adapted_layers(model, setting="rollout.merged")
        self._pairs = [_merged_pair(twin, name, layer) for name, layer in layers]
        # the file has the weights without the adapter
        self.loaded = replace(loaded, model=twin)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Merge the current adapter. Nothing may be generated meanwhile."""
        for layer, merged in self._pairs:
            merged.copy_(merged_weight(layer))


def _twin(model: Any) -> Any:
    """A copy of the modules on the same parameters."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, memo=shared)


def _merged_pair(twin: Any, name: str, layer: Any) -> _Pair:
    """Replace a layer of the copy by one without an adapter that has its own weights."""
    plain = twin.get_submodule(name).get_base_layer()
    plain.weight = torch.nn.Parameter(plain.weight.detach().clone(), requires_grad=False)
    replace_layer(twin, name, plain)
    return _Pair(layer, plain.weight)

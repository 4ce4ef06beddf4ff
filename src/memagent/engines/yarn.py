"""YaRN: how a model's rotary positions are set so that it reads more than it was trained for.

    config.json                  settings                               what takes them
    max_position_embeddings ──▶  rope_type yarn, factor 4,         ──▶  a local model, when it is loaded
    32768, wanted 131072         original window 32768, theta      ──▶  vLLM, with --hf-overrides

Nothing is written to the model's files. The factor is the wanted window over the window the model was
trained with. What such a model reads beyond that window it reads less well: that is what evaluation
is for.

    yarn_settings(config, window=131072)
    vllm_arguments(yarn_settings(config, window=131072))    # ["--hf-overrides", "{...}", ...]
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memagent.errors import ConfigError

ARCHITECTURES: tuple[str, ...] = ("llama", "qwen2", "qwen3")
"""Those with plain rotary positions, as `model_type` in config.json has them."""
DEFAULT_THETA = 10000.0
"""What transformers takes where a config.json has no base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnSettings:
    """A model's positions, stretched."""

    window: int
    """Tokens it can see at once from now on."""
    original_window: int
    """Tokens it was trained with."""
    factor: float
    theta: float
    """Base of the rotary frequencies; the model's own."""

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """As config.json has them from transformers 5 on."""
        return {
            "rope_type": "yarn",
            "rope_theta": self.theta,
            "factor": self.factor,
            "original_max_position_embeddings": self.original_window,
        }

    @property
    def overrides(self) -> dict[str, Any]:
        """The fields of config.json that change."""
        return {"max_position_embeddings": self.window, "rope_parameters": self.rope_parameters}


def yarn_settings(
    config: Mapping[str, Any], *, window: int | None = None, factor: float | None = None
) -> YarnSettings | None:
    """What a model needs, from its config.json; None where neither window nor factor is given.

    A model whose config.json has YaRN settings already is stretched from its original window.
    Positions that are scaled in another way are refused.
    """
    if window is None and factor is None:
        return None
    if window is not None and factor is not None:
        raise ConfigError("give `yarn_window` or `yarn_factor`, not both")
    architecture = config.get("model_type")
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"YaRN is set for {', '.join(ARCHITECTURES)}, not for {architecture}; leave "
            "`yarn_window` and `yarn_factor` out"
        )
    # in the words of transformers 5 or 4
    told = (config.get(name) for name in ("rope_parameters", "rope_scaling"))
    scaling: Mapping[str, Any] = next((one for one in told if isinstance(one, Mapping)), {})
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "yarn"):
        raise ConfigError(
            f"the positions of this model are scaled already ({kind}), which YaRN does not go with; "
            "leave `yarn_window` and `yarn_factor` out"
        )
    original = _original_window(config, scaling)
    wanted = window if window is not None else math.floor(original * (factor or 1.0))
    if wanted < original:
        raise ConfigError(
            f"`yarn_window={wanted}` is less than the model's own {original}; leave `yarn_window` out"
        )
    return YarnSettings(
        window=wanted,
        original_window=original,
        factor=factor if factor is not None else wanted / original,
        theta=float(scaling.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA),
    )


def vllm_arguments(settings: YarnSettings) -> list[str]:
    """The arguments that make vLLM stretch the model in the same way."""
    overrides = json.dumps(settings.overrides, separators=(",", ":"))
    return ["--hf-overrides", overrides, "--max-model-len", str(settings.window)]


def _original_window(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> int:
    for found in (
        scaling.get("original_max_position_embeddings"),
        config.get("original_max_position_embeddings"),
        config.get("max_position_embeddings"),
    ):
        if isinstance(found, int) and found > 0:
            return found
    raise ConfigError("config.json does not say how many positions the model was trained with")

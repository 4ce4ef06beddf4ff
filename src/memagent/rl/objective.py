"""What training maximises, as settings. The formula is in docs/training.md.

    ObjectiveConfig.parse({**PRESETS["dapo"], "clip_high": 0.3})

Kept apart from the loss, so that settings are read and checked without torch.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from memagent.config import Settings

LossMean = Literal["token", "rollout", "constant"]


class ObjectiveConfig(Settings):
    """Advantages, clipping, KL, means, and what is done about samples of other weights."""

    scale_by_std: bool = False
    """Divide advantages by the standard deviation of the group's rewards."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """A token is no longer pushed down once its ratio is below 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """A token is no longer pushed up once its ratio is above 1 + clip_high."""
    dual_clip: float | None = Field(default=3.0, gt=1)
    """Largest ratio that counts where the advantage is negative; none when not given."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the reference model; 0 needs no reference."""
    loss_mean: LossMean = "token"
    """token: every token of a step weighs the same. rollout: every rollout does. constant: tokens are
    summed, and divided by the number of rollouts times constant_tokens."""
    constant_tokens: int | None = Field(default=None, gt=0)
    """Tokens that a rollout counts for when loss_mean is constant."""
    old_logprobs: Literal["engine", "recompute"] = "engine"
    """What ratios are taken against: the log-probabilities that the engine reported, or those that
    the trainer computes before the first update of a batch."""
    importance_cap: float | None = Field(default=2.0, gt=0)
    """With recomputed ones, tokens weigh trainer / engine probability, up to this; not when not given."""
    mask_below: float = Field(default=0.0, ge=0, lt=1)
    """Tokens whose trainer / engine probability is below this teach nothing."""
    mask_above: float | None = Field(default=None, gt=1)
    """Tokens whose trainer / engine probability is above this teach nothing."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Rows drawn by weights more updates old than this teach nothing."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all the same: they teach nothing."""
    overlong_tokens: int | None = Field(default=None, gt=0)
    """Length of the last part of a reply's limit in which reward is taken away, up to overlong_penalty;
    half of the limit, at most."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """Reward that a reply at its limit loses."""

    @model_validator(mode="after")
    def _constant_is_given(self) -> Self:
        if (self.loss_mean == "constant") != (self.constant_tokens is not None):
            raise ValueError(
                "constant_tokens goes with loss_mean=constant, and only with it; set both or neither"
            )
        return self


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 1e-3, "loss_mean": "token"},
    "dapo": {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "scale_by_std": True,
        "kl_coef": 0.0,
        "loss_mean": "token",
        "dynamic_sampling": True,
        "overlong_tokens": 256,
    },
}
"""The objective of the MemAgent paper's recipe, and of DAPO's."""

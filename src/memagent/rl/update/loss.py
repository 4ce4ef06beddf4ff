"""The clipped objective, as a sum over tokens with weights that are known beforehand.

    ratio     r = exp(logprob - old)
    gain      g = min(r A, clip(r, 1 - low, 1 + high) A), and not below dual_clip x A where A < 0
    loss      sum over tokens of  weight x (kl_coef x k3 - correction x g), without masked ones

The sum of the losses of all packs of a step is the loss of the step, whatever the packs are: there is
no mean in here. Weights come from `samples.py`, the formula is in docs/training.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from memagent.rl.settings import ObjectiveSettings

MAX_LOG_RATIO = 20.0
"""Differences of log-probabilities are held within this, so that nothing overflows."""

LossStats = dict[str, torch.Tensor]
"""Numbers of a pack that add up to those of a step; names in `MAXIMA` are maxima instead."""
MAXIMA = ("ratio_max", "mismatch_max")


class LossResult(NamedTuple):
    """The loss of some tokens, and what to tell about them."""

    loss: torch.Tensor
    stats: LossStats
    """See `merged` and `summary`."""


class TokenLosses(NamedTuple):
    """What each token adds, before its weight."""

    policy: torch.Tensor
    """What falls when the policy gets better; 0 where masked."""
    kl: torch.Tensor | None
    """Divergence to the reference; 0 where masked."""
    ratio: torch.Tensor
    is_clipped_low: torch.Tensor
    """The ratio is below its bound and the advantage is negative: no gradient."""
    is_clipped_high: torch.Tensor
    """The ratio is above its bound and the advantage is positive: no gradient."""
    is_clipped_dual: torch.Tensor
    """The ratio is far above and the advantage is negative: no gradient."""
    is_masked: torch.Tensor
    """Trainer and engine disagree too much about the token: no gradient."""
    log_mismatch: torch.Tensor
    """Trainer's minus engine's log-probability."""


def token_losses(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    objective: ObjectiveSettings,
    *,
    old: torch.Tensor | None = None,
    reference: torch.Tensor | None = None,
) -> TokenLosses:
    """The loss of each token. All arguments have one entry per token.

    `old` are the trainer's log-probabilities before the first update of the batch; without them
    ratios are taken against `behaviour`, what the engine reported. `reference` are those of the
    model that the KL term holds on to.
    """
    ratio = _exp(logprobs - (behaviour if old is None else old))
    pushed = ratio * advantages
    held = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high) * advantages
    gain = torch.minimum(pushed, held)
    is_negative = advantages < 0
    is_clipped_dual = torch.zeros_like(is_negative)
    if objective.dual_clip is not None:
        floor = objective.dual_clip * advantages
        is_clipped_dual = is_negative & (gain < floor)
        gain = torch.where(is_negative, torch.maximum(gain, floor), gain)
    log_mismatch = ((logprobs.detach() if old is None else old) - behaviour).detach()
    correction, is_masked = _correction(log_mismatch, objective, is_recomputed=old is not None)
    return TokenLosses(
        policy=torch.where(is_masked, 0.0, -correction * gain),
        kl=None if reference is None else torch.where(is_masked, 0.0, k3(logprobs, reference)),
        ratio=ratio.detach(),
        is_clipped_low=is_negative & (ratio < 1 - objective.clip_low),
        is_clipped_high=(advantages > 0) & (ratio > 1 + objective.clip_high),
        is_clipped_dual=is_clipped_dual,
        is_masked=is_masked,
        log_mismatch=log_mismatch,
    )


def k3(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """An estimate of KL(policy || reference) from tokens of the policy; never negative."""
    difference = (reference - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp() - difference - 1


def policy_loss(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    objective: ObjectiveSettings,
    *,
    old: torch.Tensor | None = None,
    reference: torch.Tensor | None = None,
    entropies: torch.Tensor | None = None,
) -> LossResult:
    """The loss of some tokens of a step: a weighted sum. Arguments as for `token_losses`."""
    tokens = token_losses(logprobs, behaviour, advantages, objective, old=old, reference=reference)
    each = tokens.policy
    if tokens.kl is not None:
        each = each + objective.kl_coef * tokens.kl
    return LossResult((weights * each).sum(), _stats(tokens, weights, logprobs, entropies))


# --- what is told ---------------------------------------------------------------------------------


def merged(some: Iterable[LossStats]) -> LossStats:
    """The statistics of several packs together."""
    whole: LossStats = {}
    for stats in some:
        for name, value in stats.items():
            if name not in whole:
                whole[name] = value
            elif name in MAXIMA:
                whole[name] = torch.maximum(whole[name], value)
            else:
                whole[name] = whole[name] + value
    return whole


def summary(stats: LossStats) -> dict[str, float]:
    """Statistics as numbers: means over tokens, maxima, and the loss, which is a sum already."""
    numbers = {name: value.item() for name, value in stats.items()}
    num_tokens = numbers.pop("num_tokens", 0.0)
    means = {
        name: value if name in (*MAXIMA, "loss_policy") else value / max(num_tokens, 1.0)
        for name, value in numbers.items()
    }
    return {"num_tokens": num_tokens, **means}


def _stats(
    tokens: TokenLosses,
    weights: torch.Tensor,
    logprobs: torch.Tensor,
    entropies: torch.Tensor | None,
) -> LossStats:
    with torch.no_grad():
        mismatch = tokens.log_mismatch.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        stats = {
            "num_tokens": weights.new_tensor(float(len(weights))),
            "loss_policy": (weights * tokens.policy).sum(),
            "logprob": logprobs.sum(),
            "ratio": tokens.ratio.sum(),
            "ratio_max": _max(tokens.ratio),
            "clip_low": tokens.is_clipped_low.to(weights.dtype).sum(),
            "clip_high": tokens.is_clipped_high.to(weights.dtype).sum(),
            "clip_dual": tokens.is_clipped_dual.to(weights.dtype).sum(),
            "masked": tokens.is_masked.to(weights.dtype).sum(),
            # of the engine's tokens, so this estimates KL(engine || trainer)
            "mismatch_kl": (mismatch.exp() - mismatch - 1).sum(),
            "mismatch_max": _max(tokens.log_mismatch.abs()),
        }
        if tokens.kl is not None:
            stats["kl"] = tokens.kl.sum()
        if entropies is not None:
            stats["entropy"] = entropies.sum()
        return {name: value.detach() for name, value in stats.items()}


def _correction(
    log_mismatch: torch.Tensor, objective: ObjectiveSettings, *, is_recomputed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What tokens weigh because another program drew them, and which are left out."""
    share = _exp(log_mismatch)
    is_masked = share < objective.mask_below
    if objective.mask_above is not None:
        is_masked = is_masked | (share > objective.mask_above)
    if not is_recomputed or objective.importance_cap is None:
        return torch.ones_like(share), is_masked  # ratios against the engine's hold it already
    return share.clamp(max=objective.importance_cap), is_masked


def _exp(difference: torch.Tensor) -> torch.Tensor:
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _max(values: torch.Tensor) -> torch.Tensor:
    return values.max() if len(values) else values.new_zeros(())

"""The clipped objective, as a sum over targets with weights that are known beforehand.

    ratio     r = exp(logprob - old), or of a whole row: exp(mean over its tokens of logprob - old)
    gain      g = min(r A, clip(r, 1 - low, 1 + high) A), and not below dual_clip x A where A < 0
    loss      sum over targets of  weight x (kl_coef x k3 - correction x g), without masked ones

The loss of a step is the sum of the losses of its packs, however rows are packed: no mean is taken here.
Weights come from `rows.py`; the formula is in docs/training.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from memagent.rl.settings import ObjectiveSettings

MAX_LOG_RATIO = 20.0
"""Differences of log-probabilities are clamped to this, against overflow."""

LossStats = dict[str, torch.Tensor]
"""Statistics of a pack. They add up to those of a step, except names in `MAXIMA`."""
MAXIMA = ("ratio_max", "mismatch_max", "drift_max")
MISMATCH = ("mismatch_kl", "mismatch_max", "mismatch_tokens")
"""Statistics of engine against trainer: of weights that no update of the step has changed."""


class LossInputs(NamedTuple):
    """What the loss depends on: one entry per target."""

    logprobs: torch.Tensor
    """Log-probabilities of the policy, with gradient."""
    behaviour: torch.Tensor
    """Reported by the engine that sampled the tokens."""
    advantages: torch.Tensor
    old: torch.Tensor | None = None
    """The trainer's log-probabilities before the first update of the step; without them ratios are taken
    against `behaviour`."""
    reference: torch.Tensor | None = None
    """Log-probabilities of the reference model, for the KL term."""
    start: torch.Tensor | None = None
    """The trainer's log-probabilities before the first update of the step, to compare with the engine's.
    None takes `old`, and without it `logprobs`: before the first update they are the same."""
    rows: torch.Tensor | None = None
    """The row of each target, for ratios of sequences."""


class LossResult(NamedTuple):
    """The loss of some targets, and its statistics."""

    loss: torch.Tensor
    stats: LossStats
    """See `merged` and `summary`."""


class TokenLosses(NamedTuple):
    """The loss of each target, before its weight."""

    policy: torch.Tensor
    """The clipped objective, negated; 0 where masked."""
    kl: torch.Tensor | None
    """Divergence to the reference; 0 where masked."""
    ratio: torch.Tensor
    is_clipped_low: torch.Tensor
    """The ratio is below its bound and the advantage is negative: no gradient."""
    is_clipped_high: torch.Tensor
    """The ratio is above its bound and the advantage is positive: no gradient."""
    is_clipped_dual: torch.Tensor
    """The ratio is above the dual clip and the advantage is negative: no gradient."""
    is_masked: torch.Tensor
    """Trainer and engine disagree too much about the token: no gradient."""
    log_mismatch: torch.Tensor
    """Trainer's minus engine's log-probability, before the first update of the step."""
    log_drift: torch.Tensor
    """Log-probability now minus that before the first update; without the latter, minus the engine's."""


def token_losses(inputs: LossInputs, objective: ObjectiveSettings) -> TokenLosses:
    """The loss of each target."""
    logprobs_M, behaviour_M, advantages_M, old_M, reference_M, start_M, rows_M = inputs
    if start_M is None:
        start_M = old_M
    is_whole = objective.ratio == "sequence"
    log_ratio_M = logprobs_M - (behaviour_M if old_M is None else old_M)
    ratio_M = _exp(row_means(log_ratio_M, rows_M) if is_whole else log_ratio_M)
    clipped_M = ratio_M.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    gain_M = torch.minimum(ratio_M * advantages_M, clipped_M * advantages_M)
    is_negative_M = advantages_M < 0
    is_clipped_dual_M = torch.zeros_like(is_negative_M)
    if objective.dual_clip is not None:
        floor_M = objective.dual_clip * advantages_M
        is_clipped_dual_M = is_negative_M & (gain_M < floor_M)
        gain_M = torch.where(is_negative_M, torch.maximum(gain_M, floor_M), gain_M)
    now_M = logprobs_M.detach()
    log_mismatch_M = ((now_M if start_M is None else start_M) - behaviour_M).detach()
    correction_M, is_masked_M = _correction(
        row_means(log_mismatch_M, rows_M) if is_whole else log_mismatch_M,
        objective,
        is_recomputed=old_M is not None,
    )
    kl_M = None
    if reference_M is not None:
        kl_M = torch.where(is_masked_M, 0.0, k3(logprobs_M, reference_M))
    return TokenLosses(
        policy=torch.where(is_masked_M, 0.0, -correction_M * gain_M),
        kl=kl_M,
        ratio=ratio_M.detach(),
        is_clipped_low=is_negative_M & (ratio_M < 1 - objective.clip_low),
        is_clipped_high=(advantages_M > 0) & (ratio_M > 1 + objective.clip_high),
        is_clipped_dual=is_clipped_dual_M,
        is_masked=is_masked_M,
        log_mismatch=log_mismatch_M,
        log_drift=now_M - (behaviour_M if start_M is None else start_M),
    )


def row_means(values_M: torch.Tensor, rows_M: torch.Tensor | None) -> torch.Tensor:
    """The mean over the targets of its row, for each target."""
    assert rows_M is not None, "ratios of sequences need the row of each target"
    num_rows = int(rows_M.max()) + 1 if len(rows_M) else 0
    sums_R = values_M.new_zeros(num_rows).index_add(0, rows_M, values_M)
    counts_R = torch.bincount(rows_M, minlength=num_rows).clamp(min=1)
    return (sums_R / counts_R)[rows_M]


def k3(logprobs_M: torch.Tensor, reference_M: torch.Tensor) -> torch.Tensor:
    """An estimate of KL(policy || reference) from tokens that the policy sampled; never negative."""
    return _k3_of(reference_M - logprobs_M)


def policy_loss(
    inputs: LossInputs,
    weights_M: torch.Tensor,
    objective: ObjectiveSettings,
    *,
    entropies: torch.Tensor | None = None,
) -> LossResult:
    """The weighted sum of the losses of some targets. Entropies are for the statistics only."""
    tokens = token_losses(inputs, objective)
    each_M = tokens.policy
    if tokens.kl is not None:
        each_M = each_M + objective.kl_coef * tokens.kl
    stats = _stats(tokens, weights_M, inputs.logprobs, entropies)
    return LossResult((weights_M * each_M).sum(), stats)


# --- statistics -----------------------------------------------------------------------------------


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


def without_mismatch(stats: LossStats) -> LossStats:
    """Statistics of an update that cannot compare engine and trainer: the weights have changed."""
    return {name: value for name, value in stats.items() if name not in MISMATCH}


def scaled(stats: LossStats, factor: float) -> LossStats:
    """Statistics of a sample of tokens, as an estimate for `factor` times as many."""
    return {name: value if name in MAXIMA else value * factor for name, value in stats.items()}


def summary(stats: LossStats) -> dict[str, float]:
    """Statistics as metrics: means over tokens, maxima, and the loss, which is a sum already."""
    values = {name: value.item() for name, value in stats.items()}
    num_tokens = values.pop("num_tokens", 0.0)
    counts = {"mismatch_kl": values.pop("mismatch_tokens", 0.0)}
    means = {
        name: value
        if name in (*MAXIMA, "loss_policy")
        else value / max(counts.get(name, num_tokens), 1.0)
        for name, value in values.items()
    }
    return {"num_tokens": num_tokens, **means}


def _stats(
    tokens: TokenLosses,
    weights_M: torch.Tensor,
    logprobs_M: torch.Tensor,
    entropies_M: torch.Tensor | None,
) -> LossStats:
    with torch.no_grad():
        num_tokens = weights_M.new_tensor(float(len(weights_M)))
        stats = {
            "num_tokens": num_tokens,
            "loss_policy": (weights_M * tokens.policy).sum(),
            "logprob": logprobs_M.sum(),
            "ratio": tokens.ratio.sum(),
            "ratio_max": _max(tokens.ratio),
            "clip_low": tokens.is_clipped_low.to(weights_M.dtype).sum(),
            "clip_high": tokens.is_clipped_high.to(weights_M.dtype).sum(),
            "clip_dual": tokens.is_clipped_dual.to(weights_M.dtype).sum(),
            "masked": tokens.is_masked.to(weights_M.dtype).sum(),
            # the engine sampled the tokens, so this estimates KL(engine || trainer)
            "mismatch_kl": _k3_of(tokens.log_mismatch).sum(),
            "mismatch_max": _max(tokens.log_mismatch.abs()),
            "mismatch_tokens": num_tokens,
            "drift_kl": _k3_of(tokens.log_drift).sum(),
            "drift_max": _max(tokens.log_drift.abs()),
        }
        if tokens.kl is not None:
            stats["kl"] = tokens.kl.sum()
        if entropies_M is not None:
            stats["entropy"] = entropies_M.sum()
        return {name: value.detach() for name, value in stats.items()}


def _correction(
    log_mismatch_M: torch.Tensor, objective: ObjectiveSettings, *, is_recomputed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Importance weights for tokens that another program sampled, and which tokens are masked."""
    share_M = _exp(log_mismatch_M)
    low, high = objective.mask or (0.0, math.inf)
    is_masked_M = (share_M < low) | (share_M > high)
    if not is_recomputed or objective.importance_cap is None:
        return torch.ones_like(share_M), is_masked_M  # ratios to the engine's contain it already
    return share_M.clamp(max=objective.importance_cap), is_masked_M


def _k3_of(difference_M: torch.Tensor) -> torch.Tensor:
    clamped_M = difference_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return clamped_M.exp() - clamped_M - 1


def _exp(difference: torch.Tensor) -> torch.Tensor:
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _max(values: torch.Tensor) -> torch.Tensor:
    return values.max() if len(values) else values.new_zeros(())

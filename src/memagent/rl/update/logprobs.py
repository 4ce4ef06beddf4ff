"""Log-probabilities of chosen tokens from logits, with a gradient that takes two passes over the logits.

    logprobs_M, lse_P = chosen_logprobs(logits_PV, place_M, ids_M, temperature)

`place_M` is the row of the logits that predicts each target: one place may predict several. Logits stay in
the model's precision; sums are taken in float32 or better, and no tensor of the logits' size is kept in it.
With `fused` each pass is one kernel, compiled at first use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


def chosen_logprobs(
    logits_PV: torch.Tensor,
    place_M: torch.Tensor,
    ids_M: torch.Tensor,
    temperature: float = 1.0,
    *,
    fused: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target, and the log-sum-exp of each place."""
    apply: Any = _Chosen.apply  # untyped in torch
    logprobs_M, lse_P = apply(logits_PV, place_M, ids_M, temperature, fused)
    return logprobs_M, lse_P


@torch.no_grad()
def entropies(
    logits_PV: torch.Tensor, lse_P: torch.Tensor, temperature: float = 1.0, *, fused: bool = False
) -> torch.Tensor:
    """Entropy of the distribution of each place."""
    entropies_P: torch.Tensor = _run(_entropies, fused)(logits_PV, lse_P, temperature)
    return entropies_P


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_PV: torch.Tensor,
        place_M: torch.Tensor,
        ids_M: torch.Tensor,
        temperature: float,
        fused: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lse_P = _run(_lse, fused)(logits_PV, temperature)
        logprobs_M = _scaled(logits_PV[place_M, ids_M], temperature) - lse_P[place_M]
        ctx.save_for_backward(logits_PV, place_M, ids_M, lse_P)
        ctx.settings = (temperature, fused)
        ctx.mark_non_differentiable(lse_P)
        return logprobs_M, lse_P

    @staticmethod
    def backward(ctx: Any, grad_M: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        logits_PV, place_M, ids_M, lse_P = ctx.saved_tensors
        temperature, fused = ctx.settings
        grad_M = grad_M / temperature
        grad_P = torch.zeros_like(lse_P).index_add_(0, place_M, grad_M)
        grad_PV = _run(_others, fused)(logits_PV, lse_P, grad_P, temperature)
        grad_PV.index_put_((place_M, ids_M), grad_M.to(grad_PV.dtype), accumulate=True)
        return grad_PV, None, None, None, None


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    if logits.dtype != torch.float64:
        logits = logits.float()
    return logits if temperature == 1.0 else logits / temperature


def _lse(logits_PV: torch.Tensor, temperature: float) -> torch.Tensor:
    return _scaled(logits_PV, temperature).logsumexp(dim=-1)


def _others(
    logits_PV: torch.Tensor, lse_P: torch.Tensor, grad_P: torch.Tensor, temperature: float
) -> torch.Tensor:
    """The part of the gradient that goes to every token of a place, in the precision of the logits."""
    probs_PV = (_scaled(logits_PV, temperature) - lse_P[:, None]).exp()
    return (probs_PV * -grad_P[:, None]).to(logits_PV.dtype)


def _entropies(logits_PV: torch.Tensor, lse_P: torch.Tensor, temperature: float) -> torch.Tensor:
    scaled_PV = _scaled(logits_PV, temperature)
    return lse_P - ((scaled_PV - lse_P[:, None]).exp() * scaled_PV).sum(dim=-1)


def _run(function: Callable[..., torch.Tensor], fused: bool) -> Callable[..., torch.Tensor]:
    return _compiled(function) if fused else function


@cache
def _compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(function)

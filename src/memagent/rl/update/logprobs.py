"""Log-probabilities of chosen tokens from logits, with a gradient that takes two passes over the logits.

    logprobs_M, total_P = chosen_logprobs(logits_PV, which_M, ids_M, temperature)

`which_M` says in which row of the logits each token stands: one place may predict several. Logits stay as
they are, in half precision if the model has it; sums are made in float32 or better, and nothing of the
logits' size is kept in it. With `fused` each pass is one kernel, which is compiled at first use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


def chosen_logprobs(
    logits_PV: torch.Tensor,
    which_M: torch.Tensor,
    ids_M: torch.Tensor,
    temperature: float = 1.0,
    *,
    fused: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each token, and the logarithm of each place's sum of exponentials."""
    apply: Any = _Chosen.apply  # it has no types
    logprobs_M, total_P = apply(logits_PV, which_M, ids_M, temperature, fused)
    return logprobs_M, total_P


@torch.no_grad()
def entropies(
    logits_PV: torch.Tensor, total_P: torch.Tensor, temperature: float = 1.0, *, fused: bool = False
) -> torch.Tensor:
    """Entropy of the distribution of each place."""
    found: torch.Tensor = _run(_entropies, fused)(logits_PV, total_P, temperature)
    return found


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_PV: torch.Tensor,
        which_M: torch.Tensor,
        ids_M: torch.Tensor,
        temperature: float,
        fused: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total_P = _run(_total, fused)(logits_PV, temperature)
        logprobs_M = _scaled(logits_PV[which_M, ids_M], temperature) - total_P[which_M]
        ctx.save_for_backward(logits_PV, which_M, ids_M, total_P)
        ctx.settings = (temperature, fused)
        ctx.mark_non_differentiable(total_P)
        return logprobs_M, total_P

    @staticmethod
    def backward(ctx: Any, grad_M: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        logits_PV, which_M, ids_M, total_P = ctx.saved_tensors
        temperature, fused = ctx.settings
        grad_M = grad_M / temperature
        grad_P = torch.zeros_like(total_P).index_add_(0, which_M, grad_M)
        grad_PV = _run(_others, fused)(logits_PV, total_P, grad_P, temperature)
        grad_PV.index_put_((which_M, ids_M), grad_M.to(grad_PV.dtype), accumulate=True)
        return grad_PV, None, None, None, None


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    if logits.dtype != torch.float64:
        logits = logits.float()
    return logits if temperature == 1.0 else logits / temperature


def _total(logits_PV: torch.Tensor, temperature: float) -> torch.Tensor:
    return _scaled(logits_PV, temperature).logsumexp(dim=-1)


def _others(
    logits_PV: torch.Tensor, total_P: torch.Tensor, grad_P: torch.Tensor, temperature: float
) -> torch.Tensor:
    """What the gradient of each place takes from every token, in the precision of the logits."""
    chances_PV = (_scaled(logits_PV, temperature) - total_P[:, None]).exp()
    return (chances_PV * -grad_P[:, None]).to(logits_PV.dtype)


def _entropies(logits_PV: torch.Tensor, total_P: torch.Tensor, temperature: float) -> torch.Tensor:
    scaled_PV = _scaled(logits_PV, temperature)
    return total_P - ((scaled_PV - total_P[:, None]).exp() * scaled_PV).sum(dim=-1)


def _run(function: Callable[..., torch.Tensor], fused: bool) -> Callable[..., torch.Tensor]:
    return _compiled(function) if fused else function


@cache
def _compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(function)

"""From logits to the next token: greedy or sampled, the same for the same seed in any batch.

A request's random numbers depend on its seed and on the position in its reply, on nothing else. So a
request that is preempted, or shares a batch with others, draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from memagent.types import Sampling

GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy."""
DEFAULT_TEMPERATURE = 0.0
"""Greedy, when the caller leaves the choice to us: the same text gives the same answer."""


class Drawn(NamedTuple):
    """The next token of each request, and its log-probability."""

    tokens: list[int]
    logprobs: list[float]


def draw(logits_RV: torch.Tensor, requests: Sequence[tuple[Sampling, int, int]]) -> Drawn:
    """Draw a token per row. Each request is (sampling, seed, position in its reply).

    The log-probability is that of the distribution sampled from: after temperature, top-k and top-p.
    For greedy it is that of the model's own distribution.
    """
    rows = [
        _draw_row(logits, *request)
        for logits, request in zip(logits_RV.float(), requests, strict=True)
    ]
    return Drawn([token for token, _ in rows], [logprob for _, logprob in rows])


def _draw_row(
    logits_V: torch.Tensor, sampling: Sampling, seed: int, position: int
) -> tuple[int, float]:
    temperature = DEFAULT_TEMPERATURE if sampling.temperature is None else sampling.temperature
    if temperature < GREEDY_BELOW:
        token = int(logits_V.argmax())
        return token, float(torch.log_softmax(logits_V, dim=-1)[token])
    logprobs_V = torch.log_softmax(filtered(logits_V / temperature, sampling), dim=-1)
    cumulative_V = logprobs_V.exp().cumsum(dim=-1)
    threshold = uniform(seed, position) * float(cumulative_V[-1])
    token = min(int(torch.searchsorted(cumulative_V, threshold, right=True)), len(logits_V) - 1)
    return token, float(logprobs_V[token])


def filtered(logits_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logits with everything outside top-k and top-p at minus infinity."""
    if sampling.top_k is not None and sampling.top_k < len(logits_V):
        lowest = logits_V.topk(sampling.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < lowest, float("-inf"))
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered_V, order_V = logits_V.sort(descending=True)
        before_V = ordered_V.softmax(dim=-1).cumsum(dim=-1) - ordered_V.softmax(dim=-1)
        outside = order_V[before_V >= sampling.top_p]
        logits_V = logits_V.index_fill(0, outside, float("-inf"))
    return logits_V


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on seed and position only (SplitMix64)."""
    mask = (1 << 64) - 1
    state = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return ((state ^ (state >> 31)) >> 11) / (1 << 53)

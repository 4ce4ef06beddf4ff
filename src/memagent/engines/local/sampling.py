"""From logits to the next token: greedy or sampled, reproducible for a seed in any batch.

A request's random numbers depend only on its seed and the position in its reply, so preemption and
batching do not change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from memagent.types import Sampling

GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy."""
DEFAULT_TEMPERATURE = 0.0
"""Greedy by default: the same text gives the same answer."""
SORTED_ROWS = 256
"""Rows with top-k or top-p that are sorted at once: with 152,000 tokens, 1 GB at most."""


class SampledTokens(NamedTuple):
    """The next token of each request, and its log-probability."""

    tokens: list[int]
    logprobs: list[float]


def sample(logits_RV: torch.Tensor, requests: Sequence[tuple[Sampling, int, int]]) -> SampledTokens:
    """Sample a token per row. Each request is (sampling, seed, position in its reply).

    The log-probability is that of the distribution sampled from: after temperature, top-k and top-p.
    For greedy sampling it is that of the model's own distribution.
    """
    temperatures = [temperature_of(sampling) for sampling, _, _ in requests]
    is_greedy = torch.tensor([value < GREEDY_BELOW for value in temperatures])
    scales = [1.0 if value < GREEDY_BELOW else value for value in temperatures]
    logits_RV = logits_RV.float() / torch.tensor(scales, device=logits_RV.device)[:, None]
    rows = [row for row, (sampling, _, _) in enumerate(requests) if has_filter(sampling)]
    for start in range(0, len(rows), SORTED_ROWS):
        some = rows[start : start + SORTED_ROWS]
        logits_RV[some] = filtered(logits_RV[some], [requests[row][0] for row in some])
    logprobs_RV = logits_RV.log_softmax(dim=-1)
    tokens_R = logits_RV.argmax(dim=-1)
    if not is_greedy.all():
        uniforms = [uniform(seed, position) for _, seed, position in requests]
        sampled_R = inverse(logprobs_RV, torch.tensor(uniforms, device=logits_RV.device))
        tokens_R = torch.where(is_greedy.to(tokens_R.device), tokens_R, sampled_R)
    chosen_R = logprobs_RV.gather(1, tokens_R[:, None])[:, 0]
    return SampledTokens(tokens_R.tolist(), chosen_R.tolist())


def filtered(logits_RV: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Logits with the tokens outside each row's top-k and top-p masked to minus infinity."""
    num_tokens = logits_RV.shape[1]
    tops = [min(one.top_k or num_tokens, num_tokens) for one in samplings]
    shares = [1.0 if one.top_p is None else one.top_p for one in samplings]
    tops_R = torch.tensor(tops, device=logits_RV.device)[:, None]
    shares_R = torch.tensor(shares, device=logits_RV.device)[:, None]
    ordered_RV, order_RV = logits_RV.sort(descending=True)
    ordered_RV.masked_fill_(ordered_RV < ordered_RV.gather(1, tops_R - 1), float("-inf"))
    before_RV = ordered_RV.softmax(dim=-1)
    before_RV = before_RV.cumsum(dim=-1) - before_RV
    ordered_RV.masked_fill_((before_RV >= shares_R) & (shares_R < 1), float("-inf"))
    return torch.empty_like(logits_RV).scatter_(1, order_RV, ordered_RV)


def inverse(logprobs_RV: torch.Tensor, uniforms_R: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative probability exceeds a uniform number.

    Summed in double precision: single precision loses rare tokens of a large vocabulary.
    """
    cumulative_RV = logprobs_RV.double().exp().cumsum(dim=-1)
    thresholds_R = uniforms_R.double() * cumulative_RV[:, -1]
    tokens_R = torch.searchsorted(cumulative_RV, thresholds_R[:, None], right=True)[:, 0]
    # rounding may point past the end: use the last token with nonzero probability
    last_R = logprobs_RV.shape[1] - 1 - (logprobs_RV > float("-inf")).flip(-1).int().argmax(dim=-1)
    return torch.minimum(tokens_R, last_R)


def temperature_of(sampling: Sampling) -> float:
    """The effective temperature, 0 for greedy."""
    return DEFAULT_TEMPERATURE if sampling.temperature is None else sampling.temperature


def has_filter(sampling: Sampling) -> bool:
    """Whether top-k or top-p restricts the sampled tokens."""
    is_sampled = temperature_of(sampling) >= GREEDY_BELOW
    return is_sampled and (sampling.top_k is not None or (sampling.top_p or 1) < 1)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends only on seed and position (SplitMix64)."""
    mask = (1 << 64) - 1
    state = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return ((state ^ (state >> 31)) >> 11) / (1 << 53)


def uniforms(seeds_R: Sequence[int], starts_R: Sequence[int], steps: int) -> np.ndarray[Any, Any]:
    """`uniform` for many requests and the next steps of each: (steps, requests)."""
    mask = (1 << 64) - 1
    with np.errstate(over="ignore"):
        seeds = np.array([seed & mask for seed in seeds_R], dtype=np.uint64)
        positions = np.array(starts_R, dtype=np.uint64) + np.arange(
            1, steps + 1, dtype=np.uint64
        ).reshape(-1, 1)
        state = seeds * np.uint64(0x9E3779B97F4A7C15) + positions * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = (state ^ (state >> np.uint64(31))) >> np.uint64(11)
    numbers: np.ndarray[Any, Any] = state.astype(np.float64) / (1 << 53)
    return numbers

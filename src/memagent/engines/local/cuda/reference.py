"""The kernels of `kernels.py` in plain torch, for tests and for machines without Triton.

Same names, same arguments, same results up to rounding. Slow but simple.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from memagent.engines.local.cuda.sizes import Heads, Parts
from memagent.engines.local.sampling import GREEDY_BELOW, inverse


def attend_prompts(
    heads: Heads,
    query: torch.Tensor,
    cache: torch.Tensor,
    positions: torch.Tensor,
    tiles: torch.Tensor,
    runs: torch.Tensor,
) -> torch.Tensor:
    """Attention of packed prompts; `cache` is (2, KV heads, slots, dim) of one layer."""
    out = torch.empty_like(query)
    for row, count, first_run, end_run in tiles.tolist():
        rows = slice(row, row + count)
        seen = runs[first_run:end_run].tolist()
        slots = [slot + index for slot, _, length in seen for index in range(length)]
        places = [begin + index for _, begin, length in seen for index in range(length)]
        mask = torch.tensor(places, device=query.device)[None] <= positions[rows, None]
        out[rows] = F.scaled_dot_product_attention(
            query[rows].transpose(0, 1),
            cache[0][:, slots].repeat_interleave(heads.group, 0),
            cache[1][:, slots].repeat_interleave(heads.group, 0),
            attn_mask=mask,
            scale=heads.scale,
        ).transpose(0, 1)
    return out


def attend_replies(
    heads: Heads,
    query: torch.Tensor,
    cache: torch.Tensor,
    positions: torch.Tensor,
    items: torch.Tensor,
    counts: torch.Tensor,
    first_parts: torch.Tensor,
    parts: Parts,
    num_processors: int,
) -> torch.Tensor:
    """Attention of one token per row, in the same parts as the kernel."""
    for row, num_rows, slot, begin, length, ordinal in items[: int(counts[2])].tolist():
        for reader in range(row, row + num_rows):
            visible = max(min(int(positions[reader]) + 1 - begin, length), 0)
            part = int(first_parts[reader]) + ordinal
            q = query[reader].float().view(heads.kv_heads, heads.group, heads.dim)
            keys = cache[0][:, slot : slot + visible].float()
            values = cache[1][:, slot : slot + visible].float()
            scores = q @ keys.transpose(1, 2) * heads.scale
            peak = scores.amax(-1) if visible else torch.full(scores.shape[:2], -1e30)
            weights = (scores - peak[..., None]).exp()
            parts.mixed[part] = (weights @ values).flatten(0, 1)
            parts.peaks[part] = peak.flatten()
            parts.sums[part] = weights.sum(-1).flatten()
    out = torch.zeros_like(query)
    for row in range(len(query)):
        own = slice(int(first_parts[row]), int(first_parts[row + 1]))
        if own.start < own.stop:
            gains = (parts.peaks[own] - parts.peaks[own].amax(0)).exp()
            mixed = (parts.mixed[own] * gains[..., None]).sum(0)
            out[row] = (mixed / (parts.sums[own] * gains).sum(0)[..., None]).to(out.dtype)
    return out


def add_norm(hidden: torch.Tensor, delta: torch.Tensor | None, norm: Any) -> torch.Tensor:
    """Add `delta` to `hidden` in place; the norm of the sum."""
    if delta is not None:
        hidden += delta
    normed: torch.Tensor = norm(hidden)
    return normed


def rotate_and_store(
    heads: Heads,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
) -> None:
    """Rotate queries in place; write rotated keys, and values, to their slots."""
    query.copy_(_turned(query, cosine, sine))
    cache[0].index_copy_(1, slots.long(), _turned(key, cosine, sine).transpose(0, 1))
    cache[1].index_copy_(1, slots.long(), value.transpose(0, 1))


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    uniforms: torch.Tensor,
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
) -> None:
    """Sample a token per row into `tokens`, with its log-probability in the sampled distribution."""
    is_greedy = temperatures < GREEDY_BELOW
    scaled = logits.float() / torch.where(is_greedy, 1.0, temperatures)[:, None]
    shares = scaled.log_softmax(-1)
    chosen = torch.where(is_greedy, scaled.argmax(-1), inverse(shares, uniforms))
    tokens.copy_(chosen)
    logprobs.copy_(shares.gather(1, chosen[:, None])[:, 0])


def _turned(x_NHD: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    low, high = x_NHD.chunk(2, dim=-1)
    return x_NHD * cosine[:, None] + torch.cat((-high, low), dim=-1) * sine[:, None]

"""Triton kernels of the embedded engine, and their launchers. Plain-torch versions: `reference.py`.

    attend_prompts    many tokens of few requests over runs of slots, online softmax
    attend_replies    one token of many requests; a shared run is read once for all its rows
    add_norm          residual connection and RMS norm
    rotate_and_store  rotary positions; writes keys and values to their slots
    gated             silu(gate) * up
    sample            greedy or sampled token and its log-probability

Rows are tokens. Query heads that share a KV head are folded into the rows of a tile, so keys and
values are read once for all of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from memagent.engines.local.cuda.sizes import Heads, Parts
from memagent.engines.local.sampling import GREEDY_BELOW

BLOCK_PROMPT = 128
"""Rows of a tile of prompts, heads folded in."""


class ReplyTiling(NamedTuple):
    """Block sizes of `attend_replies`."""

    rows: int
    tokens: int
    warps: int
    stages: int
    programs: int
    """Per multiprocessor."""


SHARED = ReplyTiling(rows=32, tokens=64, warps=2, stages=3, programs=8)
"""For runs shared by several requests."""
SINGLE = ReplyTiling(rows=16, tokens=64, warps=2, stages=3, programs=16)
"""For runs of a single request."""
LOG2_E = 1.4426950408889634
"""Converts exponents to base 2, which the hardware computes."""


@triton.jit
def _attend_prompts(
    query, cache_k, cache_v, positions, tiles, runs, out, num_slots, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    first_row = tl.load(tiles + tile * 4)
    num_rows = tl.load(tiles + tile * 4 + 1)
    first_run = tl.load(tiles + tile * 4 + 2)
    end_run = tl.load(tiles + tile * 4 + 3)
    d = tl.arange(0, DIM)
    m = tl.arange(0, BLOCK_M)
    row = first_row + m // GROUP
    is_row = m < num_rows * GROUP
    position = tl.load(positions + row, mask=is_row, other=0)
    lowest = tl.load(positions + first_row)
    highest = lowest + num_rows - 1
    places = (row * KV_HEADS * GROUP + head * GROUP + m % GROUP).to(tl.int64)[:, None] * DIM + d
    q = tl.load(query + places, mask=is_row[:, None], other=0.0)
    peak = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, DIM], tl.float32)
    head_base = head.to(tl.int64) * num_slots
    n = tl.arange(0, BLOCK_N)
    for run in range(first_run, end_run):
        slot = tl.load(runs + run * 3)
        begin = tl.load(runs + run * 3 + 1)
        length = tl.load(runs + run * 3 + 2)
        end = tl.minimum(highest + 1 - begin, length)
        whole = tl.maximum(tl.minimum(lowest + 1 - begin, length), 0) // BLOCK_N * BLOCK_N
        base = (head_base + slot) * DIM
        for first in range(0, whole, BLOCK_N):
            offsets = base + (first + n)[:, None] * DIM + d[None, :]
            k = tl.load(cache_k + offsets)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.exp2(scores - new_peak[:, None])
            fade = tl.exp2(peak - new_peak)
            total = total * fade + tl.sum(weights, 1)
            v = tl.load(cache_v + offsets)
            mixed = mixed * fade[:, None]
            mixed = tl.dot(weights.to(v.dtype), v, mixed, input_precision=PRECISION)
            peak = new_peak
        visible = tl.minimum(position + 1 - begin, length)
        for first in range(whole, end, BLOCK_N):
            is_seen = (first + n)[None, :] < visible[:, None]
            offsets = base + (first + n)[:, None] * DIM + d[None, :]
            is_there = ((first + n) < end)[:, None]
            k = tl.load(cache_k + offsets, mask=is_there, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            scores = tl.where(is_seen, scores, -1e30)
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.exp2(scores - new_peak[:, None])
            fade = tl.exp2(peak - new_peak)
            total = total * fade + tl.sum(weights, 1)
            v = tl.load(cache_v + offsets, mask=is_there, other=0.0)
            mixed = mixed * fade[:, None]
            mixed = tl.dot(weights.to(v.dtype), v, mixed, input_precision=PRECISION)
            peak = new_peak
    mixed = mixed / total[:, None]
    tl.store(out + places, mixed.to(out.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def _attend_replies(
    query, cache_k, cache_v, positions, items, counts, first_parts, parts, peaks, sums,
    num_slots, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, FIELDS: tl.constexpr,
    WHICH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, DIM)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    first_work = tl.load(counts + WHICH) * KV_HEADS
    end_work = tl.load(counts + WHICH + 1) * KV_HEADS
    for work in range(first_work + tl.program_id(0), end_work, tl.num_programs(0)):
        item = items + (work // KV_HEADS) * FIELDS
        head = work % KV_HEADS
        first_row = tl.load(item)
        num_rows = tl.load(item + 1)
        slot = tl.load(item + 2)
        begin = tl.load(item + 3)
        length = tl.load(item + 4)
        ordinal = tl.load(item + 5)
        row = first_row + m // GROUP
        is_row = m < num_rows * GROUP
        position = tl.load(positions + row, mask=is_row, other=-1)
        visible = tl.minimum(position + 1 - begin, length)
        end = tl.max(tl.where(is_row, visible, 0), 0)
        heads = (row * KV_HEADS * GROUP + head * GROUP + m % GROUP).to(tl.int64)
        q = tl.load(query + heads[:, None] * DIM + d[None, :], mask=is_row[:, None], other=0.0)
        peak = tl.full([BLOCK_M], -1e30, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        mixed = tl.zeros([BLOCK_M, DIM], tl.float32)
        base = (slot.to(tl.int64) + head * num_slots) * DIM
        for first in range(0, end, BLOCK_N):
            is_there = ((first + n) < end)[:, None]
            offsets = base + (first + n)[:, None] * DIM + d[None, :]
            k = tl.load(cache_k + offsets, mask=is_there, other=0.0)
            v = tl.load(cache_v + offsets, mask=is_there, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            scores = tl.where((first + n)[None, :] < visible[:, None], scores, -1e30)
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.exp2(scores - new_peak[:, None])
            fade = tl.exp2(peak - new_peak)
            total = total * fade + tl.sum(weights, 1)
            mixed = mixed * fade[:, None]
            mixed = tl.dot(weights.to(v.dtype), v, mixed, input_precision=PRECISION)
            peak = new_peak
        part = tl.load(first_parts + row, mask=is_row, other=0) + ordinal
        place = (part * KV_HEADS * GROUP + head * GROUP + m % GROUP).to(tl.int64)
        tl.store(parts + place[:, None] * DIM + d[None, :], mixed, mask=is_row[:, None])
        tl.store(peaks + place, peak, mask=is_row)
        tl.store(sums + place, total, mask=is_row)


@triton.jit
def _merge(
    parts, peaks, sums, first_parts, out,
    HEADS: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    h, d = tl.arange(0, PADDED), tl.arange(0, DIM)
    is_head = h < HEADS
    peak = tl.full([PADDED], -1e30, tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    mixed = tl.zeros([PADDED, DIM], tl.float32)
    for part in range(tl.load(first_parts + row), tl.load(first_parts + row + 1)):
        place = (part * HEADS + h).to(tl.int64)
        high = tl.load(peaks + place, mask=is_head, other=-1e30)
        size = tl.load(sums + place, mask=is_head, other=0.0)
        values = tl.load(
            parts + place[:, None] * DIM + d[None, :], mask=is_head[:, None], other=0.0
        )
        new_peak = tl.maximum(peak, high)
        fade, gain = tl.exp2(peak - new_peak), tl.exp2(high - new_peak)
        mixed = mixed * fade[:, None] + values * gain[:, None]
        total = total * fade + size * gain
        peak = new_peak
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    place = (row * HEADS + h).to(tl.int64)[:, None] * DIM + d[None, :]
    tl.store(out + place, mixed.to(out.dtype.element_ty), mask=is_head[:, None])


@triton.jit
def _add_norm(
    hidden, delta, weight, normed, epsilon,
    HAS_DELTA: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, PADDED)
    is_there = c < SIZE
    x = tl.load(hidden + row * SIZE + c, mask=is_there, other=0.0)
    if HAS_DELTA:
        x = x + tl.load(delta + row * SIZE + c, mask=is_there, other=0.0)
        tl.store(hidden + row * SIZE + c, x, mask=is_there)
    wide = x.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + epsilon)
    w = tl.load(weight + c, mask=is_there, other=0.0)
    tl.store(normed + row * SIZE + c, wide.to(x.dtype) * w, mask=is_there)


@triton.jit
def _rotate_and_store(
    query, key, value, cosine, sine, slots, cache_k, cache_v, num_slots,
    HEADS: tl.constexpr, PADDED: tl.constexpr, KV_HEADS: tl.constexpr, KV_PADDED: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, HALF)
    DIM: tl.constexpr = 2 * HALF
    low_c = tl.load(cosine + row * DIM + d).to(tl.float32)[None, :]
    low_s = tl.load(sine + row * DIM + d).to(tl.float32)[None, :]
    high_c = tl.load(cosine + row * DIM + HALF + d).to(tl.float32)[None, :]
    high_s = tl.load(sine + row * DIM + HALF + d).to(tl.float32)[None, :]
    h = tl.arange(0, PADDED)
    is_head = (h < HEADS)[:, None]
    place = query + (row * HEADS + h)[:, None] * DIM + d[None, :]
    low = tl.load(place, mask=is_head, other=0.0).to(tl.float32)
    high = tl.load(place + HALF, mask=is_head, other=0.0).to(tl.float32)
    tl.store(place, (low * low_c - high * low_s).to(query.dtype.element_ty), mask=is_head)
    tl.store(place + HALF, (high * high_c + low * high_s).to(query.dtype.element_ty), mask=is_head)
    h = tl.arange(0, KV_PADDED)
    is_head = (h < KV_HEADS)[:, None]
    place = key + (row * KV_HEADS + h)[:, None] * DIM + d[None, :]
    low = tl.load(place, mask=is_head, other=0.0).to(tl.float32)
    high = tl.load(place + HALF, mask=is_head, other=0.0).to(tl.float32)
    slot = tl.load(slots + row).to(tl.int64)
    target = (h.to(tl.int64) * num_slots + slot)[:, None] * DIM + d[None, :]
    dtype = cache_k.dtype.element_ty
    tl.store(cache_k + target, (low * low_c - high * low_s).to(dtype), mask=is_head)
    tl.store(cache_k + target + HALF, (high * high_c + low * high_s).to(dtype), mask=is_head)
    place = value + (row * KV_HEADS + h)[:, None] * DIM + d[None, :]
    tl.store(cache_v + target, tl.load(place, mask=is_head, other=0.0), mask=is_head)
    tl.store(cache_v + target + HALF, tl.load(place + HALF, mask=is_head, other=0.0), mask=is_head)


@triton.jit
def _gated(gate, up, out, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = place < size
    g = tl.load(gate + place, mask=is_there, other=0.0)
    u = tl.load(up + place, mask=is_there, other=0.0)
    wide = g.to(tl.float32)
    tl.store(out + place, (wide / (1 + tl.exp(-wide))).to(g.dtype) * u, mask=is_there)


@triton.jit
def _sample(
    logits, temperatures, uniforms, tokens, logprobs, size, GREEDY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    is_greedy = temperature < GREEDY
    scale = 1.0 / tl.where(is_greedy, 1.0, temperature)
    c = tl.arange(0, BLOCK)
    peak = tl.full([], -float("inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    best = tl.zeros([], tl.int32)
    for first in range(0, size, BLOCK):
        x = tl.load(logits + row * size + first + c, mask=first + c < size, other=-float("inf"))
        x = x.to(tl.float32) * scale
        high, at = tl.max(x, 0, return_indices=True)
        best = tl.where(high > peak, first + at, best)
        new_peak = tl.maximum(peak, high)
        total = total * tl.exp(peak - new_peak) + tl.sum(tl.exp(x - new_peak), 0)
        peak = new_peak
    token = best
    if not is_greedy:
        wanted = tl.load(uniforms + row).to(tl.float64) * total.to(tl.float64)
        passed = tl.zeros([], tl.float64)
        token = tl.full([], -1, tl.int32)
        last = best
        for first in range(0, size, BLOCK):
            if token < 0:
                x = tl.load(
                    logits + row * size + first + c, mask=first + c < size, other=-float("inf")
                )
                share = tl.exp(x.to(tl.float32) * scale - peak)
                reached = passed + tl.cumsum(share, 0).to(tl.float64)
                at = tl.min(tl.where((reached > wanted) & (share > 0), c, BLOCK), 0)
                token = tl.where(at < BLOCK, first + at, -1).to(tl.int32)
                filled = tl.max(tl.where(share > 0, c, -1), 0)
                last = tl.where(filled >= 0, first + filled, last).to(tl.int32)
                passed += tl.sum(share, 0).to(tl.float64)
        token = tl.where(token < 0, last, token)
    chosen = tl.load(logits + row * size + token).to(tl.float32) * scale
    tl.store(tokens + row, token)
    tl.store(logprobs + row, chosen - peak - tl.log(total))


# --- launchers ------------------------------------------------------------------------------------


def attend_prompts(
    heads: Heads, query: torch.Tensor, cache: torch.Tensor, positions: torch.Tensor,
    tiles: torch.Tensor, runs: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Attention of packed prompts; `cache` is (2, KV heads, slots, dim) of one layer."""
    out = torch.empty_like(query)
    _attend_prompts[(len(tiles), heads.kv_heads)](
        query, cache[0], cache[1], positions, tiles, runs, out, cache.shape[2], heads.scale * LOG2_E,
        KV_HEADS=heads.kv_heads, GROUP=heads.group, DIM=heads.dim, BLOCK_M=BLOCK_PROMPT,
        BLOCK_N=64, PRECISION=_precision(query), num_warps=8 if heads.dim > 64 else 4, num_stages=3,
    )  # fmt: skip
    return out


def attend_replies(
    heads: Heads, query: torch.Tensor, cache: torch.Tensor, positions: torch.Tensor,
    items: torch.Tensor, counts: torch.Tensor, first_parts: torch.Tensor, parts: Parts,
    num_processors: int,
) -> torch.Tensor:  # fmt: skip
    """Attention of one token per row.

    `counts` is 0, the number of items of several rows, the number of all items. It is on the device, so
    that it can change under a captured graph.
    """
    out = torch.empty_like(query)
    for which, shape in enumerate((SHARED, SINGLE)):
        _attend_replies[(num_processors * shape.programs,)](
            query, cache[0], cache[1], positions, items, counts, first_parts, parts.mixed,
            parts.peaks, parts.sums, cache.shape[2], heads.scale * LOG2_E, KV_HEADS=heads.kv_heads,
            GROUP=heads.group, DIM=heads.dim, FIELDS=items.shape[1], WHICH=which,
            BLOCK_M=max(shape.rows, triton.next_power_of_2(heads.group)),
            BLOCK_N=shape.tokens if heads.dim <= 64 else shape.tokens // 2,
            PRECISION=_precision(query), num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
    _merge[(len(query),)](
        parts.mixed, parts.peaks, parts.sums, first_parts, out, HEADS=heads.heads,
        PADDED=triton.next_power_of_2(heads.heads), DIM=heads.dim, num_warps=4,
    )  # fmt: skip
    return out


def add_norm(hidden: torch.Tensor, delta: torch.Tensor | None, norm: Any) -> torch.Tensor:
    """Add `delta` to `hidden` in place; the norm of the sum."""
    normed = torch.empty_like(hidden)
    size = hidden.shape[-1]
    _add_norm[(len(hidden),)](
        hidden, hidden if delta is None else delta, norm.weight, normed, norm.variance_epsilon,
        HAS_DELTA=delta is not None, SIZE=size, PADDED=triton.next_power_of_2(size),
        num_warps=4 if size <= 2048 else 8,
    )  # fmt: skip
    return normed


def rotate_and_store(
    heads: Heads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    cosine: torch.Tensor, sine: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor,
) -> None:  # fmt: skip
    """Rotate queries in place; write rotated keys, and values, to their slots."""
    _rotate_and_store[(len(query),)](
        query, key, value, cosine, sine, slots, cache[0], cache[1], cache.shape[2],
        HEADS=heads.heads, PADDED=triton.next_power_of_2(heads.heads), KV_HEADS=heads.kv_heads,
        KV_PADDED=triton.next_power_of_2(heads.kv_heads), HALF=heads.dim // 2, num_warps=2,
    )  # fmt: skip


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    out = torch.empty_like(gate)
    size = gate.numel()
    _gated[(triton.cdiv(size, 2048),)](gate, up, out, size, BLOCK=2048, num_warps=8)
    return out


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor,
    tokens: torch.Tensor, logprobs: torch.Tensor,
) -> None:  # fmt: skip
    """Sample a token per row into `tokens`, with its log-probability in the sampled distribution."""
    _sample[(len(logits),)](
        logits, temperatures, uniforms, tokens, logprobs, logits.shape[1], GREEDY=GREEDY_BELOW,
        BLOCK=4096, num_warps=8,
    )  # fmt: skip


def _precision(tensor: torch.Tensor) -> str:
    return "ieee" if tensor.dtype == torch.float32 else "tf32"

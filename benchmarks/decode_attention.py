"""How fast can one token per request attend over a pool of slots on a GPU? A trial of the kernel.

    python -m benchmarks.decode_attention       # needs CUDA and triton

Each request has a table of slots, one per token, so requests share tokens freely. Prints the time of
one layer, the bytes read over that time, and the largest difference from plain torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

NUM_REQUESTS, KV_HEADS, GROUP, HEAD_DIM = 256, 3, 3, 64
PADDED_GROUP = 16
"""Query heads per KV head, padded to what the matrix unit takes."""
SCALE = HEAD_DIM**-0.5
SHARED_TOKENS, OWN_TOKENS, SHARERS = 5000, 300, 8


@triton.jit
def decode_kernel(
    query, key, value, table, lengths, out, peaks, sums, table_stride, head_stride,
    group: tl.constexpr, padded: tl.constexpr, dim: tl.constexpr, block: tl.constexpr,
    heads: tl.constexpr, splits: tl.constexpr, scale: tl.constexpr,
):  # fmt: skip
    """One program per request, KV head and part of the context; parts are merged afterwards."""
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + request)
    share = tl.cdiv(tl.cdiv(length, splits), block) * block
    begin = split * share
    end = tl.minimum(length, begin + share)
    d, g = tl.arange(0, dim), tl.arange(0, padded)
    rows = (request * heads * group + head * group + g)[:, None] * dim + d[None, :]
    q = tl.load(query + rows, mask=(g < group)[:, None], other=0.0)
    peak = tl.full([padded], -1e30, tl.float32)
    total = tl.zeros([padded], tl.float32)
    mixed = tl.zeros([padded, dim], tl.float32)
    for first in range(begin, end, block):
        position = first + tl.arange(0, block)
        is_there = position < end
        slot = tl.load(table + request * table_stride + position, mask=is_there, other=0)
        place = head * head_stride + slot[:, None] * dim + d[None, :]
        k = tl.load(key + place, mask=is_there[:, None], other=0.0)
        scores = tl.where(is_there[None, :], tl.dot(q, tl.trans(k)) * scale, -1e30)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - new_peak[:, None])
        fade = tl.exp(peak - new_peak)
        v = tl.load(value + place, mask=is_there[:, None], other=0.0)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v)
        total = total * fade + tl.sum(weights, 1)
        peak = new_peak
    part = ((request * heads + head) * splits + split) * padded + g
    tl.store(out + part[:, None] * dim + d[None, :], mixed)
    tl.store(peaks + part, peak)
    tl.store(sums + part, total)


class Case(NamedTuple):
    """What one trial reads."""

    name: str
    table: torch.Tensor
    num_slots: int


def separate(context: int) -> Case:
    """Every request has tokens of its own."""
    slots = torch.arange(NUM_REQUESTS * context, device="cuda", dtype=torch.int32)
    return Case(f"{context} tokens each", slots.view(NUM_REQUESTS, context), len(slots))


def shared() -> Case:
    """Groups of requests share their beginning."""
    num_groups = NUM_REQUESTS // SHARERS
    begin = torch.arange(num_groups * SHARED_TOKENS, device="cuda", dtype=torch.int32)
    own = torch.arange(NUM_REQUESTS * OWN_TOKENS, device="cuda", dtype=torch.int32) + len(begin)
    begins = begin.view(num_groups, 1, -1).expand(-1, SHARERS, -1).reshape(NUM_REQUESTS, -1)
    table = torch.cat([begins, own.view(NUM_REQUESTS, -1)], 1).contiguous()
    return Case(f"{SHARED_TOKENS} shared by {SHARERS}", table, len(begin) + len(own))


def milliseconds(act: Callable[[], Any], repeat: int = 20) -> float:
    for _ in range(3):
        act()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeat):
        act()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeat * 1e3


def attend(case: Case, keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor,
           *, splits: int, block: int) -> tuple[torch.Tensor, float]:  # fmt: skip
    """The result, and the time of the kernel in milliseconds."""
    shape = (NUM_REQUESTS, KV_HEADS, splits, PADDED_GROUP)
    out = torch.empty(*shape, HEAD_DIM, device="cuda")
    peaks, sums = torch.empty(shape, device="cuda"), torch.empty(shape, device="cuda")
    context = case.table.shape[1]
    lengths = torch.full((NUM_REQUESTS,), context, device="cuda", dtype=torch.int32)

    def run() -> None:
        decode_kernel[(NUM_REQUESTS, KV_HEADS, splits)](
            queries, keys, values, case.table, lengths, out, peaks, sums,
            case.table.stride(0), case.num_slots * HEAD_DIM, group=GROUP, padded=PADDED_GROUP,
            dim=HEAD_DIM, block=block, heads=KV_HEADS, splits=splits, scale=SCALE, num_warps=4,
        )  # fmt: skip

    spent = milliseconds(run)
    weights = (peaks - peaks.amax(2, keepdim=True)).exp()
    merged = (out * weights[..., None]).sum(2) / (sums * weights).sum(2)[..., None]
    return merged[:, :, :GROUP], spent


def reference(case: Case, keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor,
              request: int) -> torch.Tensor:  # fmt: skip
    slots = case.table[request].long()
    q = queries[request].float().view(KV_HEADS, GROUP, HEAD_DIM)
    scores = q @ keys[:, slots].float().transpose(1, 2) * SCALE
    return scores.softmax(-1) @ values[:, slots].float()


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"{'case':22} {'splits':>6} {'block':>6} {'ms':>7} {'TB/s':>6} {'difference':>11}")
    for case in (separate(1280), separate(5300), shared()):
        shape = (KV_HEADS, case.num_slots, HEAD_DIM)
        keys = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        values = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        queries = torch.randn(
            NUM_REQUESTS, KV_HEADS * GROUP, HEAD_DIM, device="cuda", dtype=torch.bfloat16
        )
        num_bytes = 2 * case.table.numel() * KV_HEADS * HEAD_DIM * 2
        for splits, block in ((1, 64), (4, 64), (4, 128), (8, 128)):
            out, spent = attend(case, keys, values, queries, splits=splits, block=block)
            difference = (out[0] - reference(case, keys, values, queries, 0)).abs().max().item()
            rate = num_bytes / spent / 1e9
            print(
                f"{case.name:22} {splits:6} {block:6} {spent:7.3f} {rate:6.2f} {difference:11.1e}"
            )


if __name__ == "__main__":
    main()

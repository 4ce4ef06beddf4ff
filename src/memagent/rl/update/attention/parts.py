"""Attention over packed trees, cut into parts without a mask, which flash kernels compute.

    tokens    A B C d e f g h         nodes    A B C   seen until 8
    until     8 8 8 5 5 8 8 8                  d e     seen until 5
                                               f g h   seen until 8

    itself    every node over itself, causal                      one call for all nodes
    level 0   d e f g h over A B C, each query over every key     one call for each level of the trees

A node is a run of tokens with nothing branching off. All that follows it up to its `until` sees the whole
of it, so no part needs a mask. What a query gets from its parts is put together by their sums of
exponentials. The backward pass runs each part's kernel with the result and the sum of the whole, which
gives the part's share of the gradient: the same trick that spreads long texts over many devices.

    plan = plan_parts(until)                             once for a pack
    out_NHD = attend_in_parts(q_NHD, k_NKD, v_NKD, plan.to("cuda"), scale=0.125)

Compiled code sees one operation here, and nothing of a plan but its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

MAX_LEVELS = 4
"""On a GPU, trees that branch more often one below the other are better computed in blocks."""


class Node(NamedTuple):
    """A run of tokens with nothing branching off."""

    start: int
    end: int
    until: int
    """End of those who see it."""
    level: int
    """Nodes above it."""


class PartPlan(NamedTuple):
    """The parts of a pack, as tensors."""

    places: torch.Tensor
    """Of each level, one after the other: places of its queries, then of its keys. The last two are not
    used."""
    bounds: torch.Tensor
    """Bounds of the nodes over themselves, then of each level's queries and keys."""
    sizes: torch.Tensor
    """Of nodes over themselves, of each level, and zeros up to MAX_LEVELS: nodes, queries, keys, most queries
    and most keys of a node. Always on the CPU."""

    def to(self, device: torch.device | str) -> PartPlan:
        """The same where the pack is computed."""
        return PartPlan(self.places.to(device), self.bounds.to(device), self.sizes)


class Part(NamedTuple):
    """What one call computes: some runs of queries, each over one run of keys."""

    places_q: torch.Tensor | None
    """None for all, where every query sees its own node."""
    places_k: torch.Tensor | None
    bounds_q: torch.Tensor
    bounds_k: torch.Tensor
    max_q: int
    max_k: int
    is_causal: bool

    @property
    def runs(self) -> Iterator[tuple[slice, slice]]:
        """Each run of queries with its run of keys."""
        q, k = self.bounds_q.tolist(), self.bounds_k.tolist()
        for number in range(len(q) - 1):
            yield slice(q[number], q[number + 1]), slice(k[number], k[number + 1])


# --- plans ----------------------------------------------------------------------------------------


def nodes_of(until: NDArray[np.int64]) -> list[Node]:
    """The nodes of a pack, in their order."""
    places = np.arange(1, len(until))
    ends = np.flatnonzero((until[:-1] != until[1:]) | (until[:-1] == places)) + 1
    nodes, above, start = [], list[int](), 0
    for end in [*ends.tolist(), len(until)]:
        while above and above[-1] <= start:
            above.pop()
        nodes.append(Node(start, end, int(until[start]), len(above)))
        if nodes[-1].until > end:
            above.append(nodes[-1].until)
        start = end
    return nodes


def fits_parts(until: NDArray[np.int64]) -> bool:
    """Whether a pack has few enough levels to be computed in parts on a GPU."""
    return max(node.level for node in nodes_of(until)) <= MAX_LEVELS


def plan_parts(until: NDArray[np.int64]) -> PartPlan:
    """Who sees whom, as parts."""
    nodes = nodes_of(until)
    lengths = [node.end - node.start for node in nodes]
    bounds = [_bounds(lengths)]
    sizes = [[len(nodes), 0, 0, max(lengths), max(lengths)]]
    places: list[NDArray[np.int64]] = []
    for level in range(max(node.level for node in nodes)):
        some = [node for node in nodes if node.level == level and node.until > node.end]
        num_q = [node.until - node.end for node in some]
        num_k = [node.end - node.start for node in some]
        places += [np.arange(node.end, node.until) for node in some]
        places += [np.arange(node.start, node.end) for node in some]
        bounds += [_bounds(num_q), _bounds(num_k)]
        sizes.append([len(some), sum(num_q), sum(num_k), max(num_q), max(num_k)])
    # lengths of 0 and 1, and another number of levels, would be compiled anew
    places.append(np.zeros(2, dtype=np.int64))
    sizes += [[0] * 5] * (1 + MAX_LEVELS - len(sizes))
    return PartPlan(
        torch.from_numpy(np.concatenate(places)),
        torch.from_numpy(np.concatenate(bounds)),
        torch.tensor(sizes),
    )


def _bounds(lengths: list[int]) -> NDArray[np.int32]:
    return np.cumsum([0, *lengths], dtype=np.int32)


def _parts(places: torch.Tensor, bounds: torch.Tensor, sizes: torch.Tensor) -> Iterator[Part]:
    """The parts of a plan; the first is every node over itself."""
    (num, _, _, longest, _), *levels = sizes.tolist()
    own, bounds = bounds[: num + 1], bounds[num + 1 :]
    yield Part(None, None, own, own, longest, longest, is_causal=True)
    for num, num_q, num_k, max_q, max_k in levels:
        if not num:
            return
        yield Part(
            places[:num_q],
            places[num_q : num_q + num_k],
            bounds[: num + 1],
            bounds[num + 1 : 2 * num + 2],
            max_q,
            max_k,
            is_causal=False,
        )
        places, bounds = places[num_q + num_k :], bounds[2 * num + 2 :]


# --- the operation --------------------------------------------------------------------------------


def attend_in_parts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: PartPlan, *, scale: float
) -> torch.Tensor:
    """Attention of [tokens, heads, dim]; there may be fewer heads of keys and values."""
    out: torch.Tensor
    out, _ = _attend(query.contiguous(), key.contiguous(), value.contiguous(), *plan, scale)
    return out


@torch.library.custom_op("memagent::attend_in_parts", mutates_args=())
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    places: torch.Tensor,
    bounds: torch.Tensor,
    sizes: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each query gets, and the logarithm of its sum of exponentials, [heads, tokens]."""
    own, *levels = _parts(places, bounds, sizes)
    out, total = _forward(query, key, value, own, scale)
    for part in levels:
        assert part.places_q is not None
        assert part.places_k is not None
        more, more_total = _forward(
            query[part.places_q], key[part.places_k], value[part.places_k], part, scale
        )
        before, before_total = out[part.places_q], total[:, part.places_q]
        merged, merged_total = _put_together(before, before_total, more, more_total)
        out.index_copy_(0, part.places_q, merged)
        total.index_copy_(1, part.places_q, merged_total)
    return out, total


@_attend.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    places: torch.Tensor,
    bounds: torch.Tensor,
    sizes: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), _sums_like(query)


@torch.library.custom_op("memagent::attend_in_parts_backward", mutates_args=())
def _attend_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    places: torch.Tensor,
    bounds: torch.Tensor,
    sizes: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values."""
    own, *levels = _parts(places, bounds, sizes)
    grad = grad.contiguous()
    of_query, of_key, of_value = _backward(grad, query, key, value, out, total, own, scale)
    for part in levels:
        q, k = part.places_q, part.places_k
        assert q is not None
        assert k is not None
        sums = total[:, q].contiguous()
        more = _backward(grad[q], query[q], key[k], value[k], out[q], sums, part, scale)
        for whole, where, some in zip((of_query, of_key, of_value), (q, k, k), more, strict=True):
            whole.index_copy_(0, where, whole[where] + some)
    return of_query, of_key, of_value


@_attend_backward.register_fake
def _(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    places: torch.Tensor,
    bounds: torch.Tensor,
    sizes: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, key, value, places, bounds, sizes, scale = inputs
    ctx.save_for_backward(query, key, value, *output, places, bounds, sizes)
    ctx.scale = scale


def _gradients(ctx: Any, grad: torch.Tensor, grad_total: torch.Tensor) -> tuple[Any, ...]:
    return *_attend_backward(grad, *ctx.saved_tensors, ctx.scale), None, None, None, None


_attend.register_autograd(_gradients, setup_context=_keep)


def _sums_like(query: torch.Tensor) -> torch.Tensor:
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty((query.shape[1], query.shape[0]), dtype=dtype)


def _put_together(
    a: torch.Tensor, a_total: torch.Tensor, b: torch.Tensor, b_total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of keys from the attention over each."""
    total = torch.logaddexp(a_total, b_total)
    share_a, share_b = ((some - total).exp().t()[:, :, None] for some in (a_total, b_total))
    return (a * share_a + b * share_b).to(a.dtype), total


# --- kernels --------------------------------------------------------------------------------------


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, part: Part, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if not query.is_cuda:
        return _forward_cpu(query, key, value, part, scale)
    out, total, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, part.bounds_q, part.bounds_k, part.max_q, part.max_k,
        0.0, part.is_causal, False, scale=scale,
    )  # fmt: skip
    return out, total


def _backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    part: Part,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not query.is_cuda:
        return _backward_cpu(grad, query, key, value, out, total, part, scale)
    random = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, which is off
    unused = torch.empty(0, device=query.device)
    of_query, of_key, of_value = torch.ops.aten._flash_attention_backward(
        grad, query, key, value, out, total, part.bounds_q, part.bounds_k, part.max_q, part.max_k,
        0.0, part.is_causal, random, unused, scale=scale,
    )  # fmt: skip
    return of_query, of_key, of_value


def _forward_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, part: Part, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, total = torch.empty_like(query), _sums_like(query)
    key, value = _for_all_heads(query, key), _for_all_heads(query, value)
    for q, k in part.runs:
        some, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_as_batch(query[q], key[k], value[k]), 0.0, part.is_causal, scale=scale
        )
        out[q], total[:, q] = some[0].transpose(0, 1), sums[0]
    return out, total


def _backward_cpu(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    part: Part,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    of_query, num_kv = torch.empty_like(query), key.shape[1]
    key, value = _for_all_heads(query, key), _for_all_heads(query, value)
    of_key, of_value = torch.empty_like(key), torch.empty_like(value)
    for q, k in part.runs:
        grad_q, query_q, key_k, value_k, out_q = _as_batch(
            grad[q], query[q], key[k], value[k], out[q]
        )
        sums = (
            total[None, :, q].transpose(1, 2).contiguous().transpose(1, 2)
        )  # as the kernel has it
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_q, query_q, key_k, value_k, out_q, sums, 0.0, part.is_causal, scale=scale
        )
        of_query[q], of_key[k], of_value[k] = (some[0].transpose(0, 1) for some in found)
    shared = (len(key), num_kv, -1, key.shape[2])
    return of_query, of_key.view(shared).sum(2), of_value.view(shared).sum(2)


def _for_all_heads(query: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    return shared.repeat_interleave(query.shape[1] // shared.shape[1], dim=1)


def _as_batch(*some: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As [1, heads, tokens, dim]."""
    return tuple(one.transpose(0, 1)[None] for one in some)

"""Attention over packed trees: query q sees key k when k <= q < until[k].

    "parts"     in parts that need no mask, for flash kernels
    "blocks"    in blocks, for FlexAttention on a GPU

Both are one attention implementation, registered with transformers; with any other mask it behaves like SDPA.

**Parts**

    tokens    A B C d e f g h         nodes    A B C   seen until 8
    until     8 8 8 5 5 8 8 8                  d e     seen until 5
                                               f g h   seen until 8

    itself    every node over itself, causal                      one call for all nodes
    level 0   d e f g h over A B C, each query over every key     one call for each level of the trees

A node is a run of tokens without branches. All tokens after it, up to its `until`, see the whole of it, so
no part needs a mask. The results of a query's parts are combined by their log-sum-exp. The backward pass
runs each part's kernel with the output and the log-sum-exp of the whole, which gives the part's share of the
gradient, as in ring attention.

    plan = plan_parts(until)                             once for a pack
    out_NHD = attend_in_parts(query_NHD, key_NKD, value_NKD, plan.to("cuda"), scale=0.125)

Compiled code sees one operation, and of a plan only its tensors.

**Blocks**

    blocks      k 0   1   2   3
      q 0       #                     # partial: the rule is evaluated for each pair
        1       .   #                 . full: every pair is visible
        2       .       #             (blank) not computed
        3       .       .   #

Which blocks are needed follows from the minimum and maximum of `until` over each block of keys, so no
mask of all pairs is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask, flex_attention

MAX_LEVELS = 4
"""On a GPU, deeper trees are faster in blocks."""


class TreeNode(NamedTuple):
    """A run of tokens without branches."""

    start: int
    end: int
    until: int
    """End of the tokens that see it."""
    level: int
    """Number of nodes above it."""


class PartPlan(NamedTuple):
    """The parts of a pack, as tensors."""

    places: torch.Tensor
    """Places of the queries, then of the keys, of each level in turn. The last two are padding."""
    bounds: torch.Tensor
    """Bounds of the nodes over themselves, then of each level's queries and keys."""
    sizes: torch.Tensor
    """A row for nodes over themselves, one for each level, and zeros up to MAX_LEVELS. Columns: number of
    nodes, of queries, of keys, maximum of queries and of keys per node. Always on the CPU."""

    def to(self, device: torch.device | str) -> PartPlan:
        """The plan on a device."""
        return PartPlan(self.places.to(device), self.bounds.to(device), self.sizes)


class AttentionPart(NamedTuple):
    """One kernel call: runs of queries, each over one run of keys."""

    places_q: torch.Tensor | None
    """None for all tokens, where every query sees its own node."""
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


def nodes_of(until: NDArray[np.int64]) -> list[TreeNode]:
    """The nodes of a pack, in their order."""
    places = np.arange(1, len(until))
    ends = np.flatnonzero((until[:-1] != until[1:]) | (until[:-1] == places)) + 1
    nodes, above, start = [], list[int](), 0
    for end in [*ends.tolist(), len(until)]:
        while above and above[-1] <= start:
            above.pop()
        nodes.append(TreeNode(start, end, int(until[start]), len(above)))
        if nodes[-1].until > end:
            above.append(nodes[-1].until)
        start = end
    return nodes


def fits_parts(until: NDArray[np.int64]) -> bool:
    """Whether a pack has few enough levels for parts on a GPU."""
    return max(node.level for node in nodes_of(until)) <= MAX_LEVELS


def plan_parts(until: NDArray[np.int64]) -> PartPlan:
    """The parts of a pack."""
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
    # lengths of 0 and 1, or another number of levels, would trigger a recompilation
    places.append(np.zeros(2, dtype=np.int64))
    sizes += [[0] * 5] * (1 + MAX_LEVELS - len(sizes))
    return PartPlan(
        torch.from_numpy(np.concatenate(places)),
        torch.from_numpy(np.concatenate(bounds)),
        torch.tensor(sizes),
    )


def _bounds(lengths: list[int]) -> NDArray[np.int32]:
    return np.cumsum([0, *lengths], dtype=np.int32)


def _parts(
    places: torch.Tensor, bounds: torch.Tensor, sizes: torch.Tensor
) -> Iterator[AttentionPart]:
    """The parts of a plan; the first is every node over itself."""
    (num, _, _, longest, _), *levels = sizes.tolist()
    own, bounds = bounds[: num + 1], bounds[num + 1 :]
    yield AttentionPart(None, None, own, own, longest, longest, is_causal=True)
    for num, num_q, num_k, max_q, max_k in levels:
        if not num:
            return
        yield AttentionPart(
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


class _Tensors(NamedTuple):
    """Queries, keys and values of some tokens."""

    query_NHD: torch.Tensor
    key_NKD: torch.Tensor
    value_NKD: torch.Tensor

    def of(self, part: AttentionPart) -> _Tensors:
        """Those of a level."""
        q, k = part.places_q, part.places_k
        return _Tensors(self.query_NHD[q], self.key_NKD[k], self.value_NKD[k])


class _Result(NamedTuple):
    """The output of attention, and the log-sum-exp of each query."""

    out_NHD: torch.Tensor
    lse_HN: torch.Tensor


def attend_in_parts(
    query_NHD: torch.Tensor,
    key_NKD: torch.Tensor,
    value_NKD: torch.Tensor,
    plan: PartPlan,
    *,
    scale: float,
) -> torch.Tensor:
    """Attention over a pack. There may be fewer heads of keys and values than of queries."""
    out_NHD: torch.Tensor
    out_NHD, _ = _attend(
        query_NHD.contiguous(), key_NKD.contiguous(), value_NKD.contiguous(), *plan, scale
    )
    return out_NHD


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
    """The output, and the log-sum-exp of each query, [heads, tokens]."""
    own, *levels = _parts(places, bounds, sizes)
    tensors = _Tensors(query, key, value)
    out_NHD, lse_HN = _forward(tensors, own, scale)
    for part in levels:
        q = part.places_q
        assert q is not None
        more = _forward(tensors.of(part), part, scale)
        combined = _combined(_Result(out_NHD[q], lse_HN[:, q]), more)
        out_NHD.index_copy_(0, q, combined.out_NHD)
        lse_HN.index_copy_(1, q, combined.lse_HN)
    return out_NHD, lse_HN


@_attend.register_fake
def _(query: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), _lse_like(query)


@torch.library.custom_op("memagent::attend_in_parts_backward", mutates_args=())
def _attend_backward(
    grad: torch.Tensor,
    tensors: list[torch.Tensor],
    plan: list[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values."""
    own, *levels = _parts(*plan)
    inputs = _Tensors(*tensors)
    grad = grad.contiguous()
    grads = _backward(grad, inputs, _Result(out, lse), own, scale)
    for part in levels:
        q, k = part.places_q, part.places_k
        assert q is not None
        assert k is not None
        result = _Result(out[q], lse[:, q].contiguous())
        more = _backward(grad[q], inputs.of(part), result, part, scale)
        for whole, where, some in zip(grads, (q, k, k), more, strict=True):
            whole.index_copy_(0, where, whole[where] + some)
    return grads


@_attend_backward.register_fake
def _(
    grad: torch.Tensor, tensors: list[torch.Tensor], *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = map(torch.empty_like, tensors)
    return query, key, value


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.scale = scale


def _gradients(ctx: Any, grad: torch.Tensor, grad_lse: torch.Tensor) -> tuple[Any, ...]:
    query, key, value, places, bounds, sizes, out, lse = ctx.saved_tensors
    tensors, plan = [query, key, value], [places, bounds, sizes]
    return *_attend_backward(grad, tensors, plan, out, lse, ctx.scale), None, None, None, None


_attend.register_autograd(_gradients, setup_context=_save)


def _lse_like(query_NHD: torch.Tensor) -> torch.Tensor:
    dtype = torch.float64 if query_NHD.dtype == torch.float64 else torch.float32
    return query_NHD.new_empty((query_NHD.shape[1], query_NHD.shape[0]), dtype=dtype)


def _combined(a: _Result, b: _Result) -> _Result:
    """Attention over two sets of keys from the attention over each."""
    lse_HN = torch.logaddexp(a.lse_HN, b.lse_HN)
    share_a, share_b = ((some.lse_HN - lse_HN).exp().t()[:, :, None] for some in (a, b))
    out_NHD = (a.out_NHD * share_a + b.out_NHD * share_b).to(a.out_NHD.dtype)
    return _Result(out_NHD, lse_HN)


# --- kernels --------------------------------------------------------------------------------------


def _forward(tensors: _Tensors, part: AttentionPart, scale: float) -> _Result:
    if not tensors.query_NHD.is_cuda:
        return _forward_cpu(tensors, part, scale)
    out_NHD, lse_HN, *_ = torch.ops.aten._flash_attention_forward(
        *tensors, part.bounds_q, part.bounds_k, part.max_q, part.max_k,
        0.0, part.is_causal, False, scale=scale,
    )  # fmt: skip
    return _Result(out_NHD, lse_HN)


def _backward(
    grad_NHD: torch.Tensor, tensors: _Tensors, result: _Result, part: AttentionPart, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not grad_NHD.is_cuda:
        return _backward_cpu(grad_NHD, tensors, result, part, scale)
    random = torch.zeros(2, dtype=torch.uint64, device=grad_NHD.device)  # of dropout, which is off
    unused = torch.empty(0, device=grad_NHD.device)
    of_query, of_key, of_value = torch.ops.aten._flash_attention_backward(
        grad_NHD, *tensors, *result, part.bounds_q, part.bounds_k, part.max_q, part.max_k,
        0.0, part.is_causal, random, unused, scale=scale,
    )  # fmt: skip
    return of_query, of_key, of_value


def _forward_cpu(tensors: _Tensors, part: AttentionPart, scale: float) -> _Result:
    query, key, value = _with_all_heads(tensors)
    out_NHD, lse_HN = torch.empty_like(query), _lse_like(query)
    for q, k in part.runs:
        some, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_as_batch(query[q], key[k], value[k]), 0.0, part.is_causal, scale=scale
        )
        out_NHD[q], lse_HN[:, q] = some[0].transpose(0, 1), lse[0]
    return _Result(out_NHD, lse_HN)


def _backward_cpu(
    grad_NHD: torch.Tensor, tensors: _Tensors, result: _Result, part: AttentionPart, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = _with_all_heads(tensors)
    of_query, of_key, of_value = map(torch.empty_like, (query, key, value))
    for q, k in part.runs:
        batch = _as_batch(grad_NHD[q], query[q], key[k], value[k], result.out_NHD[q])
        # the kernel takes the strides that its forward pass returns
        lse = result.lse_HN[None, :, q].transpose(1, 2).contiguous().transpose(1, 2)
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *batch, lse, 0.0, part.is_causal, scale=scale
        )
        of_query[q], of_key[k], of_value[k] = (some[0].transpose(0, 1) for some in found)
    num_kv_heads = tensors.key_NKD.shape[1]
    by_head = (len(key), num_kv_heads, -1, key.shape[2])
    return of_query, of_key.view(by_head).sum(2), of_value.view(by_head).sum(2)


def _with_all_heads(tensors: _Tensors) -> _Tensors:
    """Keys and values repeated for every head of the queries."""
    query, key, value = tensors
    times = query.shape[1] // key.shape[1]
    return _Tensors(
        query, key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
    )


def _as_batch(*some: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As [1, heads, tokens, dim]."""
    return tuple(one.transpose(0, 1)[None] for one in some)


# --- over a packed tree ---------------------------------------------------------------------------

Attention = Literal["parts", "blocks"]
"""How attention over a tree is computed."""

NAME = "memagent_trees"
"""Name of this attention in transformers."""
BLOCK = 128


def block_mask(until_N: torch.Tensor, *, block: int = BLOCK) -> BlockMask:
    """The mask of a pack, in blocks. Its length must be a multiple of the block."""
    num_blocks, rest = divmod(len(until_N), block)
    assert rest == 0, "packs are padded to whole blocks"
    by_block = until_N.view(num_blocks, block)
    max_B, min_B = by_block.amax(dim=1), by_block.amin(dim=1)
    blocks_B = torch.arange(num_blocks, device=until_N.device)
    is_before_BB = blocks_B[None, :] < blocks_B[:, None]
    is_needed_BB = is_before_BB & (max_B[None, :] > (blocks_B * block)[:, None])
    is_full_BB = is_before_BB & (min_B[None, :] >= ((blocks_B + 1) * block)[:, None])
    is_diagonal_BB = torch.eye(num_blocks, dtype=torch.bool, device=until_N.device)
    is_partial_BB = (is_needed_BB & ~is_full_BB) | is_diagonal_BB

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (query < until_N[key])

    return BlockMask.from_kv_blocks(
        *_ordered(is_partial_BB), *_ordered(is_full_BB), BLOCK_SIZE=block, mask_mod=sees
    )


def _ordered(is_needed_BB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each block of queries: the number of blocks of keys that it needs, and their indices first."""
    counts = is_needed_BB.sum(dim=1, dtype=torch.int32)
    order = is_needed_BB.int().argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return counts[None, None].contiguous(), order[None, None].contiguous()


def use_tree_attention(model: Any) -> None:
    """Let a transformers model attend over packs; with any other mask it behaves like SDPA."""
    _register()
    for module in model.modules():
        if hasattr(module, "config") and hasattr(module.config, "_attn_implementation"):
            module.config._attn_implementation = NAME


@cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attend_model)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention_arguments(
    until: NDArray[np.int64], attention: Attention, device: torch.device
) -> dict[str, Any]:
    """Arguments of a model's forward pass over a pack."""
    if attention == "blocks":
        return {"attention_mask": block_mask(torch.from_numpy(until).to(device))}
    # transformers builds a mask of all pairs unless it gets one
    unused = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=device)
    return {"attention_mask": unused, "plan": plan_parts(until).to(device)}


def _attend_model(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    plan: PartPlan | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    if plan is not None:
        by_token = [part.transpose(1, 2)[0] for part in (query, key, value)]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend_in_parts(by_token[0], by_token[1], by_token[2], plan, scale=scale)[None], None
    if isinstance(attention_mask, BlockMask):
        attend = _compiled() if query.is_cuda else _flex  # on a CPU only for comparison
        out = attend(query, key, value, attention_mask, scaling)
        return out.transpose(1, 2).contiguous(), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    plain: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **others
    )
    return plain


@cache
def _compiled() -> Any:
    return torch.compile(_flex, fullgraph=True)


def _flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: BlockMask,
    scaling: float | None,
) -> torch.Tensor:
    out = flex_attention(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True)
    assert isinstance(out, torch.Tensor)
    return out

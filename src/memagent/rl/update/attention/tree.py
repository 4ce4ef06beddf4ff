"""Attention over packed trees: query q sees key k when k <= q < until[k].

    "parts"     in parts that need no mask, for flash kernels; see `parts.py`
    "blocks"    in blocks, for FlexAttention on a GPU

    blocks      k 0   1   2   3
      q 0       #                     # partial: the rule is evaluated for each pair
        1       .   #                 . full: every pair is visible
        2       .       #             (blank) not computed
        3       .       .   #

Which blocks are needed follows from the minimum and maximum of `until` over each block of keys, so no
mask of all pairs is built. Both are one attention implementation, registered with transformers; with any
other mask it behaves like SDPA.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from memagent.rl.update.attention.parts import PartPlan, attend_in_parts, plan_parts

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

    AttentionInterface.register(NAME, _attend)
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


def _attend(
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

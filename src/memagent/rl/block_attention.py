"""Attention over packed trees: query q sees key k when k <= q < until[k].

    dense_mask(until)      True where a query sees a key; for SDPA on a CPU
    block_mask(until)      the same in blocks, for FlexAttention on a GPU

    blocks      k 0   1   2   3
      q 0       #                     # partly: the rule is asked for each pair
        1       .   #                 . wholly: nothing is asked
        2       .       #             (blank) not computed
        3       .       .   #

Which blocks are needed follows from the least and the greatest `until` of each block of keys, so no
mask of all pairs is ever made. Transformers models take both masks as they take any attention mask.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

NAME = "memagent_blocks"
"""Of this attention, among those that transformers knows."""
BLOCK = 128


def dense_mask(until_N: torch.Tensor) -> torch.Tensor:
    """Who sees whom, as [1, 1, queries, keys]."""
    places_N = torch.arange(len(until_N), device=until_N.device)
    sees = (places_N[None, :] <= places_N[:, None]) & (places_N[:, None] < until_N[None, :])
    return sees[None, None]


def block_mask(until_N: torch.Tensor, *, block: int = BLOCK) -> BlockMask:
    """Who sees whom, in blocks. The length has to be a multiple of the block."""
    num_blocks, rest = divmod(len(until_N), block)
    assert rest == 0, "packs are padded to whole blocks"
    by_block = until_N.view(num_blocks, block)
    greatest_K, least_K = by_block.amax(dim=1), by_block.amin(dim=1)
    blocks_Q = torch.arange(num_blocks, device=until_N.device)
    is_before = blocks_Q[None, :] < blocks_Q[:, None]
    is_some = is_before & (greatest_K[None, :] > (blocks_Q * block)[:, None])
    is_whole = is_before & (least_K[None, :] >= ((blocks_Q + 1) * block)[:, None])
    is_part = (is_some & ~is_whole) | torch.eye(num_blocks, dtype=torch.bool, device=until_N.device)

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (query < until_N[key])

    return BlockMask.from_kv_blocks(
        *_ordered(is_part), *_ordered(is_whole), BLOCK_SIZE=block, mask_mod=sees
    )


def _ordered(is_needed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per block of queries: how many blocks of keys it needs, and which, those first."""
    counts = is_needed.sum(dim=1, dtype=torch.int32)
    order = is_needed.int().argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return counts[None, None].contiguous(), order[None, None].contiguous()


def use_block_attention(model: Any) -> None:
    """Let a transformers model take block masks. With any other mask it computes as before."""
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


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    if not isinstance(attention_mask, BlockMask):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
        return plain
    attend = _compiled() if query.is_cuda else _flex  # on a CPU only for comparison
    out = attend(query, key, value, attention_mask, scaling)
    return out.transpose(1, 2).contiguous(), None


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

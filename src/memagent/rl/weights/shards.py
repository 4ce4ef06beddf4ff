"""Tensors that may be sharded over processes (FSDP2): the whole of one, and the own part of one.

    parameter   DTensor on 4 ranks ── whole ──▶ the same tensor on every rank    (all ranks must call it)
                                   ── local ──▶ this rank's quarter, in place
    stored      a whole tensor     ── like ───▶ sharded as a parameter is, without communication

A tensor of a process that trains alone is its own whole and its own part.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor. Shards are gathered, so all ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, on the same memory, without gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(pattern: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """A whole tensor that every rank has, sharded as the pattern is; a sharded one stays as it is."""
    if not isinstance(pattern, DTensor) or isinstance(stored, DTensor):
        return stored
    return distribute_tensor(
        stored.to(pattern.device), pattern.device_mesh, list(pattern.placements), src_data_rank=None
    )


def gathered(
    tensors: Iterable[tuple[str, torch.Tensor]], *, is_kept: bool = True
) -> dict[str, torch.Tensor]:
    """Whole tensors by name; those that were sharded come to the CPU, one at a time.

    All processes that share them must call it; where they are not kept the result is empty.
    """
    found = {}
    for name, tensor in tensors:
        one = whole(tensor.detach())
        if is_kept:
            found[name] = one.cpu() if isinstance(tensor, DTensor) else one
    return found

"""Sizes and buffers shared by the kernels and their plain-torch versions."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Sizes of an attention layer."""

    heads: int
    kv_heads: int
    dim: int
    scale: float

    @property
    def group(self) -> int:
        """Query heads that read the same keys and values."""
        return self.heads // self.kv_heads


class Parts:
    """Buffers for partial attention of replies, reused by all layers and steps."""

    def __init__(self, heads: Heads, num_parts: int, device: torch.device) -> None:
        self.num_parts = num_parts
        shape = (num_parts, heads.heads)
        self.mixed = torch.empty((*shape, heads.dim), dtype=torch.float32, device=device)
        self.peaks = torch.empty(shape, dtype=torch.float32, device=device)
        self.sums = torch.empty(shape, dtype=torch.float32, device=device)


# --- memory that torch keeps ----------------------------------------------------------------------


def free_workspaces(device: torch.device) -> None:
    """Free the buffers that cuBLAS keeps for each thread and stream; it allocates them again when it needs them."""
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()


def free_reserve(device: torch.device) -> None:
    """Give back what no tensor uses, once everything that runs on the GPU has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        free_workspaces(device)
        torch.cuda.empty_cache()

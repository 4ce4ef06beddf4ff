"""Memory of a GPU that torch keeps after the tensors are gone. On a CPU there is none, and nothing is done."""

from __future__ import annotations

import torch


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

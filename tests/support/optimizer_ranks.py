"""One of several processes that share a model and step it: the worker of test_sharded_optimizer.py.

python -m tests.support.optimizer_ranks RANK NUM_RANKS FOLDER DTYPE

Takes `NUM_STEPS` steps under FSDP2, the second half with a new optimizer that continues from the state of
the first, and writes all weights, the state and the metrics to FOLDER/stepped-RANK.pt.
"""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from memagent.rl.settings import OptimSettings
from memagent.rl.update.optim import Optimizer

SETTINGS = OptimSettings(lr=0.01, warmup_steps=2, weight_decay=0.1, max_grad_norm=0.5)
NUM_STEPS = 4
NUM_ROWS = 4
"""Of a step; each process has its share of them."""


def make_model(dtype: torch.dtype) -> torch.nn.Sequential:
    """A model whose parameters two processes cannot share evenly."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = (torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
        return torch.nn.Sequential(*layers).to(dtype)


def stepped(model: Any, *, rank: int = 0, num_ranks: int = 1) -> dict[str, Any]:
    """Take the steps with this process's rows; the weights, the state and the metrics."""
    metrics, state = [], None
    optimizer = Optimizer(model.named_parameters(), SETTINGS, num_steps=NUM_STEPS)
    dtype = next(model.parameters()).dtype
    for step in range(NUM_STEPS):
        if step == NUM_STEPS // 2:
            state = optimizer.state_dict()
            optimizer.close()
            optimizer = Optimizer(model.named_parameters(), SETTINGS, num_steps=NUM_STEPS)
            optimizer.load_state_dict(state)
        rows = torch.randn(NUM_ROWS, 4, generator=torch.Generator().manual_seed(step))
        for row in rows[rank::num_ranks]:
            torch.autograd.backward(model(row.to(dtype)).square().sum() * num_ranks)
        metrics.append(optimizer.step())
        optimizer.advance_schedule()
    weights = {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}
    return {"metrics": metrics, "weights": weights, "state": optimizer.state_dict()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main(rank: int, num_ranks: int, folder: Path, dtype: torch.dtype) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (num_ranks,))
    model = make_model(dtype)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    torch.save(stepped(model, rank=rank, num_ranks=num_ranks), folder / f"stepped-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), getattr(torch, sys.argv[4]))

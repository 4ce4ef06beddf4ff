"""Processes that share a model: its gradient, and the steps of its optimizer.

python -m tests.support.gloo_ranks gradient RANK NUM_RANKS FOLDER
python -m tests.support.gloo_ranks steps RANK NUM_RANKS FOLDER DTYPE

`gradient` takes the model and the rows in FOLDER, runs its share of the packs under FSDP2, and writes the whole
gradient to FOLDER/gradient-RANK.pt. `steps` takes `NUM_STEPS` steps under FSDP2, the second half with a new
optimizer that continues from the state of the first, and writes all weights, the state and the metrics to
FOLDER/steps-RANK.pt.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from memagent.rl.settings import ObjectiveSettings, OptimSettings
from memagent.rl.update.optim import Optimizer
from memagent.rl.update.packing import pack, share_out
from memagent.rl.update.policy import Policy, accumulate, decoder_of

ROOT = Path(__file__).resolve().parents[2]
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


def run_ranks(kind: str, num_ranks: int, folder: Path, *arguments: str) -> list[Any]:
    """What each of these processes has written."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.support.gloo_ranks", kind]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(num_ranks), str(folder), *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0] * num_ranks, "\n".join(outputs)
    return [torch.load(folder / f"{kind}-{rank}.pt") for rank in range(num_ranks)]


@contextmanager
def meeting(rank: int, num_ranks: int, folder: Path) -> Iterator[DeviceMesh]:
    """The mesh of all processes."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=60),
    )
    yield init_device_mesh("cpu", (num_ranks,))
    dist.destroy_process_group()


def gradient(rank: int, num_ranks: int, folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    with (folder / "rows.pickle").open("rb") as file:
        rows = pickle.load(file)
    policy = Policy(model)
    with meeting(rank, num_ranks, folder) as mesh:
        for layer in decoder_of(model).layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(policy, mesh=mesh)
        packs = share_out(pack(rows, max_tokens=90), num_ranks)[rank]
        accumulate(policy, packs, ObjectiveSettings(clip_high=0.28), scale=num_ranks)
        assert all(isinstance(one.grad, DTensor) for one in model.parameters())
        return {name: whole(one.grad) for name, one in model.named_parameters()}


def steps(rank: int, num_ranks: int, folder: Path, dtype: str) -> dict[str, Any]:
    model = make_model(getattr(torch, dtype))
    with meeting(rank, num_ranks, folder) as mesh:
        fully_shard(model, mesh=mesh)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        return stepped(model, rank=rank, num_ranks=num_ranks)


if __name__ == "__main__":
    kind, number, count, place, *more = sys.argv[1:]
    found = {"gradient": gradient, "steps": steps}[kind](
        int(number), int(count), Path(place), *more
    )
    torch.save(found, Path(place) / f"{kind}-{number}.pt")
    sys.stdout.flush()
    os._exit(
        0
    )  # threads of gloo that still run abort an ordinary end of the interpreter now and then

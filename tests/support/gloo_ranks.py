"""One of several processes that share a model and its gradient: the worker of test_sharded_step.py.

python -m tests.support.gloo_ranks RANK NUM_RANKS FOLDER

Takes the model and the rows in FOLDER, runs its share of the packs under FSDP2, and writes the whole
gradient to FOLDER/gradient-RANK.pt.
"""

import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from memagent.rl.settings import ObjectiveSettings
from memagent.rl.update.packing import pack, share_out
from memagent.rl.update.policy import Policy, accumulate, decoder_of


def main(rank: int, num_ranks: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (num_ranks,))
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    with (folder / "rows.pickle").open("rb") as file:
        rows = pickle.load(file)
    policy = Policy(model)
    for layer in decoder_of(model).layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    packs = share_out(pack(rows, max_tokens=90), num_ranks)[rank]
    accumulate(policy, packs, ObjectiveSettings(clip_high=0.28), scale=num_ranks)
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert isinstance(gradient, DTensor), f"{name} is not sharded"
        gradients[name] = gradient.full_tensor()
    torch.save(gradients, folder / f"gradient-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    sys.stdout.flush()
    os._exit(
        0
    )  # threads of gloo that still run abort an ordinary end of the interpreter now and then

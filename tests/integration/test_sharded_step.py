"""Two processes that share a model: together they have the gradient of one."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from memagent.rl.settings import ObjectiveSettings
from memagent.rl.update.packing import pack, share_out
from memagent.rl.update.policy import Policy, accumulate
from memagent.rl.update.rows import rows_of
from tests.support.rollouts import random_groups
from tests.support.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
NUM_RANKS = 2


@pytest.mark.slow
def test_two_processes_have_the_gradient_of_one(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "tie_word_embeddings": True}
    folder = make_tiny_model(tmp_path / "model", "llama", **shape)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    objective = ObjectiveSettings(clip_high=0.28)
    rows = rows_of(random_groups(model, num_groups=3), objective).rows
    packs = pack(rows, max_tokens=90)
    parts = share_out(packs, NUM_RANKS)
    assert [len(one.targets) > 0 for one in parts[0]] == [True, False]  # one has less to do
    assert [len(one.targets) > 0 for one in parts[1]] == [True, True]
    accumulate(Policy(model), packs, objective)
    (tmp_path / "rows.pickle").write_bytes(pickle.dumps(rows))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.support.gloo_ranks"]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(NUM_RANKS), str(tmp_path)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    try:
        outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(outputs)
    for rank in range(NUM_RANKS):
        found = torch.load(tmp_path / f"gradient-{rank}.pt")
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            scale = parameter.grad.norm()
            assert scale > 0
            assert (found[name] - parameter.grad).norm() / scale < 1e-6, name

"""Two processes that share a model: together they have the gradient of one, and make its optimizer steps."""

import pickle
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from memagent.rl.settings import ObjectiveSettings
from memagent.rl.update.packing import pack, share_out
from memagent.rl.update.policy import Policy, accumulate
from memagent.rl.update.rows import rows_of
from tests.support.gloo_ranks import make_model, run_ranks, stepped
from tests.support.rollouts import random_groups
from tests.support.tiny_models import make_tiny_model

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
    for found in run_ranks("gradient", NUM_RANKS, tmp_path):
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            scale = parameter.grad.norm()
            assert scale > 0
            assert (found[name] - parameter.grad).norm() / scale < 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02)], ids=str
)
def test_two_processes_step_as_one(tmp_path: Path, dtype: torch.dtype, tolerance: float) -> None:
    expected = stepped(make_model(dtype))
    name = str(dtype).removeprefix("torch.")
    for found in run_ranks("steps", NUM_RANKS, tmp_path, name):
        for one, other in zip(found["metrics"], expected["metrics"], strict=True):
            assert one == pytest.approx(other, rel=tolerance)
            assert other["grad_norm"] > 0.5  # it was clipped, with the norm of all shards
        for part in ("weights", "state"):
            assert found[part].keys() == expected[part].keys()
            for name, value in expected[part].items():
                assert found[part][name].dtype == value.dtype
                torch.testing.assert_close(
                    found[part][name], value, rtol=tolerance, atol=tolerance, msg=name
                )

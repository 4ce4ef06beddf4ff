"""All updates of a step together."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from memagent.rl.settings import ObjectiveSettings, OptimSettings, UpdateSettings
from memagent.rl.update.optim import Optimizer
from memagent.rl.update.policy import Policy
from memagent.rl.update.step import update
from tests.support.rollouts import near_policy, random_groups
from tests.support.tiny_models import make_tiny_model


@pytest.fixture
def model(tmp_path: Path) -> Any:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    folder = make_tiny_model(tmp_path / "llama", "llama", **shape)
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="sdpa", dtype=torch.float64
    )


@pytest.mark.parametrize("masks", [{}, {"mask_below": 0.9, "mask_above": 1.1}])
def test_many_updates_of_exact_samples_are_drift_and_no_mismatch(
    model: Any, masks: dict[str, float]
) -> None:
    groups = near_policy(model, random_groups(model, num_groups=4), noise=0.0)
    config = SimpleNamespace(
        objective=ObjectiveSettings(**masks), update=UpdateSettings(updates=4, max_tokens=200)
    )
    setup: Any = SimpleNamespace(config=config, policy=Policy(model), trained=None)
    optimizer = Optimizer(model.named_parameters(), OptimSettings(lr=0.01), num_steps=1)
    metrics = update(setup, groups, optimizer, None, policy_version=0)
    assert metrics["num_updates"] == 4
    assert metrics["mismatch_max"] < 1e-5
    assert metrics["masked"] == 0.0
    assert metrics["drift_max"] > 0.1

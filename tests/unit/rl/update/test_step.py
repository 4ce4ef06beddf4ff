"""All updates of a step together, and what is checked before the first."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from memagent.engines.base import BaseEngine
from memagent.errors import ConfigError
from memagent.rl.settings import ObjectiveSettings, OptimSettings, UpdateSettings
from memagent.rl.update.agreement import check_agreement
from memagent.rl.update.optim import Optimizer
from memagent.rl.update.policy import Policy
from memagent.rl.update.step import update
from memagent.types import Completion, Message, Sampling
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


class Noisy(BaseEngine):
    """A reply of random tokens with the model's log-probabilities, changed."""

    model = "noisy"
    tokenizer = ""

    def __init__(self, model: Any, change: Callable[[float], float]) -> None:
        self._model, self._change = model, change

    async def aclose(self) -> None: ...

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        rng = random.Random(0)
        ids = [rng.randrange(3, self._model.config.vocab_size) for _ in range(20)]
        with torch.no_grad():
            row = torch.tensor([ids])
            logits = self._model(row, attention_mask=torch.ones_like(row)).logits
            logprobs = logits[0].log_softmax(-1)
        theirs = [logprobs[at - 1, ids[at]].item() for at in range(8, 20)]
        return Completion(
            text="x",
            finish_reason="stop",
            prompt_ids=tuple(ids[:8]),
            completion_ids=tuple(ids[8:]),
            logprobs=tuple(map(self._change, theirs)),
        )


async def test_an_engine_whose_log_probabilities_are_not_the_trainers_is_refused(
    model: Any,
) -> None:
    exact = await check_agreement(Noisy(model, lambda p: p), Policy(model))
    assert exact.num_tokens == 12
    assert exact.largest < 1e-5
    rounded = await check_agreement(Noisy(model, lambda p: round(p, 1)), Policy(model))
    assert 0 < rounded.mean < 0.05
    with pytest.raises(ConfigError, match=r"over 12 tokens .* differ by 0\.300 per token"):
        await check_agreement(Noisy(model, lambda p: p - 0.3), Policy(model))
    with pytest.raises(ConfigError, match="noisy"):
        await check_agreement(Noisy(model, lambda p: p), Policy(model, temperature=0.5))

"""Training in this process behind the interface of the loop, and work that a cancellation waits for."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from memagent.rl.backend import LocalBackend, ModelFacts, to_its_end
from memagent.rl.settings import OptimSettings, TrainConfig, parse_config
from memagent.rl.update.learner import Learner
from memagent.rl.weights.models import Snapshot, Trained, open_model, save_values
from tests.support.tiny_models import make_tiny_model
from tests.support.tiny_training import tiny_run


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    source = make_tiny_model(tmp_path / "llama", "llama")
    return parse_config(tiny_run(tmp_path, model={"source": str(source)}))


@pytest.fixture
def trained(config: TrainConfig) -> Trained:
    assert config.model.source is not None
    return open_model(config.model, config.model.source, seed=0)


def values_of(trained: Trained) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trained.parameters}


def disturb(trained: Trained) -> None:
    with torch.no_grad():
        for _, parameter in trained.parameters:
            parameter.add_(1.0)


async def test_a_backend_says_what_it_trains_and_gives_its_weights(
    config: TrainConfig, trained: Trained
) -> None:
    backend = LocalBackend(Learner(config, trained))
    assert backend.facts == ModelFacts.of(trained)
    assert backend.facts.num_trained == sum(one.numel() for _, one in trained.parameters)
    weights = await backend.weights()
    assert {name: one.data_ptr() for name, one in weights.items()} == {
        name: one.data_ptr() for name, one in trained.parameters
    }, "the parameters themselves"


async def test_a_phase_continues_with_the_optimizer_of_its_checkpoint(
    config: TrainConfig, trained: Trained, tmp_path: Path
) -> None:
    backend = LocalBackend(Learner(config, trained))
    optim = OptimSettings(lr=0.1)
    assert await backend.begin(optim, num_steps=9) == 0
    before = values_of(trained)
    for _ in range(2):
        await backend.update([], policy_version=0)
    await backend.save(tmp_path)
    disturb(trained)
    await backend.load(tmp_path, with_optimizer=True)
    assert all(torch.equal(before[name], one) for name, one in trained.parameters)
    assert await backend.begin(optim, num_steps=9) == 2
    await backend.load(tmp_path, with_optimizer=False)
    assert await backend.begin(optim, num_steps=9) == 0


@pytest.mark.parametrize("offload", [False, True])
def test_a_reference_is_in_place_inside_its_block_only(
    offload: bool, trained: Trained, tmp_path: Path
) -> None:
    start = values_of(trained)
    save_values(trained, tmp_path / "start.safetensors")
    disturb(trained)
    now = values_of(trained)
    reference = Snapshot.read(tmp_path / "start.safetensors", trained, offload=offload)
    with reference.in_place(trained):
        assert all(torch.equal(start[name], one) for name, one in trained.parameters)
    assert all(torch.equal(now[name], one) for name, one in trained.parameters)


async def test_a_cancellation_waits_for_work_that_cannot_be_interrupted() -> None:
    done: list[str] = []

    async def work() -> str:
        await asyncio.sleep(0.05)
        done.append("update")
        return "metrics"

    async def step() -> Any:
        result = await to_its_end(work())
        done.append(result)  # what follows without an await still happens
        await asyncio.sleep(0)
        done.append("next step")

    task = asyncio.create_task(step())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["update", "metrics"]

"""Optimizer steps: worked by hand, resumed bit for bit, and exact for low precision."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from memagent.errors import ConfigError, RunError
from memagent.rl.settings import OptimSettings
from memagent.rl.update.optim import Optimizer, lr_at

SETTINGS = OptimSettings(lr=0.1, max_grad_norm=1e9)
PRECISIONS = [torch.float64, torch.float32, torch.bfloat16]


def model(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.normal_(generator=generator)
    return layers.to(dtype)


def backward(layers: torch.nn.Module, seed: int) -> None:
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    dtype = next(layers.parameters()).dtype
    layers(inputs.to(dtype)).square().sum().backward()


def values(layers: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in layers.named_parameters()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def scalar(value: float, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor([value], dtype=dtype))


# --- the learning rate ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [1, 1, 1, 1, 1]),
        ({"warmup_steps": 3}, [0.25, 0.5, 0.75, 1, 1]),
        ({"warmup_steps": 9}, [0.1, 0.2, 0.3, 0.4, 0.5]),
        ({"schedule": "linear", "final_lr_share": 0.2}, [1, 0.8, 0.6, 0.4, 0.2]),
        (
            {"schedule": "linear", "final_lr_share": 0, "warmup_steps": 1},
            [0.5, 1, 2 / 3, 1 / 3, 0],
        ),
        (
            {"schedule": "cosine", "final_lr_share": 0},
            [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0],
        ),
        ({"schedule": "cosine", "final_lr_share": 0.5, "warmup_steps": 2}, [1 / 3, 2 / 3, 1, 0.75, 0.5]),
        ({"schedule": "linear", "warmup_steps": 4}, [0.2, 0.4, 0.6, 0.8, 1]),
    ],
)  # fmt: skip
def test_learning_rates_by_hand(changes: dict[str, Any], expected: list[float]) -> None:
    settings = OptimSettings(lr=2e-3, **changes)
    found = [lr_at(step, settings, num_steps=5) for step in range(5)]
    assert found == pytest.approx([2e-3 * share for share in expected], abs=1e-15)


def test_the_learning_rate_stays_at_its_end() -> None:
    settings = OptimSettings(lr=1.0, schedule="cosine", final_lr_share=0.25)
    assert lr_at(99, settings, num_steps=5) == 0.25
    assert lr_at(0, settings, num_steps=1) == 1.0


def test_the_schedule_advances_on_request_and_not_with_each_step() -> None:
    parameter = scalar(1.0)
    settings = OptimSettings(lr=1.0, warmup_steps=3)
    optimizer = Optimizer([("x", parameter)], settings, num_steps=10)
    rates = []
    for advances in (0, 1, 1, 0, 7):
        for _ in range(advances):
            optimizer.advance_schedule()
        parameter.grad = torch.ones(1)
        rates.append(optimizer.step()["lr"])
    assert rates == [0.25, 0.5, 0.75, 0.75, 1.0]
    assert optimizer.state_dict()["schedule_step"] == 9


# --- a step by hand -------------------------------------------------------------------------------


def test_two_steps_of_adamw_by_hand() -> None:
    parameter = scalar(1.0, torch.float64)
    settings = OptimSettings(lr=0.1, betas=(0.9, 0.99), weight_decay=0.5, max_grad_norm=1e9)
    optimizer = Optimizer([("x", parameter)], settings, num_steps=2)
    first, second, value = 0.0, 0.0, 1.0
    for number, gradient in enumerate([2.0, -1.0], start=1):
        parameter.grad = torch.tensor([gradient], dtype=torch.float64)
        assert optimizer.step() == {"lr": 0.1, "grad_norm": abs(gradient), "skipped": 0.0}
        assert parameter.grad is None
        first = 0.9 * first + 0.1 * gradient
        second = 0.99 * second + 0.01 * gradient**2
        value *= 1 - 0.1 * 0.5
        mean, spread = first / (1 - 0.9**number), second / (1 - 0.99**number)
        value -= 0.1 * mean / (math.sqrt(spread) + 1e-8)
        assert parameter.item() == pytest.approx(value, rel=1e-12)


def test_a_gradient_is_clipped_by_its_norm_which_is_reported_unclipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("memagent.rl.update.optim.EPSILON", 1e6)
    # with beta 0 and a large eps, a step is lr x gradient / eps: it shows the gradient that was used
    settings = OptimSettings(lr=1.0, betas=(0.0, 0.0), max_grad_norm=1.0)
    moved = []
    for scale in (1.0, 0.1):
        one, other = scalar(0.0, torch.float64), scalar(0.0, torch.float64)
        optimizer = Optimizer([("one", one), ("other", other)], settings, num_steps=1)
        one.grad = torch.tensor([3.0 * scale], dtype=torch.float64)
        other.grad = torch.tensor([4.0 * scale], dtype=torch.float64)
        assert optimizer.step()["grad_norm"] == pytest.approx(5.0 * scale)
        moved.append((-one.item() * 1e6, -other.item() * 1e6))
    assert moved[0] == pytest.approx((0.6, 0.8), rel=1e-5)
    assert moved[1] == pytest.approx((0.3, 0.4), rel=1e-5)


def test_low_precision_is_stepped_as_its_float32_copy_would_be() -> None:
    low, full = model(torch.bfloat16), model(torch.bfloat16).float()
    settings = OptimSettings(lr=1e-4, weight_decay=0.1)  # too small a step to show in bfloat16
    optimizer = Optimizer(low.named_parameters(), settings, num_steps=20)
    other = Optimizer(full.named_parameters(), settings, num_steps=20)
    before = values(low)
    for seed in range(20):
        backward(low, seed)
        for name, parameter in full.named_parameters():
            parameter.grad = optimizer._masters[name].grad.clone()  # type: ignore[union-attr]
        assert optimizer.step() == other.step()
        masters = dict(optimizer._masters)
        assert_same(masters, values(full))
        assert_same(values(low), {name: value.bfloat16() for name, value in masters.items()})
    assert not torch.equal(values(low)["0.weight"], before["0.weight"])


def test_gradients_of_many_passes_are_added_in_float32() -> None:
    parameter = scalar(1.0, torch.bfloat16)
    optimizer = Optimizer([("x", parameter)], SETTINGS, num_steps=1)
    for _ in range(1000):
        (parameter * 1.0).sum().backward()  # in bfloat16, 256 + 1 is 256
        assert parameter.grad is None
    assert optimizer.step()["grad_norm"] == 1000.0


def test_parameters_are_updated_in_place() -> None:
    for dtype in PRECISIONS:
        layers = model(dtype)
        addresses = [parameter.data_ptr() for parameter in layers.parameters()]
        optimizer = Optimizer(layers.named_parameters(), SETTINGS, num_steps=2)
        for seed in range(2):
            backward(layers, seed)
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        assert [parameter.data_ptr() for parameter in layers.parameters()] == addresses


def test_frozen_parameters_are_not_changed() -> None:
    layers = model()
    fixed = dict(layers.named_parameters())["0.weight"].requires_grad_(False)
    before = fixed.clone()
    optimizer = Optimizer(layers.named_parameters(), SETTINGS, num_steps=1)
    backward(layers, 0)
    optimizer.step()
    assert torch.equal(fixed, before)
    assert "exp_avg/0.bias" in optimizer.state_dict()
    assert "exp_avg/0.weight" not in optimizer.state_dict()


def test_a_model_without_trainable_parameters_is_refused() -> None:
    layers = model().requires_grad_(False)
    with pytest.raises(ConfigError, match=r"no trainable parameters; .* set `model\.lora_rank`"):
        Optimizer(layers.named_parameters(), SETTINGS, num_steps=1)


def test_a_closed_optimizer_leaves_gradients_to_the_next() -> None:
    layers = model(torch.bfloat16)
    first = Optimizer(layers.named_parameters(), SETTINGS, num_steps=1)
    second = Optimizer(layers.named_parameters(), SETTINGS, num_steps=1)
    with pytest.raises(AssertionError, match="close it first"):
        backward(layers, 0)
    first.close()
    backward(layers, 0)
    before = values(layers)
    assert second.step()["grad_norm"] > 0
    assert not torch.equal(values(layers)["0.weight"], before["0.weight"])


# --- gradients that are not finite ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype: torch.dtype, wrong: float) -> None:
    layers, other = model(dtype), model(dtype)
    settings = OptimSettings(lr=0.1, warmup_steps=5)
    optimizer = Optimizer(layers.named_parameters(), settings, num_steps=10)
    plain = Optimizer(other.named_parameters(), settings, num_steps=10)
    for seed in range(6):
        if seed % 3:  # twice in a row
            backward(layers, 99)
            (next(layers.parameters()) * wrong).sum().backward()
            assert optimizer.step()["skipped"] == 1.0
        else:
            backward(layers, seed)
            backward(other, seed)
            assert optimizer.step() == plain.step()
            optimizer.advance_schedule()
            plain.advance_schedule()
        assert_same(values(layers), values(other))


def test_three_skipped_steps_in_a_row_end_the_run() -> None:
    parameter = scalar(1.0)
    optimizer = Optimizer([("x", parameter)], SETTINGS, num_steps=10)
    for _ in range(2):
        parameter.grad = torch.tensor([math.nan])
        assert optimizer.step()["skipped"] == 1.0
    again = Optimizer([("x", parameter)], SETTINGS, num_steps=10)
    again.load_state_dict(optimizer.state_dict())  # the count is resumed
    parameter.grad = torch.tensor([math.inf])
    with pytest.raises(
        ConfigError, match=r"not finite in 3 consecutive steps; .* lower `optim\.lr`"
    ):
        again.step()
    assert parameter.item() == 1.0


# --- resuming --------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "safetensors"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """How a state is stored."""

    def keep(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if request.param == "memory":
            return {name: value.clone() for name, value in state.items()}
        save_file(state, tmp_path / "optimizer.safetensors")
        return load_file(tmp_path / "optimizer.safetensors")

    return keep


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_ten_steps_are_five_and_five(dtype: torch.dtype, kept: Any) -> None:
    settings = OptimSettings(lr=0.01, warmup_steps=2, schedule="cosine", weight_decay=0.1)
    whole = model(dtype)
    optimizer = Optimizer(whole.named_parameters(), settings, num_steps=10)
    metrics = []
    for seed in range(10):
        if seed == 5:
            state, weights = kept(optimizer.state_dict()), values(whole)
        backward(whole, seed)
        metrics.append(optimizer.step())
        optimizer.advance_schedule()
    rest = model(dtype, seed=1)
    rest.load_state_dict(weights)
    resumed = Optimizer(rest.named_parameters(), settings, num_steps=10)
    resumed.load_state_dict(state)
    assert_same(resumed.state_dict(), state)
    for seed in range(5, 10):
        backward(rest, seed)
        assert resumed.step() == metrics[seed]
        resumed.advance_schedule()
    assert_same(values(rest), values(whole))
    assert_same(resumed.state_dict(), optimizer.state_dict())


def test_a_loaded_state_is_copied() -> None:
    layers = model()
    optimizer = Optimizer(layers.named_parameters(), SETTINGS, num_steps=2)
    backward(layers, 0)
    optimizer.step()
    state = {name: value.clone() for name, value in optimizer.state_dict().items()}
    given = {name: value.clone() for name, value in state.items()}
    optimizer.load_state_dict(given)
    backward(layers, 1)
    optimizer.step()
    assert_same(given, state)


def test_a_parameter_without_a_gradient_is_saved_without_moments() -> None:
    used, unused = scalar(1.0), scalar(1.0)
    named = [("used", used), ("unused", unused)]
    optimizer = Optimizer(named, SETTINGS, num_steps=2)
    used.grad = torch.ones(1)
    optimizer.step()
    state = optimizer.state_dict()
    assert sorted(state) == [
        "exp_avg/used", "exp_avg_sq/used", "num_skipped", "schedule_step", "step/used",
    ]  # fmt: skip
    Optimizer(named, SETTINGS, num_steps=2).load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: torch.nn.Linear(4, 8), "exp_avg"),
        (lambda: model(torch.bfloat16), "master"),
        (lambda: torch.nn.Sequential(torch.nn.Linear(4, 9)), "exp_avg"),
    ],
    ids=["names", "precision", "shapes"],
)
def test_the_state_of_another_model_is_refused(make: Any, named: str) -> None:
    layers = model()
    optimizer = Optimizer(layers.named_parameters(), SETTINGS, num_steps=2)
    backward(layers, 0)
    optimizer.step()
    other = Optimizer(make().named_parameters(), SETTINGS, num_steps=2)
    with pytest.raises(RunError, match=f"has another model or precision: {named}"):
        other.load_state_dict(optimizer.state_dict())

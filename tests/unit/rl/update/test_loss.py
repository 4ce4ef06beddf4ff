"""The loss of each token, worked by hand. Ratios are given, log-probabilities follow from them."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch

from memagent.rl.settings import ObjectiveSettings
from memagent.rl.update.loss import (
    LossInputs,
    LossStats,
    k3,
    merged,
    policy_loss,
    summary,
    token_losses,
)

BEHAVIOUR = -2.0
RATIOS: tuple[Literal["token", "sequence"], ...] = ("token", "sequence")


def logs(*ratios: float, requires_grad: bool = False) -> torch.Tensor:
    """Log-probabilities that have these ratios to BEHAVIOUR."""
    values = [BEHAVIOUR + math.log(ratio) for ratio in ratios]
    return torch.tensor(values, dtype=torch.float64, requires_grad=requires_grad)


def same(count: int) -> torch.Tensor:
    return torch.full((count,), BEHAVIOUR, dtype=torch.float64)


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def losses(ratio: float, advantage: float, **settings: Any) -> tuple[float, float]:
    """The loss of one token, and its derivative by the log-probability."""
    logprobs = logs(ratio, requires_grad=True)
    inputs = LossInputs(logprobs, same(1), numbers(advantage))
    found = token_losses(inputs, ObjectiveSettings.parse(settings))
    found.policy.sum().backward()
    assert logprobs.grad is not None
    return found.policy.item(), logprobs.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: -A, and the gradient of -A log p
        (1.1, 2.0, -2.2, -2.2),  # within bounds: -r A
        (1.5, 2.0, -2.6, 0.0),  # above 1 + 0.3: -(1.3) 2, held
        (0.5, 2.0, -1.0, -1.0),  # below, but pushed up: min takes r A = 1
        (0.5, -2.0, 1.6, 0.0),  # below 1 - 0.2: -(0.8)(-2), held
        (1.5, -2.0, 3.0, 3.0),  # above, but pushed down: r A = -3
        (4.0, -2.0, 6.0, 0.0),  # r A = -8 is below 3 A = -6: dual clip holds
        (1.0, 0.0, 0.0, 0.0),  # no advantage, no gradient
    ],
)
def test_the_clipped_loss_of_a_token(
    ratio: float, advantage: float, loss: float, slope: float
) -> None:
    found = losses(ratio, advantage, clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    assert found == pytest.approx((loss, slope), abs=1e-12)


def test_without_dual_clip_the_loss_of_a_large_ratio_is_unbounded() -> None:
    assert losses(4.0, -2.0, dual_clip=None) == pytest.approx((8.0, 8.0))


@pytest.mark.parametrize("old", [False, True])
def test_sequence_ratios_are_those_of_gspo(old: bool) -> None:
    """Against the formula written with plain numbers, row by row; gradients by finite differences."""
    lengths, advantages = [3, 1, 4], [0.7, -1.2, 0.4]
    generator = torch.Generator().manual_seed(2)
    num = sum(lengths)
    behaviour = -torch.rand(num, generator=generator, dtype=torch.float64) - 0.5
    trainer = behaviour + 0.2 * torch.randn(num, generator=generator, dtype=torch.float64)
    logprobs = trainer + 0.3 * torch.randn(num, generator=generator, dtype=torch.float64)
    order = torch.randperm(num, generator=generator)  # rows of a pack are not in order
    rows = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    weights = torch.full((num,), 1 / num, dtype=torch.float64)
    settings = ObjectiveSettings(
        ratio="sequence", clip_low=0.05, clip_high=0.08, dual_clip=None, importance_cap=1.02
    )

    def reference(values: list[float]) -> float:
        start, total = 0, 0.0
        for length, advantage in zip(lengths, advantages, strict=True):
            places = range(start, start + length)
            base = trainer if old else behaviour
            ratio = math.exp(sum(values[n] - base[n].item() for n in places) / length)
            gap = sum(trainer[n].item() - behaviour[n].item() for n in places) / length
            weight = min(math.exp(gap), 1.02) if old else 1.0
            clipped = min(max(ratio, 0.95), 1.08)
            total -= weight * min(ratio * advantage, clipped * advantage) * length / num
            start += length
        return total

    asked = logprobs[order].clone().requires_grad_()
    inputs = LossInputs(
        asked,
        behaviour[order],
        torch.tensor(advantages, dtype=torch.float64)[rows][order],
        old=trainer[order] if old else None,
        rows=rows[order],
    )
    loss = policy_loss(inputs, weights, settings).loss
    assert loss.item() == pytest.approx(reference(logprobs.tolist()), abs=1e-14)
    loss.backward()
    assert asked.grad is not None
    for place, found in zip(order.tolist(), asked.grad.tolist(), strict=True):
        sides = []
        for step in (1e-6, -1e-6):
            values = logprobs.tolist()
            values[place] += step
            sides.append(reference(values))
        assert found == pytest.approx((sides[0] - sides[1]) / 2e-6, abs=1e-9)


def test_sequences_of_one_token_have_the_ratios_of_tokens() -> None:
    logprobs = logs(0.5, 1.0, 1.5)
    rows = torch.arange(3)
    inputs = LossInputs(logprobs, same(3), numbers(1.0, -1.0, 2.0), rows=rows)
    each = [token_losses(inputs, ObjectiveSettings(ratio=name)) for name in RATIOS]
    assert torch.equal(each[0].policy, each[1].policy)


def test_kl_is_the_third_estimator() -> None:
    # policy 0.5, reference 0.25: q/p - log(q/p) - 1 = 0.5 + log 2 - 1
    logprobs = torch.tensor([math.log(0.5)], dtype=torch.float64, requires_grad=True)
    found = k3(logprobs, numbers(math.log(0.25)))
    assert found.item() == pytest.approx(0.5 + math.log(2) - 1)
    found.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0.5)  # 1 - q/p
    assert k3(numbers(-3.0), numbers(-3.0)).item() == 0.0


def test_the_loss_is_a_weighted_sum_with_kl() -> None:
    # tokens: -1.1 and +1.0, weights 1/4; KL of the first: 0.5 + log 2 - 1, of the second 0
    logprobs = logs(1.1, 1.0)
    reference = logprobs + numbers(math.log(0.5), 0.0)
    result = policy_loss(
        LossInputs(logprobs, same(2), numbers(1.0, -1.0), reference=reference),
        numbers(0.25, 0.25),
        ObjectiveSettings(kl_coef=0.1),
    )
    kl = 0.5 + math.log(2) - 1
    assert result.loss.item() == pytest.approx(0.25 * (-1.1 + 1.0) + 0.25 * 0.1 * kl)
    metrics = summary(result.stats)
    assert metrics["kl"] == pytest.approx(kl / 2)
    assert metrics["loss_policy"] == pytest.approx(-0.025)


@pytest.mark.parametrize(
    ("weights", "loss"),
    [
        # a rollout of one token (loss -2) and one of three (loss 1 each)
        ((1 / 4, 1 / 4, 1 / 4, 1 / 4), (-2 + 3) / 4),  # mean over tokens
        ((1 / 2, 1 / 6, 1 / 6, 1 / 6), (-2 + 1) / 2),  # mean over rollouts
        ((1 / 20, 1 / 20, 1 / 20, 1 / 20), (-2 + 3) / 20),  # two rollouts, constant 10
    ],
)
def test_each_mean_follows_from_the_weights(weights: tuple[float, ...], loss: float) -> None:
    result = policy_loss(
        LossInputs(logs(1, 1, 1, 1), same(4), numbers(2, -1, -1, -1)),
        numbers(*weights),
        ObjectiveSettings(),
    )
    assert result.loss.item() == pytest.approx(loss)


# --- off-policy samples ---------------------------------------------------------------------


def test_recomputed_ratios_start_at_one_and_tokens_are_weighted_by_the_mismatch() -> None:
    # trainer / engine = 1.5, capped at 1.25, and 0.5; nothing was updated yet, so ratios are 1
    old = logs(1.5, 0.5)
    found = token_losses(
        LossInputs(old, same(2), numbers(1.0, 1.0), old=old), ObjectiveSettings(importance_cap=1.25)
    )
    assert found.ratio.tolist() == [1.0, 1.0]
    assert found.policy.tolist() == pytest.approx([-1.25, -0.5])
    assert found.log_mismatch.tolist() == pytest.approx([math.log(1.5), math.log(0.5)])


def test_without_a_cap_recomputed_tokens_all_weigh_one() -> None:
    old = logs(1.5)
    found = token_losses(
        LossInputs(old, same(1), numbers(1.0), old=old), ObjectiveSettings(importance_cap=None)
    )
    assert found.policy.item() == pytest.approx(-1.0)


def test_tokens_that_trainer_and_engine_disagree_about_are_masked() -> None:
    objective = ObjectiveSettings(mask=(0.5, 2.0))
    logprobs = logs(0.4, 0.6, 1.9, 2.1, requires_grad=True)
    reference = logs(0.8, 0.6, 3.8, 4.2)
    inputs = LossInputs(logprobs, same(4), numbers(-1, 1, -1, -1), reference=reference)
    found = token_losses(inputs, objective)
    assert found.is_masked.tolist() == [True, False, False, True]
    assert found.kl is not None
    assert found.kl.tolist() == pytest.approx([0.0, 0.0, 2 - math.log(2) - 1, 0.0])
    assert found.policy.tolist() == pytest.approx([0.0, -0.6, 1.9, 0.0])
    found.policy.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -0.6, 1.9, 0.0])


def test_extreme_differences_do_not_overflow() -> None:
    logprobs = torch.tensor([0.0, -1e4], requires_grad=True)
    result = policy_loss(
        LossInputs(
            logprobs,
            torch.tensor([-1e4, 0.0]),
            torch.tensor([-1.0, 1.0]),
            reference=torch.tensor([-1e4, 0.0]),
        ),
        torch.ones(2),
        ObjectiveSettings(kl_coef=0.1, dual_clip=None),
    )
    result.loss.backward()
    assert logprobs.grad is not None
    assert torch.isfinite(result.loss)
    assert torch.isfinite(logprobs.grad).all()


def test_drift_of_the_policy_masks_nothing_and_is_no_mismatch() -> None:
    # the engine agrees with the trainer before the step; updates have moved the policy by 4 and 0.25
    moved = LossInputs(logs(4.0, 0.25), same(2), numbers(1.0, 1.0), start=same(2))
    objective = ObjectiveSettings(mask=(0.5, 2.0))
    assert token_losses(moved, objective).is_masked.tolist() == [False, False]
    metrics = summary(policy_loss(moved, numbers(1, 1), objective).stats)
    assert metrics["mismatch_kl"] == metrics["mismatch_max"] == 0.0
    assert metrics["drift_max"] == pytest.approx(math.log(4))
    assert metrics["drift_kl"] == pytest.approx((4.25 - 2) / 2)
    assert metrics["masked"] == 0.0


# --- statistics ---------------------------------------------------------------------------------


def test_statistics_count_clipped_tokens() -> None:
    result = policy_loss(
        LossInputs(logs(1.5, 0.5, 4.0, 1.0), same(4), numbers(1, -1, -1, 1)),
        numbers(1, 1, 1, 1),
        ObjectiveSettings(),
        entropies=numbers(1.0, 2.0, 3.0, 4.0),
    )
    metrics = summary(result.stats)
    assert {name: metrics[name] for name in ("clip_high", "clip_low", "clip_dual", "masked")} == {
        "clip_high": 0.25,
        "clip_low": 0.25,
        "clip_dual": 0.25,
        "masked": 0.0,
    }
    assert metrics["ratio"] == pytest.approx(7 / 4)
    assert metrics["ratio_max"] == pytest.approx(4.0)
    assert metrics["entropy"] == pytest.approx(2.5)
    assert metrics["mismatch_max"] == pytest.approx(math.log(4))
    # r - log r - 1, over 1.5, 0.5, 4 and 1
    kl = (7.0 - math.log(1.5 * 0.5 * 4.0) - 4) / 4
    assert metrics["mismatch_kl"] == pytest.approx(kl)


def test_statistics_of_parts_add_up_to_those_of_the_whole() -> None:
    ratios, advantages = (1.5, 0.5, 4.0, 1.0, 0.9), (1.0, -1.0, -1.0, 1.0, -0.5)

    def stats(first: int, end: int) -> LossStats:
        inputs = LossInputs(
            logs(*ratios[first:end]), same(end - first), numbers(*advantages[first:end])
        )
        return policy_loss(inputs, numbers(*[0.2] * (end - first)), ObjectiveSettings()).stats

    parts = [stats(0, 2), stats(2, 2), stats(2, 5)]
    assert summary(merged(parts)) == pytest.approx(summary(stats(0, 5)))

"""Log-probabilities of chosen tokens, and their gradient, are those of log_softmax."""

import pytest
import torch

from memagent.rl.update.policy import chosen_logprobs, entropies

WHICH = torch.tensor([0, 0, 1, 3, 3, 3])
IDS = torch.tensor([4, 2, 2, 0, 6, 6])  # one token twice, as two equal rows have it


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_values_and_gradients_are_those_of_log_softmax(temperature: float) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(4, 7, dtype=torch.float64)).requires_grad_()
    found, total = chosen_logprobs(logits, WHICH, IDS, temperature)
    logprobs = (logits / temperature).log_softmax(-1)
    expected = logprobs[WHICH, IDS]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    grad = torch.randn(len(WHICH), dtype=torch.float64)
    (of_found,) = torch.autograd.grad(found, logits, grad)
    (of_expected,) = torch.autograd.grad(expected, logits, grad)
    torch.testing.assert_close(of_found, of_expected, rtol=0, atol=1e-12)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    torch.testing.assert_close(entropies(logits, total, temperature), entropy, rtol=0, atol=1e-12)


def test_half_precision_is_summed_in_single() -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(4, 5000)).bfloat16().requires_grad_()
    found, _ = chosen_logprobs(logits, WHICH, IDS)
    expected = logits.float().log_softmax(-1)[WHICH, IDS]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    (of_found,) = torch.autograd.grad(found.sum(), logits)
    (of_expected,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(of_found, of_expected, rtol=1e-2, atol=1e-6)

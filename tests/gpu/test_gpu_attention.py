"""Attention over trees on a GPU, in bfloat16: parts and blocks give what a CPU computes in float64.

Skipped without a GPU. What parts compute on a CPU is held against masks in
tests/unit/rl/update/test_part_attention.py.
"""

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from memagent.rl.update.attention import BLOCK, attend_in_parts, block_mask, plan_parts
from tests.support.rollouts import random_until

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SCALE = 0.125


def trees(seed: int, *, vocabulary: int) -> np.ndarray:
    """`until` of random trees, filled up to whole blocks by tokens that see themselves."""
    until = random_until(seed, vocabulary=vocabulary, num_rows=24, longest=300)
    places = np.arange(len(until), len(until) + -len(until) % BLOCK)
    return np.concatenate([until, places + 1])


def in_blocks(tensors: list[torch.Tensor], until: np.ndarray) -> torch.Tensor:
    mask = block_mask(torch.from_numpy(until).cuda())
    out = torch.compile(flex_attention)(
        *(one.transpose(0, 1)[None] for one in tensors),
        block_mask=mask,
        scale=SCALE,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("attention", ["parts", "blocks"])
@pytest.mark.parametrize(("seed", "vocabulary"), [(0, 2), (1, 3), (2, 1000)])
def test_attention_and_its_gradient_differ_by_rounding_alone(
    seed: int, vocabulary: int, attention: str
) -> None:
    until = trees(seed, vocabulary=vocabulary)
    torch.manual_seed(seed)
    exact = [torch.randn(len(until), heads, 64).bfloat16().double() for heads in (9, 3, 3)]
    half = [one.bfloat16().cuda() for one in exact]
    for one in (*exact, *half):
        one.requires_grad_()
    expected = attend_in_parts(exact[0], exact[1], exact[2], plan_parts(until), scale=SCALE)
    if attention == "parts":
        plan = plan_parts(until).to("cuda")
        found = attend_in_parts(half[0], half[1], half[2], plan, scale=SCALE)
    else:
        found = in_blocks(half, until)
    grad = torch.randn(expected.shape).bfloat16()
    references = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    given = [found, *torch.autograd.grad(found, half, grad.cuda())]
    for one, other in zip(given, references, strict=True):
        assert (one.cpu().double() - other).norm() / other.norm() < 1e-2

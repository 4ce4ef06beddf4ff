"""Parts without a mask add up to attention with one, whatever the tree."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from memagent.rl.update.attention import (
    MAX_LEVELS,
    TreeNode,
    attend_in_parts,
    fits_parts,
    nodes_of,
    plan_parts,
)
from tests.support.rollouts import dense_mask, random_until

WORKED = np.array([8, 8, 8, 5, 5, 8, 8, 8])
"""Rows A B C d e and A B C f g h."""


def test_nodes_of_the_worked_example() -> None:
    assert nodes_of(WORKED) == [TreeNode(0, 3, 8, 0), TreeNode(3, 5, 5, 1), TreeNode(5, 8, 8, 1)]
    plain = nodes_of(np.array([2, 2, 3, 4]))  # a row of two tokens, and two of one
    assert plain == [TreeNode(0, 2, 2, 0), TreeNode(2, 3, 3, 0), TreeNode(3, 4, 4, 0)]


def test_the_plan_of_the_worked_example() -> None:
    plan = plan_parts(WORKED)
    assert plan.sizes.tolist() == [[3, 0, 0, 3, 3], [1, 5, 3, 5, 3], *[[0] * 5] * (MAX_LEVELS - 1)]
    assert plan.places.tolist() == [3, 4, 5, 6, 7, 0, 1, 2, 0, 0]
    assert plan.bounds.tolist() == [0, 3, 5, 8, 0, 5, 0, 3]


@pytest.mark.parametrize("vocabulary", [2, 3, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_parts_equal_attention_with_a_mask(seed: int, vocabulary: int) -> None:
    until = random_until(seed, vocabulary=vocabulary)
    torch.manual_seed(seed)
    query, key, value = (
        torch.randn(len(until), heads, 16, dtype=torch.float64, requires_grad=True)
        for heads in (6, 3, 3)
    )
    found = attend_in_parts(query, key, value, plan_parts(until), scale=0.3)
    for_all = [part.repeat_interleave(2, dim=1).transpose(0, 1) for part in (key, value)]
    expected = F.scaled_dot_product_attention(
        query.transpose(0, 1), *for_all, attn_mask=dense_mask(torch.from_numpy(until)), scale=0.3
    ).transpose(0, 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    grad = torch.randn_like(found)
    parts, masked = (
        torch.autograd.grad(out, (query, key, value), grad) for out in (found, expected)
    )
    for one, other in zip(parts, masked, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_the_operation_can_be_compiled() -> None:
    plan = plan_parts(WORKED)
    tensors = [torch.randn(8, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    torch.library.opcheck(torch.ops.memagent.attend_in_parts.default, (*tensors, *plan, 0.25))


def test_deep_trees_do_not_fit_parts() -> None:
    assert fits_parts(WORKED)
    deep = random_until(0, vocabulary=2, num_rows=100)
    assert max(node.level for node in nodes_of(deep)) > MAX_LEVELS
    assert not fits_parts(deep)

"""The example of reinforcement learning in one file learns what it says it learns."""

import runpy
from pathlib import Path

import pytest

from tests.support.sizes import sized

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "minimal_rl.py"


@pytest.mark.parametrize("seed", range(sized(1, 3)))
def test_a_tiny_model_learns_to_keep_its_memory(
    seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = runpy.run_path(str(EXAMPLE))["train"](30, seed=seed)
    first, last = sum(rewards[:3]) / 3, sum(rewards[-5:]) / 5
    assert first < 0.75
    assert last > 0.85
    assert last > first + 0.2
    assert capsys.readouterr().out.startswith(f"step    0  reward {rewards[0]:.2f}  entropy")

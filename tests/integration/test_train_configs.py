"""The shipped training configs: all can be parsed, the small ones run, and their rewards rise."""

import os
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from memagent.rl.settings import read_config
from memagent.tracking import read_metrics

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(
    path for path in (ROOT / "configs" / "train").glob("**/*.toml") if "prompts" not in path.name
)
TINY = ("tiny_cpu", "tiny_calculator")
SHORT = (
    *("steps=2", "warm_start.steps=3", "rollout.prompts=4", "rollout.group_size=4"),
    *("validation.num=4", "validation.every=1"),
)
RISE = 0.2
"""By how much the reward of validation rises at least, in every one of the small configs."""


def train(name: str, folder: Path, *changes: str) -> list[dict[str, Any]]:
    """Train with a shipped config; its metrics."""
    command = [sys.executable, "-c", "from memagent.cli.main import main; main()", "train"]
    command += [str(ROOT / "configs" / "train" / f"{name}.toml"), "--run-dir", str(folder)]
    command += [word for change in changes for word in ("--set", change)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return read_metrics(folder)


def rewards(metrics: list[dict[str, Any]], kind: str) -> list[float]:
    return [record["reward"] for record in metrics if record["kind"] == kind]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_can_be_parsed_and_says_what_it_is_for(path: Path) -> None:
    assert read_config(path).about.strip()


@pytest.mark.parametrize("name", TINY)
def test_a_small_config_runs(name: str, tmp_path: Path) -> None:
    metrics = train(name, tmp_path / "run", *SHORT)
    kinds = [record["kind"] for record in metrics]
    assert kinds.count("warm_start") == 3
    assert kinds.count("train") == 2
    assert kinds.count("validation") == 3
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    "MEMAGENT_TEST_TRAINING" not in os.environ, reason="takes 20 minutes: make test-training"
)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", TINY)
def test_the_reward_of_a_small_config_rises(name: str, seed: int, tmp_path: Path) -> None:
    metrics = train(name, tmp_path / "run", f"seed={seed}")
    before, *_, after = rewards(metrics, "validation")
    assert after >= before + RISE
    rewards_in_training = rewards(metrics, "train")
    assert mean(rewards_in_training[-5:]) >= mean(rewards_in_training[:5]) + RISE

"""Draw the curves of a training run: rewards of steps, and of validations with their intervals.

python tools/draw_training.py RUN/metrics.jsonl curves.svg
python tools/draw_training.py FIRST/metrics.jsonl SECOND/metrics.jsonl curves.svg     # the second continues from the first
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt

from memagent.tracking import read_metrics

SMOOTH_STEPS = 5
COLOURS = ("#1b6ca8", "#c8553d", "#4a7c59")


def smoothed(values: list[float]) -> list[float]:
    """Each value with those before it, as a mean."""
    windows = [values[max(0, end - SMOOTH_STEPS) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


def draw(records: list[dict[str, Any]], out: Path) -> None:
    """Rewards on the left, validations on the right."""
    mpl.rcParams["svg.hashsalt"] = "memagent"  # the same records give the same bytes
    steps = [record for record in records if record["kind"] == "train"]
    checks = [record for record in records if record["kind"] == "validation"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    numbers = [record["step"] for record in steps]
    rewards = [record["reward"] for record in steps]
    left.plot(numbers, rewards, ".", color=COLOURS[0], alpha=0.4, label="one step")
    left.plot(numbers, smoothed(rewards), color=COLOURS[0], label=f"mean of {SMOOTH_STEPS}")
    left.set(xlabel="step", ylabel="reward", ylim=(0, 1), title="rollouts, sampled")
    left.legend(frameon=False, loc="lower left")
    tasks = sorted(name[: -len("/reward")] for name in checks[0] if name.endswith("/reward"))
    for task, colour in zip(tasks, COLOURS, strict=False):
        means = [record[f"{task}/reward"] for record in checks]
        low = [record[f"{task}/reward"] - record[f"{task}/reward_low"] for record in checks]
        high = [record[f"{task}/reward_high"] - record[f"{task}/reward"] for record in checks]
        where = [record["step"] for record in checks]
        right.errorbar(
            where, means, yerr=[low, high], color=colour, marker="o", capsize=3, label=task
        )
    right.set(xlabel="step", title="validation, 95 % intervals")
    right.legend(frameon=False, loc="center right")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def continued(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """The records of runs that continue one another, with steps counted from the first."""
    found: list[dict[str, Any]] = []
    for run in runs:
        before = max((record["step"] for record in found), default=0)
        found += [{**record, "step": record["step"] + before} for record in read_metrics(run)]
    return found


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python tools/draw_training.py RUN/metrics.jsonl... curves.svg")
    *files, figure = map(Path, sys.argv[1:])
    draw(continued([file.parent for file in files]), figure)

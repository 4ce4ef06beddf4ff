"""Progress of training on the console: a line for each step, and a bar for its rollouts."""

from __future__ import annotations

from typing import Self

from memagent.cli.shared.console import CommandConsole
from memagent.cli.shared.progress import ProgressFrame, duration
from memagent.rl.rollouts.collect import RolloutStats
from memagent.rl.trainer import TrainingCallbacks

SHOWN: dict[str, tuple[tuple[str, str, str], ...]] = {
    "warm_start": (("logprob", "log p", "+.3f"), ("lr", "lr", ".1e"), ("grad_norm", "grad", ".2f")),
    "train": (
        ("reward", "reward", ".3f"),
        ("best_reward", "best", ".2f"),
        ("signal", "signal", ".2f"),
        ("kl", "kl", ".4f"),
        ("mismatch_kl", "mismatch", ".1e"),
        ("entropy", "entropy", ".3f"),
        ("grad_norm", "grad", ".2f"),
        ("sharing", "sharing", ".1f"),
        ("num_failed", "failed", ".0f"),
    ),
}
"""Metrics of a line, by the kind of step: name, label, format."""
QUIET_WARM_STEPS = 10
"""Every how many steps of the warm start a line is printed."""
LEAST_SHARE = 0.1
"""Share of the rollouts after which their speed is shown: most are still under way when the first one ends."""


class TrainConsole(TrainingCallbacks):
    """Shows the progress of a run on the console."""

    def __init__(self, console: CommandConsole) -> None:
        self._frame = ProgressFrame(console, is_transient=True)
        self._num_steps = 0

    def __enter__(self) -> Self:
        self._frame.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._frame.__exit__(*exception)

    def on_phase(self, phase: str, *, num_done: int, num_steps: int) -> None:
        self._num_steps = num_steps
        if num_done:
            self._frame.print(f"{_title(phase)}: resumed after {num_done} of {num_steps} steps")

    def on_rollout(self, stats: RolloutStats, *, num_wanted: int) -> None:
        total = max(num_wanted, stats.num_rollouts)
        speed = f"{stats.sampled_tokens_per_second:,.0f} tokens/s"
        self._frame.show(
            f"{stats.num_rollouts} of {total} rollouts",
            completed=stats.num_rollouts,
            total=total,
            detail=speed if stats.num_rollouts >= total * LEAST_SHARE else "",
        )

    def on_step(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        self._frame.hide()
        if kind == "validation":
            self._frame.print(_validation_line(step, metrics))
            return
        is_shown = kind != "warm_start" or step % QUIET_WARM_STEPS == 0 or step == self._num_steps
        if is_shown:
            shown = [
                f"{title} {metrics[name]:{form}}"
                for name, title, form in SHOWN[kind]
                if name in metrics
            ]
            if metrics.get("num_failed_policy"):
                shown.append(f"by the policy {metrics['num_failed_policy']:.0f}")
            shown.append(duration(metrics["time/step"]))
            if step < self._num_steps:
                shown.append(f"left {duration(metrics['time/left'])}")
            self._frame.print(f"{_title(kind)} {step}/{self._num_steps}  {'  '.join(shown)}")

    def on_note(self, text: str) -> None:
        self._frame.print(f"note: {text}")


def _title(kind: str) -> str:
    return {"warm_start": "warm start", "train": "step"}[kind]


def _validation_line(step: int, metrics: dict[str, float]) -> str:
    where = f"validation after step {step}" if step else "validation before the first step"
    interval = f" ({metrics['reward_low']:.3f} to {metrics['reward_high']:.3f})"
    parts = [
        f"{name.removesuffix('/reward')} {value:.3f}"
        for name, value in metrics.items()
        if name.endswith("/reward")
    ]
    more = f"; {', '.join(parts)}" if len(parts) > 1 else ""
    failed = f"; failed {metrics['num_failed']:.0f} of {metrics['num_attempts']:.0f}"
    return f"{where}: reward {metrics['reward']:.3f}{interval}{more}{failed}"

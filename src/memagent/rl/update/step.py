"""The updates of a step: groups to rows, rows to packs, packs to gradients, gradients to weights.

    groups ──▶ split ──▶ rows_of ──▶ pack ──▶ accumulate ──▶ optimizer.step      once per update

    metrics = update(setup, groups, optimizer, reference, policy_version=12)

The old and reference log-probabilities of all updates are computed before the first one changes the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

from memagent.engines.local.loading import is_out_of_memory
from memagent.errors import ConfigError
from memagent.rl.settings import UpdateSettings
from memagent.rl.setup import Setup
from memagent.rl.types import Group
from memagent.rl.update.loss import LossStats, merged, summary, without_mismatch
from memagent.rl.update.optim import Optimizer
from memagent.rl.update.packing import Pack, num_row_tokens, pack
from memagent.rl.update.policy import accumulate, score
from memagent.rl.update.rows import StepRows, TrainingRow, rows_of, split_groups
from memagent.rl.weights.models import Snapshot


def update(
    setup: Setup,
    groups: Sequence[Group],
    optimizer: Optimizer,
    reference: Snapshot | None,
    *,
    policy_version: int,
) -> dict[str, float]:
    """Train on the groups of a step; its metrics. `policy_version` is that of the weights before it."""
    objective, settings = setup.config.objective, setup.config.update
    policy = setup.policy
    parts = split_groups(groups, min(settings.updates, len(groups))) if groups else []
    steps = [rows_of(part, objective, policy_version=policy_version) for part in parts]
    batches = [packed(step.rows, settings) for step in steps]
    old = scored = start = None
    if objective.old_logprobs == "recompute":
        old = [score(policy, packs) for packs in batches]
    elif objective.has_masks and len(batches) > 1:
        start = [score(policy, packs) for packs in batches]
    if reference is not None:
        with reference.in_place(setup.trained):
            scored = [score(policy, packs) for packs in batches]
    stats: list[LossStats] = []
    stepped = []
    for number, packs in enumerate(batches):
        if not packs:
            continue
        found = accumulate(
            policy,
            packs,
            objective,
            old=None if old is None else old[number],
            reference=None if scored is None else scored[number],
            start=None if start is None else start[number],
            with_entropy=True,
        )
        is_comparable = not stats or old is not None or start is not None
        stats.append(found if is_comparable else without_mismatch(found))
        stepped.append(optimizer.step())
    return {
        **(summary(merged(stats)) if stats else {}),
        **_mean(stepped),
        "num_updates": float(len(stepped)),
        "num_stale": float(sum(step.num_stale for step in steps)),
        "packed_tokens": float(sum(one.num_tokens for packs in batches for one in packs)),
        "sharing": _sharing(steps, batches),
    }


def packed(rows: Sequence[TrainingRow], settings: UpdateSettings) -> list[Pack]:
    """Rows, packed as the settings say."""
    return pack(rows, max_tokens=settings.max_tokens, share=settings.share_prefixes)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn an out-of-memory error into one that names the remedies."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            "the update does not fit the memory of the device; lower `update.max_tokens`, set "
            "`update.checkpointing=true`, or lower `rollout.engine_settings.cache_gb`, and resume the run"
        ) from None


def _mean(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over updates."""
    return {name: fmean(one[name] for one in metrics) for name in (metrics[0] if metrics else ())}


def _sharing(steps: Sequence[StepRows], batches: Sequence[Sequence[Pack]]) -> float:
    """Row tokens per packed token: how much shared prefixes save."""
    num_packed = sum(one.num_tokens for packs in batches for one in packs)
    return sum(num_row_tokens(step.rows) for step in steps) / num_packed if num_packed else 1.0

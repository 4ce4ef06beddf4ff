"""The updates of a step: groups to rows, rows to packs, packs to gradients, gradients to weights.

    groups ──▶ split ──▶ rows_of ──▶ pack ──▶ accumulate ──▶ optimizer.step      once per part

    numbers = update(setup, groups, optimizer, reference, version=12)

What ratios and KL are taken against is computed for all parts before the first of them changes the weights.
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
from memagent.rl.update.loss import merged, summary
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
    version: int,
) -> dict[str, float]:
    """Learn from the groups of a step; what it tells. `version` is that of the weights before it."""
    objective, settings = setup.config.objective, setup.config.update
    policy = setup.policy
    parts = split_groups(groups, min(settings.updates, len(groups))) if groups else []
    steps = [rows_of(part, objective, policy_version=version) for part in parts]
    batches = [packed(step.rows, settings) for step in steps]
    old = scored = None
    if objective.old_logprobs == "recompute":
        old = [score(policy, packs) for packs in batches]
    if reference is not None:
        with reference.in_place(setup.trained):
            scored = [score(policy, packs) for packs in batches]
    stats, told = [], []
    for number, packs in enumerate(batches):
        if not packs:
            continue
        stats.append(
            accumulate(
                policy,
                packs,
                objective,
                old=None if old is None else old[number],
                reference=None if scored is None else scored[number],
                with_entropy=True,
            )
        )
        told.append(optimizer.step(version))
    numbers = summary(merged(stats)) if stats else {}
    return {
        **numbers,
        **_mean(told),
        "num_updates": float(len(told)),
        "num_stale": float(sum(step.num_stale for step in steps)),
        "packed_tokens": float(sum(one.num_tokens for packs in batches for one in packs)),
        "sharing": _sharing(steps, batches),
    }


def packed(rows: Sequence[TrainingRow], settings: UpdateSettings) -> list[Pack]:
    """Rows as the settings want them packed."""
    return pack(rows, max_tokens=settings.max_tokens, share=settings.share_prefixes)


@contextmanager
def memory_errors() -> Iterator[None]:
    """An update that does not fit is told with its remedies."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            "the update does not fit the memory of the device; lower update.max_tokens, set "
            "update.checkpointing=true, or give the engine less with rollout.engine_settings.cache_gb, "
            "and go on with --resume"
        ) from None


def _mean(told: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means of what several updates tell."""
    return {name: fmean(one[name] for one in told) for name in (told[0] if told else ())}


def _sharing(steps: Sequence[StepRows], batches: Sequence[Sequence[Pack]]) -> float:
    """By how much shared prefixes make the updates shorter."""
    num_packed = sum(one.num_tokens for packs in batches for one in packs)
    return sum(num_row_tokens(step.rows) for step in steps) / num_packed if num_packed else 1.0

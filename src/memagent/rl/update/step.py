"""The updates of a step: groups to rows, rows to packs, packs to gradients, gradients to weights.

    groups ──▶ split ──▶ rows_of ──▶ pack ──▶ accumulate ──▶ optimizer.step      once per update

    metrics = update(config, policy, trained, groups, optimizer, reference, policy_version=12)

The old and reference log-probabilities of all updates are computed before the first one changes the weights.
Statistics are over all tokens: of rows without a gradient, which no update needs, a sample is scored and
counted for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import NamedTuple

from memagent.engines.local.loading import is_out_of_memory
from memagent.errors import ConfigError
from memagent.rl.settings import TrainConfig, UpdateSettings
from memagent.rl.types import Group
from memagent.rl.update.loss import LossStats, merged, scaled, summary, without_mismatch
from memagent.rl.update.optim import Optimizer
from memagent.rl.update.packing import Pack, num_row_tokens, pack
from memagent.rl.update.policy import Policy, accumulate, measure, score
from memagent.rl.update.ranks import ALONE, Ranks
from memagent.rl.update.rows import StepRows, TrainingRow, rows_of, split_groups
from memagent.rl.weights.models import Snapshot, Trained

IDLE_SHARE = 0.1
"""Tokens of rows without a gradient that are scored for statistics, per token that is trained on."""


def update(
    config: TrainConfig,
    policy: Policy,
    trained: Trained,
    groups: Sequence[Group],
    optimizer: Optimizer,
    reference: Snapshot | None,
    *,
    policy_version: int,
    ranks: Ranks = ALONE,
) -> dict[str, float]:
    """Train on the groups of a step; its metrics. `policy_version` is that of the weights before it.

    All `ranks` are called with the same groups, and each runs its share of the packs.
    """
    objective, settings = config.objective, config.update
    parts = split_groups(groups, min(settings.updates, len(groups))) if groups else []
    steps = [rows_of(part, objective, policy_version=policy_version) for part in parts]
    plans = [_Packs.of(step, settings) for step in steps]
    batches = [ranks.share(plan.trained) for plan in plans]
    idle = [ranks.share(plan.idle) for plan in plans]
    everything = [[*packs, *some] for packs, some in zip(batches, idle, strict=True)]
    old = scored = start = None
    if objective.old_logprobs == "recompute":
        old = [score(policy, packs) for packs in everything]
    elif objective.has_masks and len(batches) > 1:
        start = [score(policy, packs) for packs in everything]
    if reference is not None:
        with reference.in_place(trained):
            scored = [score(policy, packs) for packs in batches]
    stats: list[LossStats] = []
    stepped: list[dict[str, float]] = []
    for number, packs in enumerate(batches):
        is_comparable = not stepped or old is not None or start is not None
        own_old, own_start = (None if some is None else some[number] for some in (old, start))
        found = []
        if packs:
            found.append(
                accumulate(
                    policy,
                    packs,
                    objective,
                    old=own_old,
                    reference=None if scored is None else scored[number],
                    start=own_start,
                    with_entropy=True,
                    scale=ranks.num,
                )
            )
        if idle[number]:
            measured = measure(
                policy,
                idle[number],
                objective,
                old=None if own_old is None else own_old[len(packs) :],
                start=None if own_start is None else own_start[len(packs) :],
            )
            found.append(scaled(measured, plans[number].idle_factor))
        stats += found if is_comparable else map(without_mismatch, found)
        if packs:
            stepped.append(optimizer.step())
    return {
        **(summary(ranks.merged(merged(stats))) if stats else {}),
        **_mean(stepped),
        "num_updates": float(len(stepped)),
        "num_stale": float(sum(step.num_stale for step in steps)),
        "packed_tokens": float(sum(plan.num_tokens for plan in plans)),
        "sharing": _sharing(steps, plans),
    }


class _Packs(NamedTuple):
    """The packs of an update, of all ranks."""

    trained: list[Pack]
    idle: list[Pack]
    """Of some of the rows without a gradient."""
    idle_factor: float
    """How many tokens of such rows there are for each one in `idle`."""

    @property
    def num_tokens(self) -> int:
        return sum(one.num_tokens for one in (*self.trained, *self.idle))

    @classmethod
    def of(cls, step: StepRows, settings: UpdateSettings) -> _Packs:
        """Of the idle rows some, at most `IDLE_SHARE` of the tokens trained on, but at least one pack."""
        most = max(int(IDLE_SHARE * num_row_tokens(step.rows)), settings.max_tokens)
        some = sample_turns(step.idle, most)
        num_all, num_some = (
            sum(row.sample.num_sampled for row in rows) for rows in (step.idle, some)
        )
        factor = num_all / num_some if num_some else 1.0
        return cls(packed(step.rows, settings), packed(some, settings), factor)


def sample_turns(rows: Sequence[TrainingRow], max_tokens: int) -> list[TrainingRow]:
    """Rows of whole turns of groups, which share their prompts, at even distances; all of them if they fit."""
    turns: dict[tuple[int, int], list[TrainingRow]] = {}
    for row in rows:
        turns.setdefault((row.group, row.turn), []).append(row)
    stride = max(1, -(-num_row_tokens(rows) // max_tokens))
    return [row for key in sorted(turns)[::stride] for row in turns[key]]


def packed(rows: Sequence[TrainingRow], settings: UpdateSettings) -> list[Pack]:
    """Rows, packed as the settings say."""
    return pack(rows, max_tokens=settings.max_tokens)


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


def _sharing(steps: Sequence[StepRows], plans: Sequence[_Packs]) -> float:
    """Row tokens per packed token: how much shared prefixes save."""
    num_packed = sum(one.num_tokens for plan in plans for one in plan.trained)
    return sum(num_row_tokens(step.rows) for step in steps) / num_packed if num_packed else 1.0

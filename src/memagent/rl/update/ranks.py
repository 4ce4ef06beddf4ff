"""Processes that train one model together, as each of them sees the others.

    packs of an update ── share ──▶ own packs ──▶ own statistics ── merged ──▶ those of all ranks

A loss is a sum whose weights are known beforehand, so the packs of an update may be anywhere: gradients and
statistics add up to those of one process. FSDP2 averages gradients; losses are multiplied by `num`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from memagent.rl.update.loss import LossStats, merged
from memagent.rl.update.packing import Pack, share_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """One of several processes that train together."""

    rank: int = 0
    num: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this one writes what is written once."""
        return self.rank == 0

    def share(self, packs: Sequence[Pack]) -> list[Pack]:
        """The packs of this rank; every rank has the same number of them."""
        return list(packs) if self.num == 1 else share_out(packs, self.num)[self.rank]

    def merged(self, stats: LossStats) -> LossStats:
        """The statistics of all ranks together. All of them must call it."""
        if self.num == 1:
            return stats
        everyone: list[dict[str, float] | None] = [None] * self.num
        dist.all_gather_object(everyone, {name: value.item() for name, value in stats.items()})
        return merged(
            {name: torch.tensor(value, dtype=torch.float64) for name, value in one.items()}
            for one in everyone
            if one is not None
        )

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.num > 1:
            dist.barrier()


ALONE = Ranks()
"""A process that trains by itself."""

"""Trainer ranks in this process, to send weights to engine replicas on a cluster; in place of a `RankGroup`."""

import asyncio
from collections.abc import Sequence
from typing import Any

from memagent.rl.distributed.weights import Bucket, Route, TensorSpec, WeightSender, ship, specs_of


class DriverRanks:
    """As many senders as there are ranks, each with all weights."""

    on_gpu = False

    def __init__(self, weights: Sequence[tuple[str, Any]], *, num: int = 1) -> None:
        self.weights = weights
        self.num_changes = 0
        self.num_shipped = 0
        self.actors = [WeightSender() for _ in range(num)]

    def change(self, weights: Sequence[tuple[str, Any]]) -> None:
        self.weights = weights
        self.num_changes += 1

    async def announce(self) -> tuple[str, list[TensorSpec]]:
        return self.actors[0].meet("127.0.0.1"), specs_of(self.weights)

    async def send(self, routes: Sequence[Route | None], buckets: Sequence[Bucket]) -> str | None:
        sending = [
            asyncio.to_thread(actor.send, iter(self.weights), buckets, route, "cpu")
            for actor, route in zip(self.actors, routes, strict=True)
        ]
        reasons = await asyncio.gather(*sending)
        return next((reason for reason in reasons if reason is not None), None)

    async def ship(self) -> list[Any]:
        self.num_shipped += 1
        return ship(self.weights)

"""How GPUs are used: some train, some generate, or all do both in turn.

colocated   TTTTTTTT  then  EEEEEEEE     synchronous: engines sleep while the ranks train; a GPU each
separate    TTTEEEEE                     asynchronous: both go on, within a bound on staleness

What is proposed is what training takes: replicas of several GPUs have GPUs of their own, and run vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from memagent.errors import ConfigError
from memagent.rl.settings import ClusterSettings, TrainConfig

GPUS_PER_NODE = 8
STALENESS = 2
"""Bound on staleness of layouts that are proposed."""
TENSOR_PARALLEL = (1, 2, 4, 8)
SPLITS = 16
"""Splits that are tried, at most."""
MAX_FACTOR = 64
"""Times as many GPUs that are proposed, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A use of GPUs."""

    num_trainers: int
    num_replicas: int
    tensor_parallel: int = 1
    is_colocated: bool
    max_staleness: int = 0
    """0: synchronous."""
    offload_optimizer: bool = False
    offload_reference: bool = False

    @property
    def num_engine_gpus(self) -> int:
        return self.num_replicas * self.tensor_parallel

    @property
    def num_gpus(self) -> int:
        if self.is_colocated:
            return max(self.num_trainers, self.num_engine_gpus)
        return self.num_trainers + self.num_engine_gpus

    @property
    def num_nodes(self) -> int:
        return -(-self.num_gpus // GPUS_PER_NODE)

    @property
    def is_single(self) -> bool:
        """One process that trains and generates."""
        return self.is_colocated and self.num_gpus == 1

    def larger(self, place: str) -> Iterator[tuple[list[str], Layout]]:
        """Layouts with more room in a place, the closest first, and the settings that make them."""
        if place == "engine":
            yield from self._wider_replicas()
        elif not self.is_single:
            offloaded = replace(self, offload_reference=True)
            yield ["cluster.offload_reference=true"], offloaded
            offloaded = replace(offloaded, offload_optimizer=True)
            yield ["cluster.offload_reference=true", "cluster.offload_optimizer=true"], offloaded
        yield from self._more_gpus(place)

    def _wider_replicas(self) -> Iterator[tuple[list[str], Layout]]:
        """Larger replicas on the same GPUs; those of ranks on others, as many as the ranks have."""
        total = self.num_trainers if self.is_colocated else self.num_engine_gpus
        for size in TENSOR_PARALLEL:
            num_replicas = total // size
            if size > self.tensor_parallel and num_replicas >= 1:
                changes = [
                    f"cluster.tensor_parallel_size={size}",
                    f"cluster.engine_replicas={num_replicas}",
                ]
                if self.is_colocated:
                    changes.append("cluster.placement=separate")
                yield (
                    changes,
                    replace(
                        self, tensor_parallel=size, num_replicas=num_replicas, is_colocated=False
                    ),
                )

    def _more_gpus(self, place: str) -> Iterator[tuple[list[str], Layout]]:
        """Twice, four times ... as many trainer ranks; engines that share their GPUs grow with them."""
        factor = 2
        while factor <= MAX_FACTOR:
            grown = replace(self, num_trainers=factor * self.num_trainers)
            changes = [f"cluster.trainer_ranks={grown.num_trainers}"]
            if self.is_colocated:
                grown = replace(grown, num_replicas=factor * self.num_replicas)
                changes.append(f"cluster.engine_replicas={grown.num_replicas}")
                changes.append("cluster.placement=colocated")
            elif place == "engine":
                return
            yield changes, grown
            factor *= 2


def colocated(num_gpus: int) -> Layout:
    """All GPUs train and generate in turn."""
    return Layout(num_trainers=num_gpus, num_replicas=num_gpus, is_colocated=True)


def layout_of(config: TrainConfig, num_gpus: int | None = None) -> Layout:
    """The layout that a config names, on another number of GPUs if one is given."""
    if config.cluster is None:
        return colocated(num_gpus or 1)
    layout = _named(config.cluster, config)
    return layout if num_gpus in (None, layout.num_gpus) else _resized(layout, num_gpus)


def _named(cluster: ClusterSettings, config: TrainConfig) -> Layout:
    is_colocated = cluster.placement == "colocated"
    return Layout(
        num_trainers=cluster.trainer_ranks,
        num_replicas=cluster.engine_replicas,
        tensor_parallel=cluster.tensor_parallel_size,
        is_colocated=is_colocated,
        max_staleness=(config.objective.max_staleness or 0) if config.rollout.asynchronous else 0,
        offload_optimizer=cluster.offload_optimizer,
        offload_reference=cluster.offload_reference,
    )


def _resized(layout: Layout, num_gpus: int) -> Layout:
    """A layout in the same proportions on another number of GPUs."""
    size = min(layout.tensor_parallel, num_gpus)
    if layout.is_colocated or num_gpus == 1:
        return replace(
            layout,
            num_trainers=num_gpus,
            num_replicas=num_gpus // size,
            tensor_parallel=size,
            is_colocated=True,
            max_staleness=0,
        )
    trainers = round(num_gpus * layout.num_trainers / layout.num_gpus)
    trainers = min(max(1, trainers), num_gpus - size)
    if trainers < 1:
        raise ConfigError(
            f"{num_gpus} GPUs are too few for a trainer and an engine of {size}; lower "
            "`cluster.tensor_parallel_size`"
        )
    replicas = (num_gpus - trainers) // size
    return replace(layout, num_trainers=trainers, num_replicas=replicas, tensor_parallel=size)


def candidate_layouts(layout: Layout) -> list[Layout]:
    """Other uses of as many GPUs."""
    total = layout.num_gpus
    found = [replace(colocated(total), offload_optimizer=layout.offload_optimizer)]
    for size in TENSOR_PARALLEL:
        if size > total:
            continue
        stride = max(1, total // SPLITS)
        for num_trainers in range(stride, total, stride):
            num_replicas = (total - num_trainers) // size
            if num_replicas:
                found.append(
                    Layout(
                        num_trainers=num_trainers,
                        num_replicas=num_replicas,
                        tensor_parallel=size,
                        is_colocated=False,
                        max_staleness=STALENESS,
                    )
                )
    return found

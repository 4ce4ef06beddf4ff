"""`--cluster` and `--replicas`: work that is spread over the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import click

from memagent.cli.shared.engine import open_chosen
from memagent.cli.shared.options import all_options, panel_option
from memagent.cli.shared.run_command import CommandConsole
from memagent.cluster import Cluster, open_cluster
from memagent.engines.base import BaseEngine, EngineChoice
from memagent.errors import ConfigError

OpenEngine = Callable[[EngineChoice], Awaitable[BaseEngine]]
"""Opens an engine, on a cluster as copies."""
CLUSTER = "Cluster"
"""Heading of the help."""
cluster_option = panel_option(
    "--cluster",
    panel=CLUSTER,
    metavar="ADDRESS",
    help="Spread the work over a Ray cluster: HOST:PORT of its head node, or auto for the one in RAY_ADDRESS, "
    "else one of this machine alone.",
)
cluster_options = all_options(
    cluster_option,
    panel_option(
        "--replicas",
        type=click.IntRange(min=1),
        panel=CLUSTER,
        help="Copies of the engine on the cluster. [default: as many as it has GPUs for, else one on each node]",
    ),
)
"""`--cluster`, and how many copies of the engine run there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """What `cluster_options` were given."""

    cluster: str | None
    replicas: int | None


def check_replicas(options: ClusterOptions) -> None:
    """Raise ConfigError for replicas without a cluster."""
    if options.replicas is not None and options.cluster is None:
        raise ConfigError("`replicas` are copies on a cluster; name it with `cluster=ADDRESS`")


@contextmanager
def joined(address: str | None, console: CommandConsole) -> Iterator[Cluster | None]:
    """The cluster at an address; None without one."""
    if address is None:
        yield None
        return
    with open_cluster(address, on_note=console.report) as cluster:
        yield cluster


def engine_opener(
    cluster: Cluster | None, replicas: int | None, console: CommandConsole
) -> OpenEngine:
    """How engines are opened: on the cluster, or in this process."""

    async def opener(choice: EngineChoice) -> BaseEngine:
        if cluster is None:
            return open_chosen(choice, console)
        from memagent.engines.replicas import open_replicas

        engine = await open_replicas(cluster, choice, num=replicas, on_note=console.report)
        console.report(
            f"{engine.num_replicas} replicas of {choice.spec} on {cluster.num_nodes} nodes"
        )
        return engine

    return opener

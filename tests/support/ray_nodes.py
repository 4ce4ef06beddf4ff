"""A Ray cluster of several nodes on this machine: loopback only, CPU, small object stores.

Ray takes 127.0.0.1 for the address of the machine, which a sandbox may not route; 127.0.0.2 stays as it is.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LOOPBACK = "127.0.0.2"
STORE_BYTES = 100 * 1024 * 1024


@contextmanager
def ray_nodes(num_nodes: int = 2, *, num_cpus: int = 4) -> Iterator[Any]:
    """The cluster; this process is connected to it. Nodes can be added and removed."""
    with running_nodes(num_nodes, num_cpus=num_cpus) as cluster:
        import ray

        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        try:
            cluster.wait_for_nodes(timeout=60)
            yield cluster
        finally:
            ray.shutdown()


@contextmanager
def running_nodes(num_nodes: int = 2, *, num_cpus: int = 2, **settings: Any) -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster` that this process has not joined; `settings` are those of `add_node`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster()
    try:
        for _ in range(num_nodes):
            add_node(cluster, num_cpus=num_cpus, **settings)
        yield cluster
    finally:
        cluster.shutdown()


def add_node(cluster: Any, *, num_cpus: int = 2, num_gpus: int = 0, **settings: Any) -> Any:
    """A further node of a cluster, with settings of Ray's own."""
    return cluster.add_node(
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        node_ip_address=LOOPBACK,
        **settings,
    )

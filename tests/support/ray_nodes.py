"""A Ray cluster of several nodes on this machine: loopback only, CPU, small object stores."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STORE_BYTES = 100 * 1024 * 1024


@contextmanager
def ray_nodes(num_nodes: int = 2, *, num_cpus: int = 4) -> Iterator[Any]:
    """The cluster; this process is connected to it. Nodes can be added and removed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray
    from ray._private import ray_constants
    from ray.cluster_utils import Cluster

    ray_constants.ENABLE_RAY_CLUSTER = False  # Ray would take 127.0.0.1 for another address
    node = {
        "num_cpus": num_cpus,
        "num_gpus": 0,
        "node_ip_address": "127.0.0.1",
        "include_dashboard": False,
        "object_store_memory": STORE_BYTES,
    }
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        for _ in range(num_nodes - 1):
            cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        cluster.wait_for_nodes(timeout=60)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()

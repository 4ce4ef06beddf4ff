"""A Ray cluster of several nodes on this machine that this process has joined: loopback only, CPU.

Ray takes 127.0.0.1 for the address of the machine, which a sandbox may not route; 127.0.0.2 stays as it is.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LOOPBACK = "127.0.0.2"
STORE_BYTES = 100 * 1024 * 1024


@contextmanager
def joined_nodes(num_nodes: int = 2, *, num_cpus: int = 4) -> Iterator[Any]:
    """The cluster; nothing of it is left when the block ends."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster()
    try:
        for _ in range(num_nodes):
            cluster.add_node(
                num_cpus=num_cpus,
                object_store_memory=STORE_BYTES,
                include_dashboard=False,
                node_ip_address=LOOPBACK,
            )
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()

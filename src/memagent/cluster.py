"""A Ray cluster: join one or start one on this machine, reserve places in it, and leave nothing behind.

    with open_cluster("auto", connect_seconds=60, wait_seconds=300) as cluster:
        group = await cluster.place([{"GPU": 1, "CPU": 1}] * 8, what="8 trainer ranks")
        rank = Rank.options(**in_bundle(group, 0, {"GPU": 1, "CPU": 1})).remote()
        ...
        cluster.release(group)

`auto` joins the cluster in the variable RAY_ADDRESS, as inside `ray job submit`; without it a cluster of this
machine alone is started, which ends with the block, and with the process if that is killed. Everything that
waits has a limit, and says in one line what is missing when it is over. Actors of a program end with it.

Not here: what runs on the cluster. Training is in `rl/distributed`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from memagent.errors import ClusterError, ConfigError
from memagent.plugins import require

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

LOCAL_CLUSTER = "auto"
"""Address of a cluster that is started for the run."""
ADDRESS_VARIABLE = "RAY_ADDRESS"
LOOPBACK = "127.0.0.1"
Bundle = dict[str, float]
"""Resources that belong together on one node, such as {"GPU": 1, "CPU": 1}."""
COMPARED = ("memagent", "ray", "torch", "transformers", "numpy")
"""Libraries whose versions must be the same on all nodes."""
POLL_SECONDS = 0.2
NOTE_SECONDS = 2.0
"""After this long, a wait for resources is noted."""
OnClusterNote = Callable[[str], None]


@contextmanager
def open_cluster(
    address: str = LOCAL_CLUSTER,
    *,
    connect_seconds: float = 60.0,
    wait_seconds: float = 300.0,
    min_cpus: int = 0,
    object_store_gb: float | None = None,
    on_note: OnClusterNote = lambda text: None,
) -> Iterator[Cluster]:
    """The cluster at an address, within `connect_seconds`.

    A cluster that is started here has at least `min_cpus` CPUs, which may be more than the machine has: its
    processes then share them. A connection that this process has already is used, and stays.
    """
    require("ray", 'a cluster needs Ray; pip install "memagent[ray]"')
    import ray

    if ray.is_initialized():
        yield Cluster(wait_seconds=wait_seconds, on_note=on_note, is_local=False)
        return
    given = os.environ.get(ADDRESS_VARIABLE, "") if address == LOCAL_CLUSTER else address
    is_local = given in ("", "local", LOCAL_CLUSTER)
    # what Ray sends and prints is off, unless the user has set it; Ray reads it from the environment
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_DEDUP_LOGS"):
        os.environ.setdefault(name, "0")
    if is_local:
        _init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, min_cpus),
            object_store_memory=None if object_store_gb is None else int(object_store_gb * 1e9),
            include_dashboard=False,
            _node_ip_address=LOOPBACK,
        )
    else:
        _join(given, connect_seconds)
    try:
        if not is_local:
            check_versions(seconds=connect_seconds)
        yield Cluster(wait_seconds=wait_seconds, on_note=on_note, is_local=is_local)
    finally:
        ray.shutdown()


class Cluster:
    """A cluster that this process is connected to."""

    def __init__(self, *, wait_seconds: float, on_note: OnClusterNote, is_local: bool) -> None:
        self.wait_seconds = wait_seconds
        self.is_local = is_local
        """Whether it was started for this process, and ends with it."""
        self._on_note = on_note

    @property
    def has_gpus(self) -> bool:
        """Whether any node has a GPU."""
        return self.total("GPU") > 0

    def total(self, resource: str) -> float:
        """How much of a resource the nodes have together."""
        return float(_ray().cluster_resources().get(resource, 0.0))

    @property
    def num_nodes(self) -> int:
        """Nodes that are alive."""
        return len(node_ids())

    async def place(
        self,
        bundles: Sequence[Bundle],
        *,
        what: str,
        set_by: str = "`replicas`",
        strategy: str = "PACK",
    ) -> PlacementGroup:
        """Reserve bundles, waiting up to `wait_seconds` for nodes that have room.

        `what` names them in messages, such as "8 trainer ranks", and `set_by` the setting that says how many.
        Raises ClusterError when the time is over; nothing stays reserved then.
        """
        from ray.util.placement_group import placement_group, remove_placement_group

        group: PlacementGroup = placement_group(list(bundles), strategy=strategy)
        started, is_noted = monotonic(), False
        try:
            while not await asyncio.to_thread(group.wait, POLL_SECONDS):
                waited = monotonic() - started
                if waited > self.wait_seconds:
                    missing = self.missing(bundles, what, set_by)
                    raise ClusterError(f"{missing}; waited {waited:.0f} s")
                if waited > NOTE_SECONDS and not is_noted:
                    missing = self.missing(bundles, what, set_by)
                    self._on_note(f"{missing}; waiting up to {self.wait_seconds:.0f} s")
                    is_noted = True
        except BaseException:
            remove_placement_group(group)
            raise
        return group

    def release(self, group: PlacementGroup) -> None:
        """Give bundles back. Actors in them end."""
        from ray.util.placement_group import remove_placement_group

        with suppress(Exception):  # the cluster may be gone
            remove_placement_group(group)

    def missing(self, bundles: Sequence[Bundle], what: str, set_by: str) -> str:
        """What there is no room for, as one line."""
        names = sorted({name for bundle in bundles for name in bundle})
        needed = " and ".join(f"{sum(b.get(name, 0) for b in bundles):g} {name}" for name in names)
        free = _ray().available_resources()
        there = ", ".join(
            f"{free.get(name, 0.0):g} of {self.total(name):g} {name}" for name in names
        )
        return (
            f"{what} need {needed}; free in the cluster: {there} (nodes: {self.num_nodes}); add nodes, or "
            f"lower {set_by}"
        )


@contextmanager
def full_store_errors(what: str) -> Iterator[None]:
    """Raise ClusterError where the objects of a block do not fit into the object store and its disk."""
    from ray.exceptions import ObjectStoreFullError, OutOfDiskError

    try:
        yield
    except (ObjectStoreFullError, OutOfDiskError):
        raise ClusterError(full_store(what)) from None


def full_store(what: str) -> str:
    """One line for what did not fit into the object store."""
    return (
        f"the object store of the cluster and the disk behind it are full: no room for {what}; start its nodes "
        "with more memory for objects (ray start --object-store-memory BYTES), or free their disks"
    )


def in_bundle(group: PlacementGroup, index: int, resources: Mapping[str, float]) -> dict[str, Any]:
    """Options of an actor or task that runs in one bundle of a placement group with these resources."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=index
    )
    return {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "scheduling_strategy": strategy,
    }


def on_node(node_id: str) -> dict[str, Any]:
    """Options of an actor or task that runs on one node and reserves nothing."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
    }


def node_ids() -> list[str]:
    """Ids of the nodes that are alive."""
    return [str(node["NodeID"]) for node in _ray().nodes() if node["Alive"]]


def check_versions(*, seconds: float) -> None:
    """Raise ConfigError where a node has other versions of Python or the libraries than this process."""
    import ray
    from ray.exceptions import GetTimeoutError, NodeDiedError, RayError, TaskUnschedulableError

    here = versions()
    ask: Any = ray.remote(versions)
    asked = {node: ask.options(**on_node(node)).remote() for node in node_ids()}
    for node, answer in asked.items():
        try:
            there = ray.get(answer, timeout=seconds)
        except GetTimeoutError:
            raise ClusterError(
                f"node {node[:8]} of the cluster did not answer within {seconds:.0f} s"
            ) from None
        except (TaskUnschedulableError, NodeDiedError):
            continue  # it has just left
        except RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ConfigError(
                f"node {node[:8]} of the cluster cannot run memagent ({reason}); install the same packages "
                "on all nodes"
            ) from None
        if differ := version_differences(here, there):
            raise ConfigError(
                f"node {node[:8]} of the cluster has other versions: {differ}; install the same packages on "
                "all nodes"
            )


def version_differences(here: Mapping[str, str | None], there: Mapping[str, str | None]) -> str:
    """What two nodes have in other versions, as one line; empty if nothing."""
    wrong = [name for name in here if here[name] != there.get(name)]
    return ", ".join(
        f"{name} {there.get(name) or 'missing'} there, {here[name] or 'missing'} here"
        for name in wrong
    )


def versions() -> dict[str, str | None]:
    """Versions of Python and of the libraries that must be the same everywhere."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for library in COMPARED:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            found[library] = None
    return found


def _join(address: str, seconds: float) -> None:
    """Connect to a running cluster within the time."""
    end = monotonic() + seconds
    _check_listening(address, seconds)
    errors: list[Exception] = []

    def connect() -> None:
        try:
            _init(address=address)
        except Exception as error:
            errors.append(error)

    # a thread, because Ray waits without end for a program that listens and is no cluster
    connecting = threading.Thread(target=connect, daemon=True)
    connecting.start()
    connecting.join(max(end - monotonic(), POLL_SECONDS))
    if connecting.is_alive():
        raise ClusterError(
            f"what listens at {address} did not answer as a Ray cluster within {seconds:.0f} s; correct "
            "`cluster`"
        )
    if errors:
        _ray().shutdown()  # it may be half connected
        text = " ".join(str(errors[0]).split())[:300]
        if "version" in text.lower():
            raise ConfigError(f"the cluster at {address} has other versions: {text}")
        raise ClusterError(f"the cluster at {address} cannot be joined: {text}")


def _init(**options: Any) -> None:
    _ray().init(log_to_driver=False, logging_level=logging.ERROR, **options)


def _check_listening(address: str, seconds: float) -> None:
    """Raise ClusterError unless something listens at the address within the time."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"`cluster={address}` is not HOST:PORT, such as 10.0.0.1:6379, and not auto"
        )
    end = monotonic() + seconds
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=min(seconds, 5.0)):
                return
        except OSError as error:
            reason = error.strerror or str(error)
        if monotonic() > end:
            raise ClusterError(
                f"no cluster answers at {address} within {seconds:.0f} s ({reason}); start it, or "
                "correct `cluster`"
            )
        sleep(POLL_SECONDS)


def _ray() -> Any:
    """Ray, whose functions have no types."""
    import ray

    return ray

"""What is wrong with a cluster: one line within the stated time, and nothing left running."""

import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from memagent.cluster import Cluster, open_cluster, versions
from memagent.engines.base import choose_engine
from memagent.engines.replicas import open_replicas
from memagent.errors import ClusterError, ConfigError
from memagent.rl.agents.offload import WorkerPool
from tests.support.cluster_runs import train
from tests.support.ray_nodes import add_node, running_nodes
from tests.support.tiny_training import tiny_run

pytestmark = pytest.mark.cluster


@contextmanager
def within(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


def assert_nothing_runs(resource: str = "CPU") -> None:
    """Everything that was reserved is free again; this process is in the cluster."""
    end = time.monotonic() + 60
    while ray.available_resources().get(resource) != ray.cluster_resources()[resource]:
        assert time.monotonic() < end, ray.available_resources()
        time.sleep(0.2)


def test_a_node_with_another_library_is_named_with_both_versions(tmp_path: Path) -> None:
    other = tmp_path / "torch-9.9.9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    with running_nodes(1) as nodes:
        node = add_node(nodes, env_vars={"PYTHONPATH": str(tmp_path)})
        here = re.escape(str(versions()["torch"]))
        message = rf"node {node.node_id[:8]} .* other versions: torch 9.9.9 there, {here} here"
        with pytest.raises(ConfigError, match=message), open_cluster(nodes.address):
            raise AssertionError("it must not open")
        assert not ray.is_initialized()


def test_another_version_of_ray_in_the_cluster_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_nodes(1) as nodes:
        monkeypatch.setattr(ray, "__version__", "1.2.3")
        message = r"has other versions: .*[Vv]ersion mismatch.*1\.2\.3"
        with within(60), pytest.raises(ConfigError, match=message), open_cluster(nodes.address):
            raise AssertionError("it must not open")
        monkeypatch.undo()
        assert not ray.is_initialized()


def test_what_listens_and_is_no_cluster_is_reported_within_the_time() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.2", 0))
        silent.listen()
        address = f"127.0.0.2:{silent.getsockname()[1]}"
        message = f"what listens at {address} did not answer as a Ray cluster within 3 s"
        with within(20), pytest.raises(ClusterError, match=message):
            open_cluster(address, connect_seconds=3).__enter__()


def test_too_few_gpus_are_counted_and_nothing_stays_reserved(tmp_path: Path) -> None:
    with running_nodes(2, num_cpus=4, num_gpus=1) as nodes:
        cluster = {"address": nodes.address, "trainer_ranks": 3, "wait_seconds": 2}
        message = r"3 trainer ranks need 3 CPU and 3 GPU; free .* 2 of 2 GPU \(nodes: 2\)"
        with within(60), pytest.raises(ClusterError, match=message):
            train(tiny_run(tmp_path, cluster=cluster), tmp_path / "run")
        assert not (tmp_path / "run").exists()
        with open_cluster(nodes.address):
            assert_nothing_runs("GPU")


@pytest.fixture
def full_store() -> Iterator[Any]:
    """A cluster whose object store is full, and has no disk to spill to; this process is in it."""
    full_disk = {"local_fs_capacity_threshold": 0.0001, "automatic_object_spilling_enabled": False}
    settings = {"_system_config": full_disk}
    with running_nodes(1, num_cpus=4, **settings) as nodes, open_cluster(nodes.address):
        kept = []
        for size in (8_000_000, 500_000):
            for _ in range(100):
                try:
                    kept.append(ray.put(np.zeros(size, dtype=np.uint8)))
                except Exception:
                    break
        yield nodes


def test_a_full_object_store_ends_the_run_with_one_line(full_store: Any, tmp_path: Path) -> None:
    config = tiny_run(tmp_path, cluster={"trainer_ranks": 2}, warm_start=None, validation=None)
    config["model"]["scratch"]["hidden_size"] = 256
    message = r"the object store of the cluster and the disk behind it are full: no room for .* GB"
    with within(300), pytest.raises(ClusterError, match=message):  # most of it starts processes
        train(config, tmp_path / "run")
    assert_nothing_runs()


def length(text: bytes) -> int:
    return len(text)


async def test_what_a_function_gets_and_a_full_object_store_does_not_hold_is_one_line(
    full_store: Any,
) -> None:
    message = r"the disk behind it are full: no room for what a function gets or returns"
    with open_cluster() as cluster, WorkerPool.on_cluster(cluster, 1) as pool:
        assert await pool.run(length, b"short") == 5
        with within(120), pytest.raises(ClusterError, match=message):
            await pool.run(length, bytes(20_000_000))


async def test_an_evaluation_replica_that_never_gets_ready_is_reported_in_time(
    tmp_path: Path,
) -> None:
    silent = tmp_path / "vllm"  # stands in for a Python whose vLLM never answers
    silent.write_text('#!/bin/sh\ncase "$1" in -c) exit 0;; *) sleep 600;; esac\n')
    silent.chmod(0o755)
    settings = {
        "vllm_python": str(silent),
        "vllm_log_dir": str(tmp_path / "logs"),
        "start_seconds": 600,
    }
    with running_nodes(1) as nodes, open_cluster(nodes.address) as cluster:
        assert isinstance(cluster, Cluster)
        message = r"replica 0 of vllm:some/model was not ready within 5 s"
        with within(60), pytest.raises(ClusterError, match=message):
            await open_replicas(
                cluster, choose_engine("vllm:some/model", settings), num=1, start_seconds=5
            )
        assert_nothing_runs()

"""Tests on a Ray cluster of several nodes on this machine; most of them only with `make test-cluster`."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from memagent.cluster import Cluster
from tests.support.cluster_runs import train
from tests.support.ray_nodes import ray_nodes
from tests.support.replica_models import two_models
from tests.support.tiny_training import tiny_run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "MEMAGENT_TEST_CLUSTER" in os.environ:
        return
    skip = pytest.mark.skip(reason="only with make test-cluster")
    for item in items:
        if item.get_closest_marker("cluster"):
            item.add_marker(skip)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def alone(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    train(tiny_run(files), folder)
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_nodes(2):
        yield Cluster(wait_seconds=60, on_note=lambda text: None, is_local=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return two_models(tmp_path_factory.mktemp("models"))

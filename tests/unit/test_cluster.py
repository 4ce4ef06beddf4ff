"""Reaching a cluster: one line within the stated time, whatever is at the address."""

from __future__ import annotations

import socket
from time import monotonic

import pytest

from memagent.cluster import open_cluster, versions
from memagent.errors import ClusterError, ConfigError


def test_an_address_without_a_port_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"`cluster.address=somewhere` is not HOST:PORT"):
        open_cluster("somewhere").__enter__()


def test_a_cluster_that_nothing_answers_for_is_reported_within_the_time() -> None:
    started = monotonic()
    with socket.socket() as closed:
        closed.bind(("127.0.0.2", 0))
        address = f"127.0.0.2:{closed.getsockname()[1]}"
    with pytest.raises(ClusterError, match=f"no cluster answers at {address} within 1 s"):
        open_cluster(address, connect_seconds=1).__enter__()
    assert monotonic() - started < 10


def test_versions_name_python_and_the_libraries_of_training() -> None:
    assert list(versions()) == ["python", "memagent", "torch", "transformers", "numpy"]
    assert all(versions().values())

"""Reaching a cluster: one line within the stated time, whatever is at the address."""

import socket
from time import monotonic

import pytest

from memagent.cluster import open_cluster, version_differences, versions
from memagent.errors import ClusterError, ConfigError


def test_an_address_without_a_port_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"`cluster=somewhere` is not HOST:PORT"):
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
    assert list(versions()) == ["python", "memagent", "ray", "torch", "transformers", "numpy"]
    assert all(versions().values())


def test_other_versions_on_a_node_are_named() -> None:
    here = {"python": "3.11.7", "torch": "2.13.0", "numpy": "2.2.0"}
    assert version_differences(here, here) == ""
    there = {"python": "3.11.7", "torch": "2.12.1", "numpy": None}
    assert version_differences(here, there) == (
        "torch 2.12.1 there, 2.13.0 here, numpy missing there, 2.2.0 here"
    )
